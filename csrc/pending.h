// Launches whose verdict is not known yet. Where kernels run later than they are called, what is wrong comes to light
// at a moment of its own: each of these functions throws what Python makes of it (raise.h).
#pragma once
#include "raise.h"

#if defined(LOSSGUARD_WITH_CUDA)
#include <atomic>
#include <memory>

#include "cuda/runtime.h"

namespace lossguard::pending {

extern std::atomic<int64_t> count;  // of launches, and of findings that nobody has been told

// The call at `place` was launched, and its report, if there is one, will lie in `slot`; its backward will come with `saved`.
void add(const cuda::Place& place, cuda::Slot& slot, const void* saved, Call&& call);

void look(Moment);
// What has come to light, without waiting for more. Where nothing is pending, a plain load.
inline void poll(Moment moment) {
  if (count.load(std::memory_order_relaxed)) look(moment);
}

// The backward of the forward that saved `saved` begins: from now on it is the business of the thread that runs the
// backward, whose optimizer may get the gradients. Then as poll.
void begin_backward(const void* saved);

enum class Until {
  safe_to_step,  // the forwards whose gradients an optimizer of this thread may have
  own,           // this thread's
  all,
};
// Whether there is anything to wait for, or to note, before this thread steps an optimizer.
bool any_at_step();
// Waits for those launches, then as poll. At a step with the number of the optimizer, 0 if it has none.
void wait(Until, Moment, int64_t optimizer = 0);

// A thread that launches, steps, or both. Python hands it on to the threads in which torch runs a backward.
struct Thread {
  std::atomic<bool> alive{true};
  std::vector<int64_t> optimizers;  // the numbers of those it has stepped, the last one last; under the lock
};
const std::shared_ptr<Thread>& this_thread();

// module.cpp. The thread that called for the backward running now, if that is known; what makes it known from now on.
std::shared_ptr<Thread> thread_of_backward();
void watch_backwards();

}  // namespace lossguard::pending

#else

namespace lossguard::pending {
inline void poll(Moment) {}
inline void begin_backward(const void*) {}
}  // namespace lossguard::pending

#endif
