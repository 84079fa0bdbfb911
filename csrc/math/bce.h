// Binary cross-entropy of one element: from a probability, and from a logit.
#pragma once
#include "number.h"

namespace lossguard::math {

// -(y log p + (1 - y) log(1 - p)), both logarithms held at -100 as torch documents.
template <class V>
LG_HD V bce_loss(V p, V y) {
  const V floor(-100);
  return (y - V(1)) * max(log1p(-p), floor) - y * max(log(p), floor);
}
// d/dp. The floor 1e-12 of the divisor is torch's; in float or wider it never underflows.
template <class V>
LG_HD V bce_grad(V p, V y) {
  return (p - y) / max((V(1) - p) * p, V(1e-12));
}

// (1 - y) x + l softplus(-x) with l = 1 + (pos_weight - 1) y, regrouped around |x| so that nothing
// overflows or cancels: c |x| + l log(1 + exp(-|x|)). A factor of 0 makes an infinite logit cost 0.
template <class V>
LG_HD V bce_logits_loss(V x, V y, V pos_weight) {
  const V c = select(x >= V(0), V(1) - y, pos_weight * y);
  const V linear = select(c == V(0), V(0), c * abs(x));
  return linear + (V(1) + (pos_weight - V(1)) * y) * log1p(exp(-abs(x)));
}
// d/dx = (1 - y) - l sigmoid(-x) = l sigmoid(x) - pos_weight y, whichever does not cancel.
template <class V>
LG_HD V bce_logits_grad(V x, V y, V pos_weight) {
  const V e = exp(-abs(x));
  const V tail = (V(1) + (pos_weight - V(1)) * y) * (e / (V(1) + e));
  return select(x >= V(0), (V(1) - y) - tail, tail - pos_weight * y);
}

}  // namespace lossguard::math
