#include "launch.h"
#include "launchers.h"

namespace lossguard::cuda {

// cross_entropy_launch.h
template <class T>
Error launch_ce_forward(const RowLoss&, const View& loss, const Place&, const Workspace&);
template <class T>
Error launch_ce_backward(const RowLoss&, const View& grad, const View& out, const Place&, const Gpu&);

Error cross_entropy_forward(const RowLoss& a, const View& loss, const Place& place, Slot*& slot) {
  return forward(place, slot, [&](const Workspace& w) {
    return by_dtype(a.input.dtype, [&](auto t) { return launch_ce_forward<decltype(t)>(a, loss, place, w); });
  });
}

Error cross_entropy_backward(const RowLoss& a, const View& grad, const View& out, const Place& place) {
  Gpu gpu;
  if (Error error = gpu_of(place, gpu)) return error;
  return by_dtype(a.input.dtype, [&](auto t) { return launch_ce_backward<decltype(t)>(a, grad, out, place, gpu); });
}

}  // namespace lossguard::cuda
