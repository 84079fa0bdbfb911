// Cross-entropy of one row of logits x, from its log-sum-exp.
//
// With class weights w and label smoothing e over C classes, a label t costs
//   (1 - e) w_t (lse - x_t) + e/C sum_c w_c (lse - x_c),
// and class probabilities q cost sum_c v_c (lse - x_c) with v_c = w_c ((1 - e) q_c + e/C).
// Sums over the row are kept relative to its running maximum m, so that large logits do not cancel.
#pragma once
#include "number.h"

namespace lossguard::math {

template <class V>
LG_HD V log_sum_exp(V m, V sum_of_exp) {
  return m + log(sum_of_exp);
}

// sum_c v_c (lse - x_c), given mass = sum_c v_c and moment = sum_c v_c (x_c - m).
template <class V>
LG_HD V spread_loss(V lse, V m, V mass, V moment) {
  return mass * (lse - m) - moment;
}
template <class V>
LG_HD V label_loss(V lse, V x_t, V w_t, V smoothing) {
  return (V(1) - smoothing) * w_t * (lse - x_t);
}

// One term of `moment`. A class without mass adds nothing, even at an infinite logit.
template <class V>
LG_HD V moment_term(V v, V x_minus_m) {
  return select(v == V(0), V(0), v * x_minus_m);
}
template <class V>
LG_HD V smoothed(V q, V w, V keep, V spread) {
  return w * (q * keep + spread);
}

// d/dx_c = scale (mass p_c - v_c), where p = softmax(x).
template <class V>
LG_HD V logit_grad(V x, V lse, V scaled_mass, V scaled_v) {
  return scaled_mass * exp(x - lse) - scaled_v;
}

}  // namespace lossguard::math
