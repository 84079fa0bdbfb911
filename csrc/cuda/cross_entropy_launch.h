// Which kernel a cross-entropy takes, by layout, number of classes and number of rows.
//
//   classes beside each other, odd rows of up to 128 bytes, dense flat stream through shared memory
//   .. up to 1024 classes (512 of float64)                        a group of lanes a row, in registers
//   .. above                                                      a block a row, or several
//   pixels beside each other, everything aligned                  16 bytes of pixels a thread
//   anything else                                                 a row a thread
// float64 takes neither the first nor the fourth: it is for checking, and its registers are few.
#pragma once
#include "cross_entropy_flat.h"
#include "cross_entropy_rows.h"
#include "cross_entropy_strided.h"
#include "row_plan.h"

namespace lossguard::cuda {

// Implemented in cross_entropy_<dtype>.cu, to be compiled side by side.
template <class T>
Error launch_ce_forward(const RowLoss&, const View& loss, const Place&, const Workspace&);
template <class T>
Error launch_ce_backward(const RowLoss&, const View& grad, const View& out, const Place&, const Gpu&);

// Lanes a row: four packs a lane, more once the warp is used up.
inline int group_for(int64_t packs) {
  int group = 2;
  while (group < kWarp && packs > 4 * group) group *= 2;
  return group;
}

template <class T, Spread kSpread>
Error forward_as(const RowPlan<T>& plan, const Finish& f, const Place& place, const Workspace& w) {
  const Rows& r = plan.rows;
  if constexpr (sizeof(T) < sizeof(double))
    if (plan.by_row() && plan.flat())
      return launch(ce_forward_flat<T, kSpread>, grid_for(w, blocks_for(r.n, kThreads)), place, r, plan.layout,
                    plan.logical, f);
  if (plan.by_row()) {
    const int64_t packs = plan.packs();
    if (packs <= kWarp * kHeldPacks<T>) {
      const int group = group_for(packs);
      return launch(ce_forward_in_registers<T, kSpread>, grid_for(w, blocks_for(r.n, kThreads / group)), place, r,
                    plan.layout, plan.logical, f, group);
    }
    // Fewer rows than multiprocessors: parts of rows, of a pack a thread at least.
    int splits = 1;
    if (r.n > 0 && r.n < w.multiprocessors)
      splits = int(std::min(w.max_blocks / r.n, packs / kThreads));
    return launch(ce_forward_by_block<T, kSpread>, splits > 1 ? int(r.n) * splits : grid_for(w, r.n), place, r,
                  plan.layout, plan.logical, f, std::max(splits, 1));
  }
  if constexpr (sizeof(T) < sizeof(double))
    if (plan.by_pixels() && !f.check_finite)
      return launch(ce_forward_strided<T, kSpread, Pack<T>::size>,
                    grid_for(w, blocks_for(r.n, kThreads * Pack<T>::size)), place, r, plan.layout, plan.logical, f);
  return launch(ce_forward_strided<T, kSpread, 1>, grid_for(w, blocks_for(r.n, kThreads)), place, r, plan.layout,
                plan.logical, f);
}

template <class T, Spread kSpread>
Error backward_as(const RowPlan<T>& plan, const Place& place, const Gpu& gpu) {
  const Rows& r = plan.rows;
  if constexpr (sizeof(T) < sizeof(double))
    if (plan.by_row() && plan.flat())
      return launch(ce_backward_flat<T, kSpread>, grid_for(gpu, blocks_for(r.n, kThreads)), place, r, plan.layout);
  if (plan.by_row()) {
    const int64_t packs = plan.packs();
    const int group = packs <= kWarp * kHeldPacks<T> ? group_for(packs) : kThreads;
    const int64_t stretches = blocks_for(packs, int64_t(group) * kHeldPacks<T>);
    return launch(ce_backward_rows<T, kSpread>, grid_for(gpu, blocks_for(r.n * stretches, kThreads / group)), place, r,
                  plan.layout, group, stretches);
  }
  if constexpr (sizeof(T) < sizeof(double))
    if (plan.by_pixels())
      return launch(ce_backward_strided<T, kSpread, Pack<T>::size>,
                    grid_for(gpu, blocks_for(r.n, kThreads * Pack<T>::size)), place, r, plan.layout);
  return launch(ce_backward_strided<T, kSpread, 1>, grid_for(gpu, blocks_for(r.n, kThreads)), place, r, plan.layout);
}

template <class T>
Error launch_ce_forward(const RowLoss& a, const View& loss, const Place& place, const Workspace& w) {
  const RowPlan<T> plan(a, a.flags.reduction == Reduction::none ? loss : View{}, View{});
  if (!plan.fits) return kTooManyDims;
  Finish f = make_finish(w, a.flags, a.saved, loss);
  f.zero_if_weightless = a.smoothing != 0;
  if (a.probabilities) {
    if (!a.weight) f.target_seen = plan.rows.n * plan.rows.classes;
    return forward_as<T, Spread::probabilities>(plan, f, place, w);
  }
  f.target_check = Check::class_index;
  return a.smoothing != 0 ? forward_as<T, Spread::labels>(plan, f, place, w)
                          : forward_as<T, Spread::none>(plan, f, place, w);
}

template <class T>
Error launch_ce_backward(const RowLoss& a, const View& grad, const View& out, const Place& place, const Gpu& gpu) {
  const RowPlan<T> plan(a, grad, out);
  if (!plan.fits) return kTooManyDims;
  if (plan.rows.n == 0 || plan.rows.classes == 0) return nullptr;
  if (a.probabilities) return backward_as<T, Spread::probabilities>(plan, place, gpu);
  return a.smoothing != 0 ? backward_as<T, Spread::labels>(plan, place, gpu)
                          : backward_as<T, Spread::none>(plan, place, gpu);
}

#define LOSSGUARD_INSTANTIATE_CE(T)                                                                      \
  template Error launch_ce_forward<T>(const RowLoss&, const View&, const Place&, const Workspace&);      \
  template Error launch_ce_backward<T>(const RowLoss&, const View&, const View&, const Place&, const Gpu&);

}  // namespace lossguard::cuda
