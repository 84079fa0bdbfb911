// Cross-entropy where neighbouring rows lie beside each other and the classes far apart: images, (N, C, H, W),
// and whatever no other kernel takes. A thread has kPixels neighbouring rows, which it reads in one access a
// class; with kPixels = 1 any strides and dtypes will do. The loop over the classes is online: one pass at every C.
#pragma once
#include "cross_entropy.h"

namespace lossguard::cuda {

template <class T, int kPixels>
struct Pixels {
  T v[kPixels];
  __device__ __forceinline__ void load(const T* p) {
    if constexpr (kPixels == 1) {
      v[0] = *p;
    } else {
      const Pack<T> pack = load_pack(p);
#pragma unroll
      for (int i = 0; i < kPixels; ++i) v[i] = pack.v[i];
    }
  }
  __device__ __forceinline__ void store(T* p) const {
    if constexpr (kPixels == 1) {
      *p = v[0];
    } else {
      Pack<T> pack;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) pack.v[i] = v[i];
      store_pack(p, pack);
    }
  }
};

// Classes whose logits are loaded before the first is used: as many as registers hold beside the rows' sums.
template <Spread kSpread, int kPixels>
constexpr int kClassesAtOnce = kPixels == 8 && kSpread != Spread::none ? 2 : kPixels == 1 ? 8 : 32 / kPixels;

template <class T, Spread kSpread, int kPixels>
__global__ void __launch_bounds__(kThreads, 2)
    ce_forward_strided(const Rows r, const RowLayout layout, const Layout<1> logical, const Finish f) {
  using A = wide_t<T>;
  constexpr int kClasses = kClassesAtOnce<kSpread, kPixels>;
  LG_SHARED(BlockScratch, scratch);
  RowTally<A, kSpread> tally;
  const T* const input = static_cast<const T*>(r.input.data);
  const int last = layout.ndim - 1;
  const int64_t target_step = layout.strides[kTargetRow][last];
  const bool check_target = kSpread == Spread::probabilities && f.strict;

  for (int64_t begin = int64_t(blockIdx.x) * kThreads * kPixels; begin < r.n;
       begin += int64_t(gridDim.x) * kThreads * kPixels) {
    const int64_t position = begin + int64_t(threadIdx.x) * kPixels;
    const bool inside = position < r.n;
    int64_t at[kRowOperands] = {};
    if (inside) layout.locate(position, at);
    ClosedRow<A, kSpread> rows[kPixels];
    if constexpr (kSpread != Spread::probabilities) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        if (!inside) continue;
        rows[i].label = r.target.load_label(at[kTargetRow] + i * target_step);
      }
    }
#pragma unroll 1
    for (int64_t c0 = 0; c0 < r.classes; c0 += kClasses) {
      Pixels<T, kPixels> x[kClasses];
#pragma unroll
      for (int j = 0; j < kClasses; ++j)
        if (inside && c0 + j < r.classes) x[j].load(input + at[kInputRow] + (c0 + j) * r.input_stride);
      unsigned bad = 0;  // a bit each
      static_assert(kPixels * kClasses <= 32);
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        RowSums<A, kSpread>& sums = rows[i].sums;
        A top = sums.m;
#pragma unroll
        for (int j = 0; j < kClasses; ++j)
          if (inside && c0 + j < r.classes) top = math::max(widen<A>(x[j].v[i]), top);
        sums.raise(top);
        if (kPixels == 1 && f.watch_input) {  // the host sees to that: several pixels have no registers for it
#pragma unroll
          for (int j = 0; j < kClasses; ++j)
            if (inside && c0 + j < r.classes && widen<A>(x[j].v[i]) < sums.low) sums.low = widen<A>(x[j].v[i]);
        }
      }
