#include "elementwise.h"

#include "launchers.h"

namespace lossguard::cuda {
Error elementwise_forward(const ElementwiseLoss& a, const View& loss, const Place& place, Violations& found) {
  return forward(a.flags, place, found, [&](const Workspace& w, const MailHold& mail) {
    return by_dtype(a.input.dtype, [&](auto t) {
      using T = decltype(t);
      return a.with_logits ? launch_bce_forward<T, true>(a, loss, place, w, mail)
                           : launch_bce_forward<T, false>(a, loss, place, w, mail);
    });
  });
}

Error elementwise_backward(const ElementwiseLoss& a, const View& grad, const View& out, const Place& place) {
  Workspace w;
  if (Error error = workspace_of(place, w)) return error;
  return by_dtype(a.input.dtype, [&](auto t) {
    using T = decltype(t);
    return a.with_logits ? launch_bce_backward<T, true>(a, grad, out, place, w)
                         : launch_bce_backward<T, false>(a, grad, out, place, w);
  });
}

}  // namespace lossguard::cuda
