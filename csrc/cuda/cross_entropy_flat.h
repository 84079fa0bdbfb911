// Cross-entropy over short rows that are no whole number of 16-byte packs: as one flat stream. A block copies a
// tile of rows to shared memory and back in 16-byte accesses; in between, each thread has a row. Rows of such a
// size do not meet in one bank: at worst two threads of a warp wait for each other.
#pragma once
#include "cross_entropy.h"
#include "row_plan.h"

namespace lossguard::cuda {

static_assert(kFlatBytes / 2 / sizeof(Half) <= 32, "the classes of a row of probabilities have a bit each");
// A tile and what its alignment asks for.
struct alignas(16) FlatTile {
  unsigned char bytes[kThreads * kFlatBytes + 2 * sizeof(uint4)];
};

// A tile in shared memory, at the place in its 16 bytes that it has in global memory.
template <class S>
struct Tile {
  S* shared;
  __device__ __forceinline__ Tile(void* room, const S* global)
      : shared(reinterpret_cast<S*>(static_cast<unsigned char*>(room) +
                                    reinterpret_cast<uintptr_t>(global) % sizeof(uint4))) {}

  // By the whole block: n elements.
  __device__ __forceinline__ void load(const S* from, int64_t n) {
    walk(from, n, [&](int64_t i) { store_pack(shared + i, load_pack(from + i)); },
         [&](int64_t i) { shared[i] = from[i]; });
  }
  __device__ __forceinline__ void store(S* to, int64_t n) const {
    const bool alike = (reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(shared)) % sizeof(uint4) == 0;
    walk(to, n,
         [&](int64_t i) {
           if (alike) {
             store_pack(to + i, load_pack(shared + i));
             return;
           }
           Pack<S> pack;
#pragma unroll
           for (int j = 0; j < Pack<S>::size; ++j) pack.v[j] = shared[i + j];
           store_pack(to + i, pack);
         },
         [&](int64_t i) { to[i] = shared[i]; });
  }

