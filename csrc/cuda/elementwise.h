// BCE and BCE-with-logits: every operand is read once, checked and used.
//
// Where all operands lie flat in memory alike, threads take 16-byte packs of them; else one element each,
// of any strides and dtypes.
#pragma once
#include "../math/bce.h"
#include "launch.h"

namespace lossguard::cuda {

// ---- device

enum ElementOperand { kInput, kTarget, kWeight, kPosWeight, kResult, kOut, kElementOperands };

struct Elements {
  Operand input, target;       // (n) in memory order, or by the strides of a layout
  Operand weight, pos_weight;  // absent: ones
  Operand result;              // (n) forward: every element's loss, or absent; backward: its gradient
  Operand out;                 // (n) backward: the gradient of input
  Operand tail;                // (kSavedTail) backward
  bool one_grad;               // backward: `result` is one number
  bool mean;
  double low, high;            // bounds of a probability, with the tolerance the loss has
  int64_t n;
};

template <class A, bool kLogits>
struct ElementCheck {
  math::UnitBounds<A> bounds;
  bool check_target, check_input;

  __device__ ElementCheck(const Elements& e, bool strict, bool finite)
      : bounds{A(e.low), A(e.high)}, check_target(!kLogits || strict), check_input(!kLogits || finite) {}

  __device__ __forceinline__ bool exempt(A weight) const { return kLogits && weight == A(0); }
  __device__ __forceinline__ bool target_ok(A y, A weight) const {
    return !check_target || exempt(weight) || math::in_unit_interval(y, bounds);
  }
  __device__ __forceinline__ bool input_ok(A x) const {
    if (!check_input) return true;
    return kLogits ? x - x == A(0) : bool(math::in_unit_interval(x, bounds));
  }
  __device__ Kind kind_of_target(A y, A weight) const {
    return target_ok(y, weight) ? kValid : math::kind_of_probability(y, bounds);
  }
  __device__ Kind kind_of_input(A x) const {
    if (input_ok(x)) return kValid;
    return kLogits ? math::kind_of_nonfinite(x) : math::kind_of_probability(x, bounds);
  }
};

template <class A>
using ElementTally = Tally<A, A>;

// The loss of one element. Sets `bad`; keeps account of the valid values.
template <bool kLogits, class A>
__device__ __forceinline__ A visit(const ElementCheck<A, kLogits>& check, const Finish& f, A x, A y, A w, A pos_weight,
                                   ElementTally<A>& tally, bool& bad) {
  const bool target_ok = check.target_ok(y, w), input_ok = check.input_ok(x);
  bad = !(target_ok && input_ok);
  if (target_ok && !check.exempt(w)) tally.target.widen_range(y);
  if (input_ok) tally.input.widen_range(x);
  if (bad) return A(f.of_bad);
  if constexpr (kLogits)
    return w * math::bce_logits_loss(x, y, pos_weight);
  else
    return w * math::bce_loss(x, y);
}

// By a whole warp, seldom: bit j of `bad` marks the element at `position(j)`; `load` reads it again.
template <bool kLogits, class A, class Position, class Load>
__device__ __forceinline__ void note_bad(const ElementCheck<A, kLogits>& check, const Layout<1>& logical, unsigned bad,
                                         const Position& position, const Load& load, ElementTally<A>& tally,
                                         BlockScratch& s) {
#pragma unroll 1
  for (int j = 0; __any_sync(kAllLanes, bad); ++j, bad >>= 1) {
    Kind target = kValid, input = kValid;
    A x(0), y(0), w(1);
    int64_t index = 0;
    if (bad & 1) {
      load(position(j), x, y, w);
      target = check.kind_of_target(y, w);
      input = check.kind_of_input(x);
      index = logical.locate(position(j));
    }
    if (__any_sync(kAllLanes, target != kValid))
      tally.target.note(s.target_found[warp_id()], target, index, double(y));
    if (__any_sync(kAllLanes, input != kValid)) tally.input.note(s.input_found[warp_id()], input, index, double(x));
  }
}

// n elements as whole packs between a head and a tail of single ones, which share one warp.
template <class T>
struct Packs {
  static constexpr int size = Pack<T>::size;
  int64_t head, count, n;
  __device__ Packs(const void* data, int64_t n) : n(n) {
    const int past = int(reinterpret_cast<uintptr_t>(data) / sizeof(T) % size);
    head = past ? size - past : 0;
    if (head > n) head = n;
    count = (n - head) / size;
  }
  // The single element of this thread, or -1.
  __device__ int64_t single() const {
    const int64_t tail = head + count * size, i = blockIdx.x == 0 ? int64_t(threadIdx.x) : n;
    const int64_t element = i < head ? i : tail + (i - head);
    return element < n ? element : -1;
  }
};
static_assert(2 * (Pack<Half>::size - 1) <= kWarp, "head and tail fit a warp");

constexpr int kPacksAtOnce = 2;  // of each operand, loaded before the first is used

template <class T, bool kLogits>
__global__ void __launch_bounds__(kThreads, 2)
    bce_forward_flat(const Elements e, const Layout<1> logical, const Finish f) {
  using A = wide_t<T>;
  const ElementCheck<A, kLogits> check(e, f.strict, f.check_finite);
  LG_SHARED(BlockScratch, scratch);
  ElementTally<A> tally;
  const T* const input = static_cast<const T*>(e.input.data);
  const T* const target = static_cast<const T*>(e.target.data);
  T* const loss = static_cast<T*>(e.result.data);
  const auto load = [&](int64_t i, A& x, A& y, A&) {
    x = widen<A>(input[i]);
    y = widen<A>(target[i]);
  };
  const Packs<T> packs(input, e.n);
  int64_t counted = 0;

  constexpr int64_t tile = kThreads * kPacksAtOnce;
  for (int64_t begin = blockIdx.x * tile; begin < packs.count; begin += gridDim.x * tile) {
    Pack<T> x[kPacksAtOnce], y[kPacksAtOnce];
#pragma unroll
    for (int u = 0; u < kPacksAtOnce; ++u) {
      const int64_t pack = begin + u * kThreads + threadIdx.x;
      if (pack >= packs.count) continue;
      x[u] = load_pack(input + packs.head + pack * Pack<T>::size);
      y[u] = load_pack(target + packs.head + pack * Pack<T>::size);
    }
    unsigned bad = 0;
#pragma unroll
    for (int u = 0; u < kPacksAtOnce; ++u) {
      const int64_t pack = begin + u * kThreads + threadIdx.x;
      if (pack >= packs.count) continue;
      Pack<T> l;
      A sum(0);
#pragma unroll
      for (int j = 0; j < Pack<T>::size; ++j) {
        bool is_bad;
        const A each = visit(check, f, widen<A>(x[u].v[j]), widen<A>(y[u].v[j]), A(1), A(1), tally, is_bad);
        bad |= unsigned(is_bad) << (u * Pack<T>::size + j);
        sum += each;
        l.v[j] = narrow<T>(each);
      }
      tally.loss += sum;
      counted += Pack<T>::size;
      if (loss) store_pack(loss + packs.head + pack * Pack<T>::size, l);
    }
    counted -= __popc(bad);
    if (__any_sync(kAllLanes, bad)) {
      const auto position = [&](int j) {
        const int64_t pack = begin + j / Pack<T>::size * kThreads + threadIdx.x;
        return packs.head + pack * Pack<T>::size + j % Pack<T>::size;
      };
      note_bad(check, logical, bad, position, load, tally, scratch);
    }
  }
  if (blockIdx.x == 0 && warp_id() == 0) {
    const int64_t i = packs.single();
    bool bad = false;
    if (i >= 0) {
      const A each = visit(check, f, widen<A>(input[i]), widen<A>(target[i]), A(1), A(1), tally, bad);
      tally.loss += each;
      counted += !bad;
      if (loss) loss[i] = narrow<T>(each);
    }
    if (__any_sync(kAllLanes, bad))
      note_bad(check, logical, bad, [&](int) { return i; }, load, tally, scratch);
  }
  tally.denominator = double(counted);
  finish<double>(tally, f, scratch);
}

template <class A, bool kLogits>
__global__ void __launch_bounds__(kThreads, 3)
    bce_forward_strided(const Elements e, const Layout<kElementOperands> layout, const Layout<1> logical,
                        const Finish f) {
  const ElementCheck<A, kLogits> check(e, f.strict, f.check_finite);
  LG_SHARED(BlockScratch, scratch);
  ElementTally<A> tally;
  const auto load = [&](int64_t i, A& x, A& y, A& w) {
    int64_t at[kElementOperands];
    layout.locate(i, at);
    x = e.input.load<A>(at[kInput]);
    y = e.target.load<A>(at[kTarget]);
    w = e.weight.load_or(at[kWeight], A(1));
  };
  int64_t counted = 0;
  for (int64_t begin = int64_t(blockIdx.x) * kThreads; begin < e.n; begin += int64_t(gridDim.x) * kThreads) {
    const int64_t i = begin + threadIdx.x;
    bool bad = false;
    if (i < e.n) {
      int64_t at[kElementOperands];
      layout.locate(i, at);
      const A x = e.input.load<A>(at[kInput]), y = e.target.load<A>(at[kTarget]);
      const A w = e.weight.load_or(at[kWeight], A(1)), pos_weight = e.pos_weight.load_or(at[kPosWeight], A(1));
      const A each = visit(check, f, x, y, w, pos_weight, tally, bad);
      tally.loss += each;
      tally.target.seen += !check.exempt(w);
      counted += !bad;
      if (e.result) e.result.store(at[kResult], each);
    }
    if (__any_sync(kAllLanes, bad))
      note_bad(check, logical, bad, [&](int) { return i; }, load, tally, scratch);
  }
  tally.denominator = double(counted);
  finish<double>(tally, f, scratch);
}

template <bool kLogits, class A>
__device__ __forceinline__ A grad_of(const ElementCheck<A, kLogits>& check, A x, A y, A w, A pos_weight, A scale) {
  if (!(check.target_ok(y, w) && check.input_ok(x))) return A(0);
  if constexpr (kLogits)
    return scale * w * math::bce_logits_grad(x, y, pos_weight);
  else
    return scale * w * math::bce_grad(x, y);
}

template <class T, bool kLogits>
__global__ void __launch_bounds__(kThreads, 3) bce_backward_flat(const Elements e) {
  using A = wide_t<T>;
  const ElementCheck<A, kLogits> check(e, e.tail.load<A>(kStrict) != 0, e.tail.load<A>(kCheckFinite) != 0);
  const T* const input = static_cast<const T*>(e.input.data);
  const T* const target = static_cast<const T*>(e.target.data);
  const T* const grad = static_cast<const T*>(e.result.data);
  T* const out = static_cast<T*>(e.out.data);
  const A denominator = e.mean ? e.tail.load<A>(kDenominator) : A(1);
  const A one = e.one_grad ? e.result.load<A>(0) / denominator : A(0);
  const Packs<T> packs(input, e.n);

  constexpr int64_t tile = kThreads * kPacksAtOnce;
  for (int64_t begin = blockIdx.x * tile; begin < packs.count; begin += gridDim.x * tile) {
    Pack<T> x[kPacksAtOnce], y[kPacksAtOnce], g[kPacksAtOnce];
#pragma unroll
    for (int u = 0; u < kPacksAtOnce; ++u) {
      const int64_t pack = begin + u * kThreads + threadIdx.x, first = packs.head + pack * Pack<T>::size;
      if (pack >= packs.count) continue;
      x[u] = load_pack(input + first);
      y[u] = load_pack(target + first);
      if (!e.one_grad) g[u] = load_pack(grad + first);
    }
#pragma unroll
    for (int u = 0; u < kPacksAtOnce; ++u) {
      const int64_t pack = begin + u * kThreads + threadIdx.x;
      if (pack >= packs.count) continue;
      Pack<T> d;
#pragma unroll
      for (int j = 0; j < Pack<T>::size; ++j) {
        const A scale = e.one_grad ? one : widen<A>(g[u].v[j]) / denominator;
        d.v[j] = narrow<T>(grad_of(check, widen<A>(x[u].v[j]), widen<A>(y[u].v[j]), A(1), A(1), scale));
      }
      store_pack(out + packs.head + pack * Pack<T>::size, d);
    }
  }
  if (blockIdx.x == 0 && warp_id() == 0) {
    const int64_t i = packs.single();
    if (i < 0) return;
    const A scale = e.one_grad ? one : widen<A>(grad[i]) / denominator;
    out[i] = narrow<T>(grad_of(check, widen<A>(input[i]), widen<A>(target[i]), A(1), A(1), scale));
  }
}

template <class A, bool kLogits>
__global__ void __launch_bounds__(kThreads, 4)
    bce_backward_strided(const Elements e, const Layout<kElementOperands> layout) {
  const ElementCheck<A, kLogits> check(e, e.tail.load<A>(kStrict) != 0, e.tail.load<A>(kCheckFinite) != 0);
  const A denominator = e.mean ? e.tail.load<A>(kDenominator) : A(1);
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < e.n; i += int64_t(gridDim.x) * kThreads) {
    int64_t at[kElementOperands];
    layout.locate(i, at);
    const A x = e.input.load<A>(at[kInput]), y = e.target.load<A>(at[kTarget]);
    const A w = e.weight.load_or(at[kWeight], A(1)), pos_weight = e.pos_weight.load_or(at[kPosWeight], A(1));
    const A scale = e.result.load<A>(at[kResult]) / denominator;
    e.out.store(at[kOut], grad_of(check, x, y, w, pos_weight, scale));
  }
}

