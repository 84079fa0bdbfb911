// What ops call on the CPU: choose the kernels, finish the reduction, describe what is wrong.
#pragma once
#include "../losses.h"
#include "../report.h"

namespace lossguard::cpu {

// `loss`: the op's result, per element or row, or one number. Fills `saved`.
Violations elementwise_forward(const ElementwiseLoss&, const View& loss);
void elementwise_backward(const ElementwiseLoss&, const View& grad, const View& out);
Violations cross_entropy_forward(const RowLoss&, const View& loss);
void cross_entropy_backward(const RowLoss&, const View& grad, const View& out);
Violations nll_forward(const RowLoss&, const View& loss);
void nll_backward(const RowLoss&, const View& grad, const View& out);

}  // namespace lossguard::cpu
