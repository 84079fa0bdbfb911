// The parts of cross-entropy that its kernels share: sums over a row that need one pass, the loss and the
// checks of a row, the gradient of a logit. math/cross_entropy.h has the formulas.
#pragma once
#include "rows.h"

namespace lossguard::cuda {

template <class A>
__device__ __forceinline__ A finite_or_zero(A m) {
  return m == kLowest<A> ? A(0) : m;
}
template <class A>
__device__ __forceinline__ bool is_finite(A v) {
  return v - v == A(0);
}

// Over some classes of a row, relative to their maximum m, or to 0 while that is -inf.
template <class A, Spread kSpread>
struct RowSums {
  A m = kLowest<A>;
  A sum = 0;               // of exp(x - m)
  A mass = 0, moment = 0;  // of v and v (x - m)
  A low = kHighest<A>;     // the smallest x, where that is asked for

  __device__ __forceinline__ void add(A x, A v) {
    const A shifted = x - finite_or_zero(m);
    sum += math::exp(shifted);
    if constexpr (kSpread != Spread::none) {
      mass += v;
      moment += math::moment_term(v, shifted);
    }
  }
  // What was summed becomes relative to a maximum that is not smaller.
  __device__ __forceinline__ void raise(A to) {
    const A by = finite_or_zero(m) - finite_or_zero(to);
    if (sum != A(0)) sum *= math::exp(by);
    if constexpr (kSpread != Spread::none) moment += math::moment_term(mass, by);
    m = to;
  }
  __device__ __forceinline__ void combine(RowSums other) {
    const A top = other.m > m ? other.m : m;
    raise(top);
    other.raise(top);
    sum += other.sum;
    mass += other.mass;
    moment += other.moment;
    low = other.low < low ? other.low : low;
  }
  // Over groups of `width` lanes; every lane gets the result.
  __device__ __forceinline__ void combine_lanes(int width) {
    raise(greatest_of(m, width));
    sum = sum_over(sum, width);
    if constexpr (kSpread != Spread::none) {
      mass = sum_over(mass, width);
      moment = sum_over(moment, width);
    }
    low = least_of(low, width);
  }
  __device__ __forceinline__ A lse() const { return math::log_sum_exp(finite_or_zero(m), sum); }
};

// v_c, by which x_c counts besides the label's own logit; w = 1 where there are no class weights.
template <class A, Spread kSpread>
__device__ __forceinline__ A spread_weight(const Rows& r, A q, A w) {
  if constexpr (kSpread == Spread::probabilities) return math::smoothed(q, w, A(1 - r.smoothing), A(r.spread));
  return w;
}
template <class A>
__device__ __forceinline__ bool probability_ok(const Rows& r, A q, A w) {
  return math::in_unit_interval(q, math::UnitBounds<A>{A(r.low), A(r.high)}) || w == A(0);
}

// A row as the thread that closes it knows it.
template <class A, Spread kSpread>
struct ClosedRow {
  RowState state = kIgnored;  // of labels
  bool bad_target = false;    // of probabilities
  int64_t label = -1;
  A x_label = 0, w_label = 0;
  RowSums<A, kSpread> sums;
};

// Loss of a row; accounts for it in the tally, and saves what the backward needs.
template <class A, Spread kSpread>
__device__ __forceinline__ void close_row(const Rows& r, const Finish& f, const int64_t (&at)[kRowOperands],
                                          const ClosedRow<A, kSpread>& row, RowTally<A, kSpread>& tally) {
  const A lse = row.sums.lse();
  RowState state = kSpread != Spread::probabilities ? row.state : row.bad_target ? kBad : kSound;
  A result(0);
  if (state == kSound && f.check_finite && r.classes && !is_finite(lse)) state = kBad;
  if (state == kBad) {
    result = A(f.of_bad);
  } else if (state == kSound && r.classes) {
    if constexpr (kSpread != Spread::probabilities)
      result = math::label_loss(lse, row.x_label, row.w_label, A(r.smoothing));
    if constexpr (kSpread != Spread::none) {
      const A spread = math::spread_loss(lse, finite_or_zero(row.sums.m), row.sums.mass, row.sums.moment);
      result = kSpread == Spread::labels ? result + A(r.spread) * spread : spread;
    }
    tally.denominator += kSpread == Spread::probabilities ? 1.0 : double(row.w_label);
  }
  tally.loss += result;
  if (r.result) r.result.store(at[kResultRow], result);
  r.lse.store(at[kLseRow], lse);
  if (kSpread != Spread::none && r.mass)
    r.mass.store(at[kLseRow], kSpread == Spread::probabilities && row.bad_target ? kLowest<A> : row.sums.mass);
}

// By the whole warp, seldom: the logits of one row that are not finite. -inf masks a class; a row with
// nothing else (lse = -inf) has no distribution.
template <class T, Spread kSpread, class A>
__device__ __forceinline__ void note_nonfinite(const Rows& r, const RowLayout& layout, const Layout<1>& logical,
                                               int64_t position, A lse, RowTally<A, kSpread>& tally, BlockScratch& s) {
  int64_t at[kRowOperands];
  layout.locate(position, at);
  const int64_t row = logical.locate(position);
  const T* const x_row = static_cast<const T*>(r.input.data) + at[kInputRow];
#pragma unroll 1
  for (int64_t begin = 0; begin < r.classes; begin += kWarp) {
    const int64_t c = begin + lane_id();
    const A x = c < r.classes ? widen<A>(x_row[c * r.input_stride]) : A(0);
    Kind kind = c < r.classes ? math::kind_of_nonfinite(x) : kValid;
    if (kind == kNegInf && lse != kLowest<A>) kind = kValid;
    if (c < r.classes && kind == kValid) tally.input.widen_range(x);
    if (__any_sync(kAllLanes, kind != kValid))
      tally.input.note(s.input_found[warp_id()], kind, element_index(r, row, c), double(x));
  }
}

// By the whole warp, a row or none a lane: accounts for the logits of rows that have no bad label.
template <class T, Spread kSpread, class A>
__device__ __forceinline__ void watch_logits(const Rows& r, const RowLayout& layout, const Layout<1>& logical,
                                             const Finish& f, bool has_row, int64_t position,
                                             const ClosedRow<A, kSpread>& row, RowTally<A, kSpread>& tally,
                                             BlockScratch& s) {
  if (!f.watch_input || !r.classes) return;
  const bool counts = has_row && (kSpread == Spread::probabilities || row.state == kSound);
  const A lse = row.sums.lse();
  const bool finite = is_finite(lse);
  if (counts) tally.input.seen += r.classes;
  if (counts && finite) {
    tally.input.widen_range(row.sums.low);
    tally.input.widen_range(row.sums.m);
  }
  unsigned bad = __ballot_sync(kAllLanes, counts && !finite);
#pragma unroll 1
  for (; bad; bad &= bad - 1) {
    const int lane = __ffs(int(bad)) - 1;
    note_nonfinite<T, kSpread>(r, layout, logical, broadcast_from(position, lane), broadcast_from(lse, lane), tally, s);
  }
}

// By the whole warp, seldom: bit j of `bad` marks the probability of class `class_of(j)` in the row
// `row_of(j)` steps behind `position`.
template <Spread kSpread, class A, class RowOf, class ClassOf>
__device__ __forceinline__ void note_probabilities(const Rows& r, const Layout<1>& logical, unsigned bad,
                                                   int64_t position, int64_t target_at, int64_t target_step,
                                                   const RowOf& row_of, const ClassOf& class_of,
                                                   RowTally<A, kSpread>& tally, BlockScratch& s) {
#pragma unroll 1
  for (int j = 0; __any_sync(kAllLanes, bad); ++j, bad >>= 1) {
    Kind kind = kValid;
    int64_t index = 0;
    A q(0);
    if (bad & 1) {
      const int64_t c = class_of(j);
      q = r.target.load<A>(target_at + row_of(j) * target_step + c * r.target_stride);
      kind = math::kind_of_probability(q, math::UnitBounds<A>{A(r.low), A(r.high)});
      index = element_index(r, logical.locate(position + row_of(j)), c);
    }
    if (__any_sync(kAllLanes, kind != kValid))
      tally.target.note(s.target_found[warp_id()], kind, index, double(q));
  }
}

// ---- backward

// d loss / d x_c = scaled_mass exp(x_c - lse) - scale v_c, less scaled_label at the label.
template <class A, Spread kSpread>
struct RowGrad {
  bool zero;  // ignored, or bad
  int64_t label = -1;
  A lse, scale, scaled_mass, scaled_label = 0;

