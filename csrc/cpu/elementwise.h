// BCE and BCE-with-logits: every operand is read once, checked and used.
#pragma once
#include <algorithm>
#include <limits>

#include "../math/bce.h"
#include "../math/check.h"
#include "convert.h"
#include "kernels.h"
#include "parallel.h"
#include "simd.h"
#include "../space.h"

namespace lossguard::LOSSGUARD_ISA {

using cpu::Totals;

constexpr int kTile = 1024;               // elements worked on at a time: their operands stay in L1
constexpr int64_t kBlock = 32 * kTile;    // elements summed by one task

// Room for the operands of one tile, converted where they do not lie ready.
template <class A>
struct Tile {
  alignas(64) A input[kTile], target[kTile], weight[kTile], pos_weight[kTile], grad[kTile], out[kTile];
  Tile() {  // absent weights
    for (int i = 0; i < kTile; ++i) weight[i] = pos_weight[i] = A(1);
  }
};

template <class A, int K>
LG_HD const A* load_tile(const Space<K>& space, int k, const View& v, int64_t begin, int64_t n, A* buffer, A pad) {
  if (!v) return buffer;  // ones
  const bool whole = n % Simd<A>::size == 0;
  if (space.flat(k) && whole)
    if (A* p = in_place<A>(v, begin, 1)) return p;
  if (space.flat(k)) {
    load_run(v, begin, 1, n, buffer);
  } else {
    space.walk(begin, n, [&](int64_t position, int64_t length, const int64_t* offsets) {
      load_run(v, offsets[k], space.inner_stride(k), length, buffer + position);
    });
  }
  for (int64_t i = n; i % Simd<A>::size; ++i) buffer[i] = pad;
  return buffer;
}
template <class A, int K>
LG_HD void store_tile(const Space<K>& space, int k, const View& v, int64_t begin, int64_t n, const A* buffer) {
  if (space.flat(k)) return store_run(v, begin, 1, n, buffer);
  space.walk(begin, n, [&](int64_t position, int64_t length, const int64_t* offsets) {
    store_run(v, offsets[k], space.inner_stride(k), length, buffer + position);
  });
}

// Which lanes hold elements that pass the checks asked for.
template <class A, bool kLogits>
struct ElementCheck {
  using V = Simd<A>;
  math::UnitBounds<A> bounds;
  Mask<A> target_unchecked, input_unchecked;

  ElementCheck(const ElementwiseLoss& loss, bool strict, bool check_finite)
      : bounds(kLogits ? math::tolerant_unit_bounds<A>(epsilon_of(loss.target.dtype)) : math::exact_unit_bounds<A>()),
        target_unchecked(V(kLogits && !strict ? 1 : 0) == V(1)),
        input_unchecked(V(check_finite ? 0 : 1) == V(1)) {}

