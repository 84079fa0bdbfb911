// NLL: the forward reads one element a row; the backward writes its gradient once, in 16-byte packs.
#pragma once
#include "cross_entropy_strided.h"

namespace lossguard::cuda {

// A row a thread.
template <class A>
__global__ void __launch_bounds__(kThreads, 3)
    nll_forward_rows(const Rows r, const RowLayout layout, const Layout<1> logical, const Finish f) {
  LG_SHARED(BlockScratch, scratch);
  LabelTally<A> tally;
  for (int64_t begin = int64_t(blockIdx.x) * kThreads; begin < r.n; begin += int64_t(gridDim.x) * kThreads) {
    const int64_t position = begin + threadIdx.x;
    const bool inside = position < r.n;
    int64_t at[kRowOperands] = {}, label = -1;
    RowState state = kIgnored;
    A x(0);
    bool bad_label = false;
    if (inside) {
      layout.locate(position, at);
      label = r.target.load_label(at[kTargetRow]);
      state = state_of(r, label);
      if (state == kSound) x = r.input.load<A>(at[kInputRow] + label * r.input_stride);
      bad_label = watch_label(state, label, tally);
    }
    if (__any_sync(kAllLanes, bad_label))
      note_labels(r, logical, bad_label, position, at[kTargetRow], 0, tally, scratch);
    if (f.check_finite) {
      const Kind kind = state == kSound ? math::kind_of_nonfinite(x) : kValid;
      tally.input.seen += state == kSound;
      if (state == kSound && kind == kValid) tally.input.widen_range(x);
      if (__any_sync(kAllLanes, kind != kValid)) {
        const int64_t number = kind != kValid ? logical.locate(position) * r.classes + label : 0;
        tally.input.note(scratch.input_found[warp_id()], kind, number, double(x));
      }
      if (kind != kValid) state = kBad;
    }
    if (!inside) continue;
    A result(0);
    if (state == kBad) {
      result = A(f.of_bad);
    } else if (state == kSound) {
      const A w = r.weight.load_or(label * r.weight_stride, A(1));
      result = -w * x;
      tally.denominator += w;
    }
    tally.loss += result;
    if (r.result) r.result.store(at[kResultRow], result);
  }
  finish<int64_t>(tally, f, scratch);
}

// The one element of a row's gradient that is not 0.
template <class A>
struct Spike {
  int64_t label;  // -1: there is none
  A value;
};
template <class A>
__device__ __forceinline__ Spike<A> spike_of(const Rows& r, const int64_t (&at)[kRowOperands], A denominator,
                                             bool check_finite) {
  const int64_t label = r.target.load_label(at[kTargetRow]);
  if (state_of(r, label) != kSound) return {-1, A(0)};
  if (check_finite && !is_finite(r.input.load<A>(at[kInputRow] + label * r.input_stride))) return {-1, A(0)};
  const A w = r.weight.load_or(label * r.weight_stride, A(1));
  return {label, -w * (r.result.load<A>(at[kResultRow]) / denominator)};
}

constexpr int64_t kSpikeTile = 8192;  // elements of a block's tile, of one row where rows are longer

template <class A>
struct Spikes {
  Spike<A> of_row[kThreads];
};

// Rows lie dense in `out`: tiles of whole rows, or of a part of one, are written as one stream.
template <class T>
__global__ void __launch_bounds__(kThreads, 4) nll_backward_flat(const Rows r, const RowLayout layout, int rows_a_tile) {
  using A = wide_t<T>;
  using Room = Spikes<A>;
  LG_SHARED(Room, spikes);
  T* const out = static_cast<T*>(r.out.data);
  const A denominator = r.mean ? r.tail.load<A>(kDenominator) : A(1);
  const bool check_finite = r.tail.load<A>(kCheckFinite) != 0;
  const int64_t parts = rows_a_tile > 1 ? 1 : (r.classes + kSpikeTile - 1) / kSpikeTile;
  const int64_t tiles = (r.n + rows_a_tile - 1) / rows_a_tile * parts;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first_row = tile / parts * rows_a_tile;
    const int64_t rows = r.n - first_row < rows_a_tile ? r.n - first_row : rows_a_tile;
    // Of the tile's rows, counted from the start of the first.
    const int64_t begin = tile % parts * kSpikeTile;
    const int64_t end = parts == 1 || begin + kSpikeTile > r.classes ? rows * r.classes : begin + kSpikeTile;
    if (threadIdx.x < rows) {
      int64_t at[kRowOperands];
      layout.locate(first_row + threadIdx.x, at);
      spikes.of_row[threadIdx.x] = spike_of(r, at, denominator, check_finite);
    }
    __syncthreads();
    T* const to = out + first_row * r.classes;
    const auto value = [&](int64_t row, int64_t c) {
      return narrow<T>(c == spikes.of_row[row].label ? spikes.of_row[row].value : A(0));
    };
    const auto row_of = [&](int64_t i) { return rows_a_tile == 1 ? 0 : int64_t(uint32_t(i) / uint32_t(r.classes)); };
    constexpr int size = Pack<T>::size;
    const int past = int(reinterpret_cast<uintptr_t>(to + begin) / sizeof(T) % size);
    const int64_t n = end - begin, before = past ? size - past : 0, head = before < n ? before : n;
    const int64_t packs = (n - head) / size, tail = head + packs * size;
    for (int64_t p = threadIdx.x; p < packs; p += kThreads) {
      const int64_t i = begin + head + p * size;
      int64_t row = row_of(i), c = i - row * r.classes;
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < size; ++j) {
        pack.v[j] = value(row, c);
        if (++c == r.classes) {
          c = 0;
          if (row + 1 < rows) ++row;
        }
      }
      store_pack(to + i, pack);
    }
    const int64_t single = int64_t(threadIdx.x) < head ? threadIdx.x : tail + threadIdx.x - head;
    if (single < n) {
      const int64_t i = begin + single, row = row_of(i);
      to[i] = value(row, i - row * r.classes);
    }
    __syncthreads();
  }
}

// kPixels neighbouring rows a thread, see cross_entropy_strided.h.
template <class T, int kPixels>
__global__ void __launch_bounds__(kThreads, 2) nll_backward_strided(const Rows r, const RowLayout layout) {
  using A = wide_t<T>;
  T* const out = static_cast<T*>(r.out.data);
  const A denominator = r.mean ? r.tail.load<A>(kDenominator) : A(1);
  const bool check_finite = r.tail.load<A>(kCheckFinite) != 0;
  const int last = layout.ndim - 1;
  for (int64_t position = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kPixels; position < r.n;
       position += int64_t(gridDim.x) * kThreads * kPixels) {
    int64_t at[kRowOperands];
    layout.locate(position, at);
    Spike<A> spikes[kPixels];
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      int64_t own[kRowOperands];
#pragma unroll
      for (int k = 0; k < kRowOperands; ++k) own[k] = at[k] + i * layout.strides[k][last];
      spikes[i] = spike_of(r, own, denominator, check_finite);
    }
#pragma unroll 1
    for (int64_t c = 0; c < r.classes; ++c) {
      Pixels<T, kPixels> d;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) d.v[i] = narrow<T>(c == spikes[i].label ? spikes[i].value : A(0));
      d.store(out + at[kOutRow] + c * r.out_stride);
    }
  }
}

}  // namespace lossguard::cuda