  __device__ __forceinline__ A of(const Rows& r, int64_t c, A x, A q, A w) const {
    const A v = kSpread == Spread::none ? A(0)
                : kSpread == Spread::labels ? scale * A(r.spread) * w
                                            : scale * spread_weight<A, kSpread>(r, q, w);
    const A d = math::logit_grad(x, lse, scaled_mass, v);
    return zero ? A(0) : c == label ? d - scaled_label : d;
  }
  // From one lane of each group of `width` to the others.
  __device__ __forceinline__ void share(int width) {
    zero = broadcast_from(int(zero), 0, width);
    label = broadcast_from(label, 0, width);
    lse = broadcast_from(lse, 0, width);
    scale = broadcast_from(scale, 0, width);
    scaled_mass = broadcast_from(scaled_mass, 0, width);
    scaled_label = broadcast_from(scaled_label, 0, width);
  }
};

template <class A, Spread kSpread>
__device__ __forceinline__ RowGrad<A, kSpread> row_grad(const Rows& r, const int64_t (&at)[kRowOperands],
                                                       A denominator, bool check_finite) {
  RowGrad<A, kSpread> g;
  g.lse = r.lse.load<A>(at[kLseRow]);
  g.scale = r.result.load<A>(at[kResultRow]) / denominator;
  g.zero = check_finite && !is_finite(g.lse);
  if constexpr (kSpread == Spread::probabilities) {
    const A mass = r.mass.load<A>(at[kLseRow]);
    g.zero = g.zero || mass == kLowest<A>;  // a bad probability
    g.scaled_mass = g.scale * mass;
  } else {
    const int64_t label = r.target.load_label(at[kTargetRow]);
    if (state_of(r, label) == kSound) {
      g.label = label;
      g.scaled_label = g.scale * A(1 - r.smoothing) * r.weight.load_or(label * r.weight_stride, A(1));
    } else {
      g.zero = true;
    }
    g.scaled_mass = g.scaled_label;
    if constexpr (kSpread == Spread::labels)
      g.scaled_mass += g.scale * A(r.spread) * r.mass.load_or(at[kLseRow], A(r.classes));
  }
  return g;
}

}  // namespace lossguard::cuda