// ---- host

inline Elements elements(const ElementwiseLoss& a) {
  Elements e{};
  e.input = operand(a.input);
  e.target = operand(a.target);
  e.weight = operand(a.weight);
  e.pos_weight = operand(a.pos_weight);
  e.mean = a.flags.reduction == Reduction::mean;
  const auto bounds = a.with_logits ? math::tolerant_unit_bounds<double>(epsilon_of(a.target.dtype))
                                    : math::exact_unit_bounds<double>();
  e.low = bounds.low;
  e.high = bounds.high;
  e.n = a.input.numel();
  return e;
}

// Whether operand k lies element by element beside the input: same order, dtype and alignment.
template <int K>
bool beside(const Space<K>& space, int k, const View& v, const View& input) {
  if (!v) return true;
  return space.flat(k) && v.dtype == input.dtype &&
         reinterpret_cast<uintptr_t>(v.data) % 16 == reinterpret_cast<uintptr_t>(input.data) % 16;
}

inline int64_t blocks_of_packs(int64_t n, size_t element_size) {
  const int64_t per_block = kThreads * kPacksAtOnce * int64_t(16 / element_size);
  return (n + per_block - 1) / per_block;
}

template <class T, bool kLogits>
Error launch_bce_forward(const ElementwiseLoss& a, const View& loss, const Place& place, const Workspace& w) {
  using A = wide_t<T>;
  Elements e = elements(a);
  const View each = a.flags.reduction == Reduction::none ? loss : View{};
  e.result = operand(each);
  Finish f = make_finish(w, a.flags, a.saved, loss);
  if (!kLogits) {
    f.input_check = Check::unit_interval;
    f.watch_input = true;
  }
  f.input_seen = e.n;
  if (!a.weight || !kLogits) f.target_seen = e.n;
  Layout<1> logical;
  if (!make_logical(a.input, logical)) return kTooManyDims;
  const View* const views[] = {&a.input, &a.target, &a.weight, &a.pos_weight, &each, nullptr};
  const Space<kElementOperands> space(views, Order::memory);
  if (space.flat(kInput) && !a.weight && !a.pos_weight && beside(space, kTarget, a.target, a.input) &&
      beside(space, kResult, each, a.input))
    return launch(bce_forward_flat<T, kLogits>, grid_for(w, blocks_of_packs(e.n, sizeof(T))), place, e, logical, f);
  Layout<kElementOperands> layout;
  if (!make_layout(space, layout)) return kTooManyDims;
  return launch(bce_forward_strided<A, kLogits>, grid_for(w, (e.n + kThreads - 1) / kThreads), place, e, layout,
                logical, f);
}

