// What a call checks and what it does about a violation.
//
// The integer `flags` of every op packs the reduction with the policy the caller spelled out; what
// the caller left open is taken from the calling thread's `guard`, else from `configure`.
#pragma once
#include <cstdint>
#include <vector>

namespace lossguard {

enum class Reduction : int32_t { none, mean, sum };
enum class OnViolation : int32_t { raise, warn, skip };
// automatic: immediately on the CPU, where the answer is at hand; deferred on CUDA, where it would have to be waited for.
enum class When : int32_t { automatic, immediately, deferred };

struct Policy {
  bool strict = true;         // also check what native CPU does not
  bool check_finite = false;  // also check logits and log-probabilities
  OnViolation on_violation = OnViolation::raise;
  When when = When::automatic;

  // Bits 0, 1, 2-3 and 4-5; python/lossguard/_policy.py packs the same way.
  int32_t pack() const {
    return int32_t(strict) | int32_t(check_finite) << 1 | int32_t(on_violation) << 2 | int32_t(when) << 4;
  }
  static Policy unpack(int32_t code) {
    return {bool(code & 1), bool(code >> 1 & 1), OnViolation(code >> 2 & 3), When(code >> 4 & 3)};
  }
};

// Bits of `flags`: 0-1 reduction, 2 float32 loss for half inputs (autocast), then per policy field a
// value that is 0 where the caller said nothing: 3-4 strict, 5-6 check_finite, 7-8 on_violation, 9-10 when (3: automatic);
// 11 a gradient may be asked for, 12 a forward that a backward computes anew, 13 a negative index counts from the end.
struct Flags {
  Reduction reduction;
  bool float_loss;
  Policy policy;
  bool needs_grad, recomputed, wraps;
};

Flags decode(int64_t flags);

namespace ambient {  // -1: no guard is active on this thread
int32_t get_default();
void set_default(int32_t code);
int32_t get_local();
void set_local(int32_t code);
// The sample of each vmap around the calls that this thread makes.
std::vector<int64_t>& samples();
}  // namespace ambient

}  // namespace lossguard
