#include "policy.h"

#include <atomic>

namespace lossguard {
namespace {
std::atomic<int32_t> process_default{Policy{}.pack()};
thread_local int32_t thread_override = -1;
}  // namespace

namespace ambient {
int32_t get_default() { return process_default.load(std::memory_order_relaxed); }
void set_default(int32_t code) { process_default.store(code, std::memory_order_relaxed); }
int32_t get_local() { return thread_override; }
void set_local(int32_t code) { thread_override = code; }
std::vector<int64_t>& samples() {
  static thread_local std::vector<int64_t> of_thread;
  return of_thread;
}
}  // namespace ambient

Flags decode(int64_t flags) {
  const int32_t code = thread_override >= 0 ? thread_override : ambient::get_default();
  const bool needs_grad = flags >> 11 & 1, recomputed = flags >> 12 & 1, wraps = flags >> 13 & 1;
  Flags f{Reduction(flags & 3), bool(flags >> 2 & 1), Policy::unpack(code), needs_grad, recomputed, wraps};
  const int strict = flags >> 3 & 3, finite = flags >> 5 & 3, action = flags >> 7 & 3, when = flags >> 9 & 3;
  if (strict) f.policy.strict = strict == 2;
  if (finite) f.policy.check_finite = finite == 2;
  if (action) f.policy.on_violation = OnViolation(action - 1);
  if (when) f.policy.when = When(when % 3);
  return f;
}

}  // namespace lossguard
