#include "elementwise.h"

#include "launchers.h"

namespace lossguard::cuda {
Error elementwise_forward(const ElementwiseLoss& a, const View& loss, const Place& place, Slot*& slot) {
  return forward(place, slot, [&](const Workspace& w) {
    return by_dtype(a.input.dtype, [&](auto t) {
      using T = decltype(t);
      return a.with_logits ? launch_bce_forward<T, true>(a, loss, place, w)
                           : launch_bce_forward<T, false>(a, loss, place, w);
    });
  });
}

Error elementwise_backward(const ElementwiseLoss& a, const View& grad, const View& out, const Place& place) {
  Gpu gpu;
  if (Error error = gpu_of(place, gpu)) return error;
  return by_dtype(a.input.dtype, [&](auto t) {
    using T = decltype(t);
    return a.with_logits ? launch_bce_backward<T, true>(a, grad, out, place, gpu)
                         : launch_bce_backward<T, false>(a, grad, out, place, gpu);
  });
}

}  // namespace lossguard::cuda