template <class T, bool kLogits>
Error launch_bce_backward(const ElementwiseLoss& a, const View& grad, const View& out, const Place& place,
                          const Gpu& gpu) {
  using A = wide_t<T>;
  Elements e = elements(a);
  e.result = operand(grad);
  e.out = operand(out);
  e.tail = tail_of(a.saved);
  e.one_grad = std::all_of(grad.strides, grad.strides + grad.ndim, [](int64_t stride) { return stride == 0; });
  if (e.n == 0) return nullptr;
  const View* const views[] = {&a.input, &a.target, &a.weight, &a.pos_weight, &grad, &out};
  const Space<kElementOperands> space(views, Order::memory);
  if (space.flat(kInput) && !a.weight && !a.pos_weight && beside(space, kTarget, a.target, a.input) &&
      (e.one_grad || beside(space, kResult, grad, a.input)) && beside(space, kOut, out, a.input))
    return launch(bce_backward_flat<T, kLogits>, grid_for(gpu, blocks_of_packs(e.n, sizeof(T))), place, e);
  Layout<kElementOperands> layout;
  if (!make_layout(space, layout)) return kTooManyDims;
  return launch(bce_backward_strided<A, kLogits>, grid_for(gpu, (e.n + kThreads - 1) / kThreads), place, e, layout);
}

}  // namespace lossguard::cuda
