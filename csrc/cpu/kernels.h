// The CPU kernels, one table per instruction set, and the launchers that choose among them.
#pragma once
#include "../losses.h"

namespace lossguard::cpu {

// Summed over fixed blocks in index order: the same for any number of threads.
struct Totals {
  double loss = 0;         // of the elements or rows that count
  double denominator = 0;  // their number, or the sum of their class weights
  int64_t bad = 0;         // elements or rows that failed a check

  Totals& operator+=(const Totals& o) {
    loss += o.loss;
    denominator += o.denominator;
    bad += o.bad;
    return *this;
  }
};

struct Kernels {
  const char* name;
  // `loss`: per element or row, or absent. Row losses also store lse in `saved` where it has room.
  Totals (*elementwise_forward)(const ElementwiseLoss&, const View& loss);
  // `grad`: of the loss, with strides of 0 where it is one number. `out`: like input.
  void (*elementwise_backward)(const ElementwiseLoss&, const View& grad, const View& out);
  Totals (*cross_entropy_forward)(const RowLoss&, const View& loss);
  void (*cross_entropy_backward)(const RowLoss&, const View& grad, const View& out);
  Totals (*nll_forward)(const RowLoss&, const View& loss);
  void (*nll_backward)(const RowLoss&, const View& grad, const View& out);
};

extern const Kernels kBaseline;
#if defined(LOSSGUARD_WITH_AVX2)
extern const Kernels kAvx2;
#endif

const Kernels& kernels();              // the best this processor has
bool choose_kernels(const char* name);  // for tests; false: unknown, or not on this processor
const char* const* kernel_names();     // those this processor can run, null at the end

}  // namespace lossguard::cpu
