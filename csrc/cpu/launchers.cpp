#define LOSSGUARD_ISA baseline
#include "launchers.h"

#include <atomic>
#include <cstring>

#include "convert.h"
#include "kernels.h"
#include "scan.h"

namespace lossguard::cpu {
namespace {

const Kernels* const kTables[] = {
#if defined(LOSSGUARD_WITH_AVX2)
    &kAvx2,
#endif
    &kBaseline,
};

bool runs_here(const Kernels& table) {
#if defined(LOSSGUARD_WITH_AVX2)
  if (&table == &kAvx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("f16c");
#endif
  return &table == &kBaseline;
}

const Kernels* best() {
  for (const Kernels* table : kTables)
    if (runs_here(*table)) return table;
  return &kBaseline;
}
std::atomic<const Kernels*> chosen{nullptr};

// The reduced loss, and what the backward needs to know about the forward.
void finish(const Totals& totals, const Flags& flags, const View& saved, const View& loss) {
  double tail[kSavedTail];
  tail[kDenominator] = totals.denominator;
  tail[kStrict] = flags.policy.strict;
  tail[kCheckFinite] = flags.policy.check_finite;
  baseline::store_run(saved, saved.numel() - kSavedTail, 1, kSavedTail, tail);
  if (flags.reduction == Reduction::none) return;
  const double value = flags.reduction == Reduction::mean ? totals.loss / totals.denominator : totals.loss;
  baseline::store_run(loss, 0, 1, 1, &value);
}

View per_element(const Flags& flags, const View& loss) {
  return flags.reduction == Reduction::none ? loss : View{};
}

}  // namespace

const Kernels& kernels() {
  const Kernels* table = chosen.load(std::memory_order_relaxed);
  if (!table) chosen.store(table = best(), std::memory_order_relaxed);
  return *table;
}
bool choose_kernels(const char* name) {
  for (const Kernels* table : kTables)
    if (!std::strcmp(table->name, name) && runs_here(*table)) {
      chosen.store(table, std::memory_order_relaxed);
      return true;
    }
  return false;
}
const char* const* kernel_names() {
  static const char* names[sizeof(kTables) / sizeof(*kTables) + 1];
  static const bool filled = [] {
    int n = 0;
    for (const Kernels* table : kTables)
      if (runs_here(*table)) names[n++] = table->name;
    return true;
  }();
  (void)filled;
  return names;
}

Violations elementwise_forward(const ElementwiseLoss& a, const View& loss) {
  const Totals totals = kernels().elementwise_forward(a, per_element(a.flags, loss));
  finish(totals, a.flags, a.saved, loss);
  return totals.bad ? scan(a) : Violations{};
}
void elementwise_backward(const ElementwiseLoss& a, const View& grad, const View& out) {
  kernels().elementwise_backward(a, grad, out);
}
Violations cross_entropy_forward(const RowLoss& a, const View& loss) {
  Totals totals = kernels().cross_entropy_forward(a, per_element(a.flags, loss));
  // Labels of weight 0 alone: natively the smoothed mean is 0 / 0 plus a number over 0.
  if (a.smoothing != 0 && totals.denominator == 0) totals.loss = 0;
  finish(totals, a.flags, a.saved, loss);
  return totals.bad ? scan_cross_entropy(a) : Violations{};
}
void cross_entropy_backward(const RowLoss& a, const View& grad, const View& out) {
  kernels().cross_entropy_backward(a, grad, out);
}
Violations nll_forward(const RowLoss& a, const View& loss) {
  const Totals totals = kernels().nll_forward(a, per_element(a.flags, loss));
  finish(totals, a.flags, a.saved, loss);
  return totals.bad ? scan_nll(a) : Violations{};
}
void nll_backward(const RowLoss& a, const View& grad, const View& out) { kernels().nll_backward(a, grad, out); }

}  // namespace lossguard::cpu
