// Cross-entropy where the classes of a row lie beside each other.
//
// Up to 32 x 32 classes, a group of lanes has a row in registers: all loads come before the maths. Above,
// a block has a row, or part of one where there are fewer rows than multiprocessors, and goes over it once
// with a running maximum. 16-byte accesses at any alignment: the packs that a row only partly fills are
// loaded and stored element by element.
#pragma once
#include "cross_entropy.h"

namespace lossguard::cuda {

// Elements of a row that a thread holds at once.
template <class T>
constexpr int kHeld = sizeof(T) == 8 ? 16 : 32;
template <class T>
constexpr int kHeldPacks = kHeld<T> / Pack<T>::size;

// A row of `classes` elements cut at 16-byte boundaries: element e of pack p is class p size - past + e.
template <class T>
struct RowPacks {
  static constexpr int size = Pack<T>::size;
  const T* row;
  int past;
  int64_t classes;

  __device__ __forceinline__ RowPacks(const void* data, int64_t at, int64_t classes)
      : row(static_cast<const T*>(data) + at),
        past(int(reinterpret_cast<uintptr_t>(row) / sizeof(T) % size)),
        classes(classes) {}
  __device__ __forceinline__ int64_t count() const { return (classes + past + size - 1) / size; }
  __device__ __forceinline__ int64_t first(int64_t pack) const { return pack * size - past; }
};

// f(c, j) for those of `size` classes from `first` on that exist.
template <int size, class F>
__device__ __forceinline__ void for_classes(int64_t first, int64_t classes, const F& f) {
#pragma unroll
  for (int j = 0; j < size; ++j)
    if (first + j >= 0 && first + j < classes) f(first + j, j);
}
template <int size>
__device__ __forceinline__ bool is_whole(int64_t first, int64_t classes) {
  return first >= 0 && first + size <= classes;
}

// `size` elements from p on, as packs where they lie on a 16-byte boundary; only those that exist.
template <int size, class S, class A>
__device__ __forceinline__ void load_run(const S* p, int64_t first, int64_t classes, A (&to)[size]) {
  constexpr int per_pack = Pack<S>::size < size ? Pack<S>::size : size;
  if (is_whole<size>(first, classes) && reinterpret_cast<uintptr_t>(p + first) % sizeof(Pack<S>) == 0) {
#pragma unroll
    for (int i = 0; i < size; i += per_pack) {
      const Pack<S> pack = load_pack(p + first + i);
#pragma unroll
      for (int j = 0; j < per_pack; ++j) to[i + j] = widen<A>(pack.v[j]);
    }
  } else {
    for_classes<size>(first, classes, [&](int64_t c, int j) { to[j] = widen<A>(p[c]); });
  }
}

// Class probabilities and class weights lie in the dtype of the input or, under autocast, in float32.
template <class T, int size, class A>
__device__ __forceinline__ void load_beside(const Operand& o, int64_t at, int64_t first, int64_t classes, A (&to)[size]) {
  if (sizeof(T) < sizeof(float) && o.dtype == DType::f32)
    load_run(static_cast<const float*>(o.data) + at, first, classes, to);
  else
    load_run(static_cast<const T*>(o.data) + at, first, classes, to);
}

// Adds the classes of one pack, whose logits are x, to the sums. Returns the mask of bad probabilities.
template <class T, Spread kSpread, class A>
__device__ __forceinline__ unsigned add_pack(const Rows& r, const Finish& f, const int64_t (&at)[kRowOperands],
                                             int64_t first, const A* x, RowSums<A, kSpread>& sums,
                                             RowTally<A, kSpread>& tally) {
  constexpr int size = Pack<T>::size;
  unsigned bad = 0;
  if constexpr (kSpread == Spread::none) {
#pragma unroll
    for (int j = 0; j < size; ++j) sums.add(x[j], A(0));  // exp(-inf) = 0 where there is no class
  } else {
    A w[size], q[size];
#pragma unroll
    for (int j = 0; j < size; ++j) w[j] = q[j] = A(1);
    if (r.weight) load_beside<T>(r.weight, 0, first, r.classes, w);
    if constexpr (kSpread == Spread::probabilities) load_beside<T>(r.target, at[kTargetRow], first, r.classes, q);
    for_classes<size>(first, r.classes, [&](int64_t, int j) {
      if constexpr (kSpread == Spread::probabilities) {
        if (f.strict) {
          const bool ok = probability_ok(r, q[j], w[j]);
          bad |= unsigned(!ok) << j;
          if (r.weight) tally.target.seen += w[j] != A(0);
          if (ok && w[j] != A(0)) tally.target.widen_range(q[j]);
        }
      }
      sums.add(x[j], spread_weight<A, kSpread>(r, q[j], w[j]));
    });
  }
  return bad;
}

// The packs first_pack, first_pack + step, .. of a row into the sums of this thread. With `width` > 1 their
// maximum is that of a group of lanes, who all call.
template <class T, Spread kSpread, class A>
__device__ __forceinline__ void add_packs(const Rows& r, const Layout<1>& logical,
                                          const Finish& f, bool inside, int64_t position,
                                          const int64_t (&at)[kRowOperands], const RowPacks<T>& packs,
                                          int64_t first_pack, int64_t end_pack, int step, int width,
                                          RowSums<A, kSpread>& sums, bool& bad_target, RowTally<A, kSpread>& tally,
                                          BlockScratch& s) {
  constexpr int size = Pack<T>::size;
  A x[kHeldPacks<T>][size];
#pragma unroll
  for (int u = 0; u < kHeldPacks<T>; ++u) {
    const int64_t pack = first_pack + u * step;
#pragma unroll
    for (int j = 0; j < size; ++j) x[u][j] = kLowest<A>;
    if (inside && pack < end_pack) load_run(packs.row, packs.first(pack), r.classes, x[u]);
  }
  A top = sums.m;
#pragma unroll
  for (int u = 0; u < kHeldPacks<T>; ++u)
#pragma unroll
    for (int j = 0; j < size; ++j) top = math::max(x[u][j], top);
  sums.raise(width > 1 ? greatest_of(top, width) : top);
  unsigned bad = 0;
#pragma unroll
  for (int u = 0; u < kHeldPacks<T>; ++u) {
    const int64_t pack = first_pack + u * step;
    if (!(inside && pack < end_pack)) continue;
    if (f.watch_input)
      for_classes<size>(packs.first(pack), r.classes, [&](int64_t, int j) {
        if (x[u][j] < sums.low) sums.low = x[u][j];
      });
    bad |= add_pack<T, kSpread>(r, f, at, packs.first(pack), x[u], sums, tally) << (u * size);
  }
  if constexpr (kSpread == Spread::probabilities) {
    bad_target = bad_target || bad;
    if (__any_sync(kAllLanes, bad))
      note_probabilities<kSpread>(
          r, logical, bad, position, at[kTargetRow], 0, [](int) { return 0; },
          [&](int j) { return packs.first(first_pack + j / size * step) + j % size; }, tally, s);
  }
}

// Label, and what is read at the label, of the row at `position`.
template <class T, Spread kSpread, class A>
__device__ __forceinline__ void read_label(const Rows& r, const int64_t (&at)[kRowOperands],
                                           ClosedRow<A, kSpread>& row) {
  if constexpr (kSpread != Spread::probabilities) {
    row.label = r.target.load_label(at[kTargetRow]);
    row.state = state_of(r, row.label);
    if (row.state != kSound) return;
    row.x_label = widen<A>(static_cast<const T*>(r.input.data)[at[kInputRow] + row.label]);
    row.w_label = r.weight.load_or(row.label * r.weight_stride, A(1));
  }
}

// What remains of a row when its sums are known: by the whole warp, `closes` in the lane that has the row.
template <class T, Spread kSpread, class A>
__device__ __forceinline__ void close(const Rows& r, const RowLayout& layout, const Layout<1>& logical,
                                      const Finish& f, bool closes, int64_t position,
                                      const int64_t (&at)[kRowOperands], const ClosedRow<A, kSpread>& row,
                                      RowTally<A, kSpread>& tally, BlockScratch& s) {
  if constexpr (kSpread != Spread::probabilities) {
    const bool bad = closes && watch_label(row.state, row.label, tally);
    if (__any_sync(kAllLanes, bad)) note_labels(r, logical, bad, position, at[kTargetRow], 0, tally, s);
  }
  watch_logits<T, kSpread>(r, layout, logical, f, closes, position, row, tally, s);
  if (closes) close_row(r, f, at, row, tally);
}

// A row per group of 2, 4, .. 32 lanes.
template <class T, Spread kSpread>
__global__ void __launch_bounds__(kThreads, 2)
    ce_forward_in_registers(const Rows r, const RowLayout layout, const Layout<1> logical, const Finish f, int group) {
  using A = wide_t<T>;
  LG_SHARED(BlockScratch, scratch);
  RowTally<A, kSpread> tally;
  const int rows_at_once = kThreads / group, lane = int(threadIdx.x) % group;
  for (int64_t begin = int64_t(blockIdx.x) * rows_at_once; begin < r.n; begin += int64_t(gridDim.x) * rows_at_once) {
    const int64_t position = begin + int(threadIdx.x) / group;
    const bool inside = position < r.n;
    int64_t at[kRowOperands] = {};
    if (inside) layout.locate(position, at);
    const RowPacks<T> packs(r.input.data, at[kInputRow], r.classes);
    ClosedRow<A, kSpread> row;
    if (inside && lane == 0) read_label<T>(r, at, row);
    add_packs<T>(r, logical, f, inside, position, at, packs, lane, packs.count(), group, group, row.sums,
                 row.bad_target, tally, scratch);
    row.sums.combine_lanes(group);
    if (kSpread == Spread::probabilities) row.bad_target = greatest_of(int(row.bad_target), group);
    close<T>(r, layout, logical, f, inside && lane == 0, position, at, row, tally, scratch);
  }
  finish<TargetValue<kSpread>>(tally, f, scratch);
}

template <class A, Spread kSpread>
struct SumsOfWarps {
  RowSums<A, kSpread> sums[kWarps];
};

// A row, or one of `splits` parts of it, per block. With parts, the last block closes the rows.
template <class T, Spread kSpread>
__global__ void __launch_bounds__(kThreads, sizeof(T) < sizeof(double) ? 2 : 1)
    ce_forward_by_block(const Rows r, const RowLayout layout, const Layout<1> logical, const Finish f, int splits) {
  using A = wide_t<T>;
  using Warps = SumsOfWarps<A, kSpread>;
  LG_SHARED(BlockScratch, scratch);
  LG_SHARED(Warps, warps);
  RowTally<A, kSpread> tally;
  for (int64_t item = blockIdx.x; item < r.n * splits; item += gridDim.x) {
    const int64_t position = item / splits;
    int64_t at[kRowOperands];
    layout.locate(position, at);
    const RowPacks<T> packs(r.input.data, at[kInputRow], r.classes);
    const int64_t part = (packs.count() + splits - 1) / splits, begin_pack = item % splits * part;
    const int64_t end_pack = begin_pack + part < packs.count() ? begin_pack + part : packs.count();
    ClosedRow<A, kSpread> row;
    if (threadIdx.x == 0 && splits == 1) read_label<T>(r, at, row);
    // An ignored row needs no logits, unless somebody wants their probabilities.
    const bool skip = kSpread != Spread::probabilities && splits == 1 &&
                      __syncthreads_or(threadIdx.x == 0 && row.state != kSound);
    constexpr int step = kThreads * kHeldPacks<T>;
    for (int64_t begin = begin_pack; begin < end_pack && !skip; begin += step)
      add_packs<T>(r, logical, f, true, position, at, packs, begin + threadIdx.x, end_pack, kThreads, 1,
                   row.sums, row.bad_target, tally, scratch);
    row.sums.combine_lanes(kWarp);
    if (lane_id() == 0) warps.sums[warp_id()] = row.sums;
    row.bad_target = __syncthreads_or(row.bad_target);
    if (threadIdx.x == 0)
      for (int w = 1; w < kWarps; ++w) row.sums.combine(warps.sums[w]);
    if (splits == 1) {
      if (warp_id() == 0) close<T>(r, layout, logical, f, threadIdx.x == 0, position, at, row, tally, scratch);
    } else if (threadIdx.x == 0) {
      double* const values = f.scratch.splits + item * kSplitValues;
      values[0] = double(row.sums.m);
      values[1] = double(row.sums.sum);
      values[2] = row.bad_target ? kLowest<double> : double(row.sums.mass);
      values[3] = double(row.sums.moment);
      values[4] = double(row.sums.low);
    }
    __syncthreads();
  }
  if (splits == 1) {
    finish<TargetValue<kSpread>>(tally, f, scratch);
    return;
  }
  using V = TargetValue<kSpread>;
  sum_tally<V>(tally, f, scratch);
  contribute_block<V>(&scratch, int(blockIdx.x));
  if (!arrive(scratch)) return;
  RowTally<A, kSpread> closing;
  for (int64_t begin = 0; begin < r.n; begin += kThreads) {
    const int64_t position = begin + threadIdx.x;
    const bool inside = position < r.n;
    int64_t at[kRowOperands] = {};
    ClosedRow<A, kSpread> row;
    if (inside) {
      layout.locate(position, at);
      read_label<T>(r, at, row);
      for (int i = 0; i < splits; ++i) {
        const double* const values = f.scratch.splits + (position * splits + i) * kSplitValues;
        RowSums<A, kSpread> part;
        part.m = A(values[0]);
        part.sum = A(values[1]);
        row.bad_target = row.bad_target || values[2] == kLowest<double>;
        part.mass = A(values[2]);
        part.moment = A(values[3]);
        part.low = A(values[4]);
        row.sums.combine(part);
      }
    }
    close<T>(r, layout, logical, f, inside, position, at, row, closing, scratch);
  }
  sum_tally<V>(closing, f, scratch);
  contribute_block<V>(&scratch, int(gridDim.x));
  conclude<V>(&scratch, int(gridDim.x) + 1);
}

// A stretch of `group` x kHeldPacks packs of a row per group of lanes: one read, one write.
template <class T, Spread kSpread>
__global__ void __launch_bounds__(kThreads, 2)
    ce_backward_rows(const Rows r, const RowLayout layout, int group, int64_t stretches) {
  using A = wide_t<T>;
  constexpr int size = Pack<T>::size;
  T* const out = static_cast<T*>(r.out.data);
  const A denominator = r.mean ? r.tail.load<A>(kDenominator) : A(1);
  const bool check_finite = r.tail.load<A>(kCheckFinite) != 0;
  const int at_once = kThreads / group, lane = int(threadIdx.x) % group, width = group < kWarp ? group : kWarp;
  const int64_t items = r.n * stretches;
  for (int64_t begin = int64_t(blockIdx.x) * at_once; begin < items; begin += int64_t(gridDim.x) * at_once) {
    const int64_t item = begin + int(threadIdx.x) / group, position = item / stretches;
    const bool inside = item < items;
    int64_t at[kRowOperands] = {};
    RowGrad<A, kSpread> g{};
    if (inside) {
      layout.locate(position, at);
      if (int(threadIdx.x) % width == 0) g = row_grad<A, kSpread>(r, at, denominator, check_finite);
    }
    g.share(width);
    if (!inside) continue;
    // Cut at the boundaries of what is written: there a partial access costs most.
    const RowPacks<T> packs(out, at[kOutRow], r.classes);
    const T* const x_row = static_cast<const T*>(r.input.data) + at[kInputRow];
    const int64_t first_pack = item % stretches * group * kHeldPacks<T> + lane;
    A x[kHeldPacks<T>][size];
#pragma unroll
    for (int u = 0; u < kHeldPacks<T>; ++u) {
      const int64_t first = packs.first(first_pack + u * group);
#pragma unroll
      for (int j = 0; j < size; ++j) x[u][j] = A(0);
      if (!g.zero && first < r.classes) load_run(x_row, first, r.classes, x[u]);
    }
#pragma unroll
    for (int u = 0; u < kHeldPacks<T>; ++u) {
      const int64_t first = packs.first(first_pack + u * group);
      if (first >= r.classes) continue;
      A w[size], q[size];
#pragma unroll
      for (int j = 0; j < size; ++j) w[j] = q[j] = A(1);
      if (kSpread != Spread::none && r.weight && !g.zero) load_beside<T>(r.weight, 0, first, r.classes, w);
      if (kSpread == Spread::probabilities && !g.zero)
        load_beside<T>(r.target, at[kTargetRow], first, r.classes, q);
      Pack<T> d;
#pragma unroll
      for (int j = 0; j < size; ++j) d.v[j] = narrow<T>(g.of(r, first + j, x[u][j], q[j], w[j]));
      if (is_whole<size>(first, r.classes))
        store_pack(out + at[kOutRow] + first, d);
      else
        for_classes<size>(first, r.classes, [&](int64_t c, int j) { out[at[kOutRow] + c] = d.v[j]; });
    }
  }
}

}  // namespace lossguard::cuda
