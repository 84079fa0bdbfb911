// Launches whose verdict is not known yet. Where kernels run later than they are called, what is wrong comes to light
// at a moment of its own: each of these functions throws what Python makes of it (raise.h).
#pragma once
#include "raise.h"

#if defined(LOSSGUARD_WITH_CUDA)
#include <atomic>

#include "cuda/runtime.h"

namespace lossguard::pending {

extern std::atomic<int64_t> count;  // of launches, and of findings that nobody has been told

// The call at `place` was launched, and its report, if there is one, will lie in `slot`.
void add(const cuda::Place& place, cuda::Slot& slot, Call&& call);

void look(Moment);
// What has come to light, without waiting for more. Where nothing is pending, a plain load.
inline void poll(Moment moment) {
  if (count.load(std::memory_order_relaxed)) look(moment);
}

enum class Until {
  safe_to_step,  // the forwards whose gradients an optimizer of this thread may have
  own,           // this thread's
  all,
};
// Whether there is anything to wait for before this thread steps an optimizer, which it will be known to do.
bool any_at_step();
// Waits for those launches, then as poll.
void wait(Until, Moment);

}  // namespace lossguard::pending

#else

namespace lossguard::pending {
inline void poll(Moment) {}
}  // namespace lossguard::pending

#endif
