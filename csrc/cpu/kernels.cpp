// One instruction set's table. setup.py compiles this file once for each, with the flags of the set,
// LOSSGUARD_ISA (a namespace) and LOSSGUARD_TABLE (the table's name).
#include "cross_entropy.h"
#include "elementwise.h"
#include "nll.h"

namespace lossguard::LOSSGUARD_ISA {
namespace {

bool is_double(const View& input) { return input.dtype == DType::f64; }

// clang-format off
Totals elementwise_forward_any(const ElementwiseLoss& a, const View& loss) {
  if (is_double(a.input)) return a.with_logits ? elementwise_forward<double, true>(a, loss) : elementwise_forward<double, false>(a, loss);
  return a.with_logits ? elementwise_forward<float, true>(a, loss) : elementwise_forward<float, false>(a, loss);
}
void elementwise_backward_any(const ElementwiseLoss& a, const View& grad, const View& out) {
  if (is_double(a.input)) return a.with_logits ? elementwise_backward<double, true>(a, grad, out) : elementwise_backward<double, false>(a, grad, out);
  return a.with_logits ? elementwise_backward<float, true>(a, grad, out) : elementwise_backward<float, false>(a, grad, out);
}
template <class A>
Totals cross_entropy_forward_as(const RowLoss& a, const View& loss) {
  if (a.probabilities) return cross_entropy_forward<A, Spread::probabilities>(a, loss);
  return a.smoothing != 0 ? cross_entropy_forward<A, Spread::labels>(a, loss) : cross_entropy_forward<A, Spread::none>(a, loss);
}
template <class A>
void cross_entropy_backward_as(const RowLoss& a, const View& grad, const View& out) {
  if (a.probabilities) return cross_entropy_backward<A, Spread::probabilities>(a, grad, out);
  return a.smoothing != 0 ? cross_entropy_backward<A, Spread::labels>(a, grad, out) : cross_entropy_backward<A, Spread::none>(a, grad, out);
}
Totals cross_entropy_forward_any(const RowLoss& a, const View& loss) {
  return is_double(a.input) ? cross_entropy_forward_as<double>(a, loss) : cross_entropy_forward_as<float>(a, loss);
}
void cross_entropy_backward_any(const RowLoss& a, const View& grad, const View& out) {
  return is_double(a.input) ? cross_entropy_backward_as<double>(a, grad, out) : cross_entropy_backward_as<float>(a, grad, out);
}
Totals nll_forward_any(const RowLoss& a, const View& loss) {
  return is_double(a.input) ? nll_forward<double>(a, loss) : nll_forward<float>(a, loss);
}
void nll_backward_any(const RowLoss& a, const View& grad, const View& out) {
  return is_double(a.input) ? nll_backward<double>(a, grad, out) : nll_backward<float>(a, grad, out);
}
// clang-format on

}  // namespace
}  // namespace lossguard::LOSSGUARD_ISA

#define LOSSGUARD_STRING_(x) #x
#define LOSSGUARD_STRING(x) LOSSGUARD_STRING_(x)

namespace lossguard::cpu {

const Kernels LOSSGUARD_TABLE = {
    LOSSGUARD_STRING(LOSSGUARD_ISA),           LOSSGUARD_ISA::elementwise_forward_any,
    LOSSGUARD_ISA::elementwise_backward_any,   LOSSGUARD_ISA::cross_entropy_forward_any,
    LOSSGUARD_ISA::cross_entropy_backward_any, LOSSGUARD_ISA::nll_forward_any,
    LOSSGUARD_ISA::nll_backward_any,
};

}  // namespace lossguard::cpu