 private:
  // The packs of a stretch of global memory, and the elements before and behind them.
  template <class OnPack, class OnElement>
  static __device__ __forceinline__ void walk(const S* global, int64_t n, const OnPack& on_pack,
                                              const OnElement& on_element) {
    constexpr int size = Pack<S>::size;
    const int past = int(reinterpret_cast<uintptr_t>(global) / sizeof(S) % size);
    const int64_t before = past ? size - past : 0, head = before < n ? before : n;
    const int64_t packs = (n - head) / size, tail = head + packs * size;
    for (int64_t p = threadIdx.x; p < packs; p += kThreads) on_pack(head + p * size);
    const int64_t single = int64_t(threadIdx.x) < head ? threadIdx.x : tail + threadIdx.x - head;
    if (single < n) on_element(single);
  }
};

// The sums of a row in shared memory.
template <Spread kSpread, class T, class Q, class A>
__device__ __forceinline__ unsigned add_row(const Rows& r, const Finish& f, const T* x, const Q* q,
                                                      RowSums<A, kSpread>& sums, RowTally<A, kSpread>& tally) {
  const int classes = int(r.classes);
  A top = sums.m;
  for (int c = 0; c < classes; ++c) top = math::max(widen<A>(x[c]), top);
  sums.m = top;
  unsigned bad = 0;
  for (int c = 0; c < classes; ++c) {
    const A value = widen<A>(x[c]);
    A v(0);
    if constexpr (kSpread != Spread::none) {
      const A w = r.weight.load_or(c * r.weight_stride, A(1));
      A probability(0);
      if constexpr (kSpread == Spread::probabilities) {
        probability = widen<A>(q[c]);
        if (f.strict) {
          const bool ok = probability_ok(r, probability, w);
          bad |= unsigned(!ok) << c;
          if (r.weight) tally.target.seen += w != A(0);
          if (ok && w != A(0)) tally.target.widen_range(probability);
        }
      }
      v = spread_weight<A, kSpread>(r, probability, w);
    }
    sums.add(value, v);
    if (f.watch_input && value < sums.low) sums.low = value;
  }
  return bad;
}

// One row a thread: its offset in the tile's operands. Rows lie dense: row i at i C.
template <class T, Spread kSpread>
__global__ void __launch_bounds__(kThreads, 3)
    ce_forward_flat(const Rows r, const RowLayout layout, const Layout<1> logical, const Finish f) {
  using A = wide_t<T>;
  LG_SHARED(FlatTile, room);
  LG_SHARED(BlockScratch, scratch);
  RowTally<A, kSpread> tally;
  const T* const input = static_cast<const T*>(r.input.data);
  const T* const target = static_cast<const T*>(r.target.data);
  for (int64_t begin = int64_t(blockIdx.x) * kThreads; begin < r.n; begin += int64_t(gridDim.x) * kThreads) {
    const int64_t rows = r.n - begin < kThreads ? r.n - begin : kThreads;
    const int64_t position = begin + threadIdx.x;
    const bool inside = int64_t(threadIdx.x) < rows;
    const T* const x_from = input + begin * r.classes;
    Tile<T> x(room.bytes, x_from);
    x.load(x_from, rows * r.classes);
    const T* const q_from = target + begin * r.classes;
    Tile<T> q(room.bytes + sizeof(room.bytes) / 2, q_from);
    if (kSpread == Spread::probabilities) q.load(q_from, rows * r.classes);
    int64_t at[kRowOperands] = {};
    ClosedRow<A, kSpread> row;
    if (inside) {
      layout.locate(position, at);
      if constexpr (kSpread != Spread::probabilities) {
        row.label = r.target.load_label(at[kTargetRow]);
        row.state = state_of(r, row.label);
      }
    }
    __syncthreads();
    unsigned bad = 0;
    if (inside) {
      const T* const x_row = x.shared + int64_t(threadIdx.x) * r.classes;
      const T* const q_row = q.shared + int64_t(threadIdx.x) * r.classes;
      bad = add_row<kSpread>(r, f, x_row, q_row, row.sums, tally);
      if (kSpread != Spread::probabilities && row.state == kSound) {
        row.x_label = widen<A>(x_row[row.label]);
        row.w_label = r.weight.load_or(row.label * r.weight_stride, A(1));
      }
    }
    if constexpr (kSpread == Spread::probabilities) {
      row.bad_target = bad != 0;
      if (__any_sync(kAllLanes, bad))
        note_probabilities<kSpread>(r, logical, bad, position, position * r.classes, 0, [](int) { return 0; },
                                    [](int j) { return j; }, tally, scratch);
    } else {
      const bool bad_label = inside && watch_label(row.state, row.label, tally);
      if (__any_sync(kAllLanes, bad_label))
        note_labels(r, logical, bad_label, position, at[kTargetRow], 0, tally, scratch);
    }
    watch_logits<T, kSpread>(r, layout, logical, f, inside, position, row, tally, scratch);
    if (inside) close_row(r, f, at, row, tally);
    __syncthreads();
  }
  finish<TargetValue<kSpread>>(tally, f, scratch);
}

template <class T, Spread kSpread>
__global__ void __launch_bounds__(kThreads, 3) ce_backward_flat(const Rows r, const RowLayout layout) {
  using A = wide_t<T>;
  LG_SHARED(FlatTile, room);
  const T* const input = static_cast<const T*>(r.input.data);
  const T* const target = static_cast<const T*>(r.target.data);
  T* const out = static_cast<T*>(r.out.data);
  const A denominator = r.mean ? r.tail.load<A>(kDenominator) : A(1);
  const bool check_finite = r.tail.load<A>(kCheckFinite) != 0;
  const int classes = int(r.classes);
  for (int64_t begin = int64_t(blockIdx.x) * kThreads; begin < r.n; begin += int64_t(gridDim.x) * kThreads) {
    const int64_t rows = r.n - begin < kThreads ? r.n - begin : kThreads;
    const bool inside = int64_t(threadIdx.x) < rows;
    Tile<T> x(room.bytes, input + begin * r.classes);
    x.load(input + begin * r.classes, rows * r.classes);
    const T* const q_from = target + begin * r.classes;
    Tile<T> q(room.bytes + sizeof(room.bytes) / 2, q_from);
    if (kSpread == Spread::probabilities) q.load(q_from, rows * r.classes);
    RowGrad<A, kSpread> g{};
    if (inside) {
      int64_t at[kRowOperands];
      layout.locate(begin + threadIdx.x, at);
      g = row_grad<A, kSpread>(r, at, denominator, check_finite);
    }
    __syncthreads();
    if (inside) {
      T* const x_row = x.shared + int64_t(threadIdx.x) * r.classes;
      const T* const q_row = q.shared + int64_t(threadIdx.x) * r.classes;
      for (int c = 0; c < classes; ++c) {
        const A w = kSpread == Spread::none ? A(1) : r.weight.load_or(c * r.weight_stride, A(1));
        const A probability = kSpread == Spread::probabilities ? widen<A>(q_row[c]) : A(0);
        x_row[c] = narrow<T>(g.of(r, c, widen<A>(x_row[c]), probability, w));
      }
    }
    __syncthreads();
    x.store(out + begin * r.classes, rows * r.classes);
    __syncthreads();
  }
}

}  // namespace lossguard::cuda