#pragma unroll
      for (int j = 0; j < kClasses; ++j) {
        if (!inside || c0 + j >= r.classes) continue;
        const A w = kSpread == Spread::none ? A(1) : r.weight.load_or((c0 + j) * r.weight_stride, A(1));
        Pixels<T, kPixels> q_pack;
        if constexpr (kSpread == Spread::probabilities && kPixels > 1)
          q_pack.load(static_cast<const T*>(r.target.data) + at[kTargetRow] + (c0 + j) * r.target_stride);
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
          const A value = widen<A>(x[j].v[i]);
          A q(0);
          if constexpr (kSpread == Spread::probabilities) {
            q = kPixels > 1 ? widen<A>(q_pack.v[i])
                            : r.target.load<A>(at[kTargetRow] + (c0 + j) * r.target_stride);
            if (check_target) {
              const bool ok = probability_ok(r, q, w);
              bad |= unsigned(!ok) << (i * kClasses + j);
              rows[i].bad_target = rows[i].bad_target || !ok;
              if (r.weight) tally.target.seen += w != A(0);
              if (ok && w != A(0)) tally.target.widen_range(q);
            }
          } else if (c0 + j == rows[i].label) {
            rows[i].x_label = value;
          }
          rows[i].sums.add(value, spread_weight<A, kSpread>(r, q, w));
        }
      }
      if constexpr (kSpread == Spread::probabilities)
        if (__any_sync(kAllLanes, bad))
          note_probabilities<kSpread>(
              r, logical, bad, position, at[kTargetRow], target_step, [](int j) { return j / kClasses; },
              [&](int j) { return c0 + j % kClasses; }, tally, scratch);
    }
    if constexpr (kSpread != Spread::probabilities) {
      unsigned bad = 0;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        if (!inside) continue;
        rows[i].state = state_of(r, rows[i].label);
        if (rows[i].state == kSound) rows[i].w_label = r.weight.load_or(rows[i].label * r.weight_stride, A(1));
        bad |= unsigned(watch_label(rows[i].state, rows[i].label, tally)) << i;
      }
      if (__any_sync(kAllLanes, bad))
        note_labels(r, logical, bad, position, at[kTargetRow], target_step, tally, scratch);
    }
    if constexpr (kPixels == 1)
      watch_logits<T, kSpread>(r, layout, logical, f, inside, position, rows[0], tally, scratch);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      if (!inside) continue;
      int64_t own[kRowOperands];
#pragma unroll
      for (int k = 0; k < kRowOperands; ++k) own[k] = at[k] + i * layout.strides[k][last];
      close_row(r, f, own, rows[i], tally);
    }
  }
  finish<TargetValue<kSpread>>(tally, f, scratch);
}

template <class T, Spread kSpread, int kPixels>
__global__ void __launch_bounds__(kThreads, 2) ce_backward_strided(const Rows r, const RowLayout layout) {
  using A = wide_t<T>;
  constexpr int kClasses = kPixels == 1 ? 4 : 2;
  const T* const input = static_cast<const T*>(r.input.data);
  T* const out = static_cast<T*>(r.out.data);
  const A denominator = r.mean ? r.tail.load<A>(kDenominator) : A(1);
  const bool check_finite = r.tail.load<A>(kCheckFinite) != 0;
  const int last = layout.ndim - 1;

  for (int64_t position = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kPixels; position < r.n;
       position += int64_t(gridDim.x) * kThreads * kPixels) {
    int64_t at[kRowOperands];
    layout.locate(position, at);
    RowGrad<A, kSpread> g[kPixels];
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      int64_t own[kRowOperands];
#pragma unroll
      for (int k = 0; k < kRowOperands; ++k) own[k] = at[k] + i * layout.strides[k][last];
      g[i] = row_grad<A, kSpread>(r, own, denominator, check_finite);
    }
#pragma unroll 1
    for (int64_t c0 = 0; c0 < r.classes; c0 += kClasses) {
      Pixels<T, kPixels> x[kClasses];
#pragma unroll
      for (int j = 0; j < kClasses; ++j)
        if (c0 + j < r.classes) x[j].load(input + at[kInputRow] + (c0 + j) * r.input_stride);
#pragma unroll
      for (int j = 0; j < kClasses; ++j) {
        if (c0 + j >= r.classes) continue;
        const A w = kSpread == Spread::none ? A(1) : r.weight.load_or((c0 + j) * r.weight_stride, A(1));
        Pixels<T, kPixels> q_pack, d;
        if constexpr (kSpread == Spread::probabilities && kPixels > 1)
          q_pack.load(static_cast<const T*>(r.target.data) + at[kTargetRow] + (c0 + j) * r.target_stride);
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
          A q(0);
          if constexpr (kSpread == Spread::probabilities)
            q = kPixels > 1 ? widen<A>(q_pack.v[i])
                            : r.target.load<A>(at[kTargetRow] + (c0 + j) * r.target_stride);
          d.v[i] = narrow<T>(g[i].of(r, c0 + j, widen<A>(x[j].v[i]), q, w));
        }
        d.store(out + at[kOutRow] + (c0 + j) * r.out_stride);
      }
    }
  }
}

}  // namespace lossguard::cuda
