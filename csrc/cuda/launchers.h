// What ops call for CUDA tensors. Forwards fill `saved` and the loss; unless the policy is to skip, they
// wait for the stream and tell what is wrong. All return null, or what went wrong in CUDA's words.
#pragma once
#include "../losses.h"
#include "../report.h"
#include "runtime.h"

namespace lossguard::cuda {

Error elementwise_forward(const ElementwiseLoss&, const View& loss, const Place&, Slot*& slot);
Error elementwise_backward(const ElementwiseLoss&, const View& grad, const View& out, const Place&);
Error cross_entropy_forward(const RowLoss&, const View& loss, const Place&, Slot*& slot);
Error cross_entropy_backward(const RowLoss&, const View& grad, const View& out, const Place&);
Error nll_forward(const RowLoss&, const View& loss, const Place&, Slot*& slot);
Error nll_backward(const RowLoss&, const View& grad, const View& out, const Place&);

}  // namespace lossguard::cuda
