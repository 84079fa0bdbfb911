#include "nll.h"

#include "launchers.h"
#include "row_plan.h"

namespace lossguard::cuda {

Error nll_forward(const RowLoss& a, const View& loss, const Place& place, Slot*& slot) {
  return forward(place, slot, [&](const Workspace& w) {
    return by_dtype(a.input.dtype, [&](auto t) -> Error {
      using T = decltype(t);
      const RowPlan<T> plan(a, a.flags.reduction == Reduction::none ? loss : View{}, View{});
      if (!plan.fits) return kTooManyDims;
      Finish f = make_finish(w, a.flags, a.saved, loss);
      f.target_check = Check::class_index;
      f.classes = plan.rows.classes;
      f.inner = plan.rows.inner;
      return launch(nll_forward_rows<wide_t<T>>, grid_for(w, blocks_for(plan.rows.n, kThreads)), place, plan.rows,
                    plan.layout, plan.logical, f);
    });
  });
}

Error nll_backward(const RowLoss& a, const View& grad, const View& out, const Place& place) {
  Gpu gpu;
  if (Error error = gpu_of(place, gpu)) return error;
  return by_dtype(a.input.dtype, [&](auto t) -> Error {
    using T = decltype(t);
    const RowPlan<T> plan(a, grad, out);
    const Rows& r = plan.rows;
    if (!plan.fits) return kTooManyDims;
    if (r.n == 0 || r.classes == 0) return nullptr;
    if (plan.dense_out()) {
      const int rows = int(std::clamp<int64_t>(kSpikeTile / r.classes, 1, kThreads));
      const int64_t parts = rows > 1 ? 1 : blocks_for(r.classes, kSpikeTile);
      return launch(nll_backward_flat<T>, grid_for(gpu, blocks_for(r.n, rows) * parts), place, r, plan.layout, rows);
    }
    if constexpr (sizeof(T) < sizeof(double))
      if (plan.out_by_pixels())
        return launch(nll_backward_strided<T, Pack<T>::size>,
                      grid_for(gpu, blocks_for(r.n, kThreads * Pack<T>::size)), place, r, plan.layout);
    return launch(nll_backward_strided<T, 1>, grid_for(gpu, blocks_for(r.n, kThreads)), place, r, plan.layout);
  });
}

}  // namespace lossguard::cuda