  LG_HD_MEMBER Mask<A> passes(V x, V y, V weight) const {
    const auto target_ok = math::in_unit_interval(y, bounds);
    if constexpr (kLogits)  // x - x is 0 for finite x, else NaN
      return (target_ok | target_unchecked | (weight == V(0))) & ((x - x == V(0)) | input_unchecked);
    else
      return target_ok & math::in_unit_interval(x, bounds);
  }
};

// The four operands at one tile. Padding costs nothing: log 1 = 0 for a probability of 0 and a
// target of 0, and softplus vanishes at a logit this small.
template <class A, bool kLogits, int K>
struct Operands {
  const A *x, *y, *w, *pos_weight;
  Operands(const Space<K>& space, const ElementwiseLoss& a, int64_t begin, int64_t n, Tile<A>& tile)
      : x(load_tile(space, 0, a.input, begin, n, tile.input, kLogits ? A(-1e4) : A(0))),
        y(load_tile(space, 1, a.target, begin, n, tile.target, A(0))),
        w(load_tile(space, 2, a.weight, begin, n, tile.weight, A(1))),
        pos_weight(load_tile(space, 3, a.pos_weight, begin, n, tile.pos_weight, A(1))) {}
};

template <class A, bool kLogits>
Totals elementwise_forward(const ElementwiseLoss& a, const View& loss) {
  using V = Simd<A>;
  const View* const operands[] = {&a.input, &a.target, &a.weight, &a.pos_weight, &loss};
  const Space<5> space(operands, Order::memory);
  const ElementCheck<A, kLogits> check(a, a.flags.policy.strict, a.flags.policy.check_finite);
  const V of_bad(a.flags.policy.on_violation == OnViolation::raise ? std::numeric_limits<A>::quiet_NaN() : A(0));

  return cpu::sum_over_blocks(space.numel(), kBlock, [&](int64_t block_begin, int64_t block_end) {
    Tile<A> tile;
    Totals totals;
    for (int64_t begin = block_begin; begin < block_end; begin += kTile) {
      const int64_t n = block_end - begin < kTile ? block_end - begin : kTile;
      const Operands<A, kLogits, 5> at(space, a, begin, n, tile);
      V sum(0);
      Mask<A> bad{};  // minus the number of bad elements in each lane
      for (int64_t i = 0; i < n; i += V::size) {
        const V x = V::load(at.x + i), y = V::load(at.y + i), w = V::load(at.w + i);
        const auto ok = check.passes(x, y, w);
        V l;
        if constexpr (kLogits)
          l = w * math::bce_logits_loss(x, y, V::load(at.pos_weight + i));
        else
          l = w * math::bce_loss(x, y);
        l = select(ok, l, of_bad);
        bad.m += (!ok).m;
        sum = sum + l;
        l.store(tile.out + i);
      }
      totals.loss += double(lossguard::LOSSGUARD_ISA::sum(sum));
      totals.bad += count(bad);
      if (loss) store_tile(space, 4, loss, begin, n, tile.out);
    }
    totals.denominator = double(block_end - block_begin - totals.bad);
    return totals;
  });
}

template <class A, bool kLogits>
void elementwise_backward(const ElementwiseLoss& a, const View& grad, const View& out) {
  using V = Simd<A>;
  const View* const operands[] = {&a.input, &a.target, &a.weight, &a.pos_weight, &grad, &out};
  const Space<6> space(operands, Order::memory);
  A tail[kSavedTail];
  load_run(a.saved, 0, 1, kSavedTail, tail);
  const ElementCheck<A, kLogits> check(a, tail[kStrict] != 0, tail[kCheckFinite] != 0);
  const V denominator(a.flags.reduction == Reduction::mean ? tail[kDenominator] : A(1));

  cpu::for_each_block((space.numel() + kBlock - 1) / kBlock, [&](int64_t block) {
    Tile<A> tile;
    const int64_t block_end = std::min(space.numel(), (block + 1) * kBlock);
    for (int64_t begin = block * kBlock; begin < block_end; begin += kTile) {
      const int64_t n = block_end - begin < kTile ? block_end - begin : kTile;
      const Operands<A, kLogits, 6> at(space, a, begin, n, tile);
      const A* g = load_tile(space, 4, grad, begin, n, tile.grad, A(0));
      A* direct = space.flat(5) && n % V::size == 0 ? in_place<A>(out, begin, 1) : nullptr;
      A* result = direct ? direct : tile.out;
      for (int64_t i = 0; i < n; i += V::size) {
        const V x = V::load(at.x + i), y = V::load(at.y + i), w = V::load(at.w + i);
        const V scale = V::load(g + i) / denominator * w;
        V d;
        if constexpr (kLogits)
          d = math::bce_logits_grad(x, y, V::load(at.pos_weight + i));
        else
          d = math::bce_grad(x, y);
        select(check.passes(x, y, w), scale * d, V(0)).store(result + i);
      }
      if (!direct) store_tile(space, 5, out, begin, n, result);
    }
  });
}

}  // namespace lossguard::LOSSGUARD_ISA
