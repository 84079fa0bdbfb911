// What cross-entropy and NLL have in common: rows of classes, their labels, and what one row adds to the result.
//
// N rows, C classes; a row is one position of all dimensions but the class dimension. Rows are walked in
// the order in which the input lies in memory.
#pragma once
#include "../math/cross_entropy.h"
#include "launch.h"

namespace lossguard::cuda {

enum RowOperand { kInputRow, kTargetRow, kResultRow, kLseRow, kOutRow, kRowOperands };
using RowLayout = Layout<kRowOperands>;

enum class Spread { none, labels, probabilities };  // what besides the label's own logit a row's loss reads

struct Rows {
  Operand input;   // (N, C) by strides
  Operand target;  // (N) labels, or (N, C) probabilities
  Operand weight;  // (C); absent: ones
  Operand result;  // (N) forward: every row's loss, or absent; backward: the gradient of the loss
  Operand out;     // (N, C) backward
  Operand lse;     // (N) of `saved`
  Operand mass;    // (N) of `saved`: sum of v over the row (math/cross_entropy.h); absent where every row has the same
  Operand tail;    // (kSavedTail)
  int64_t n, classes;
  int64_t input_stride, target_stride, out_stride, weight_stride;  // between classes
  int64_t inner;         // logical elements behind one class: D1 x .. x DK
  int64_t ignore_index;
  double smoothing, spread;  // e and e / C
  double low, high;          // bounds of a probability
  bool mean;
};

// `sound` is left to rows that count and pass every check.
enum RowState : int { kSound, kIgnored, kBad };

template <class A>
using LabelTally = Tally<int64_t, A>;
template <class A, Spread kSpread>
using RowTally = Tally<std::conditional_t<kSpread == Spread::probabilities, A, int64_t>, A>;
template <Spread kSpread>
using TargetValue = std::conditional_t<kSpread == Spread::probabilities, double, int64_t>;

__device__ __forceinline__ RowState state_of(const Rows& r, int64_t label) {
  return label == r.ignore_index ? kIgnored : math::is_class(label, r.classes) ? kSound : kBad;
}

// Accounts for a label; true if it is out of bounds.
template <class A>
__device__ __forceinline__ bool watch_label(RowState state, int64_t label, LabelTally<A>& tally) {
  tally.target.seen += state != kIgnored;
  if (state == kSound) tally.target.widen_range(label);
  return state == kBad;
}

// By the whole warp, seldom: bit j of `bad` marks the row j steps behind `position`, which is out of bounds.
template <class A>
__device__ __forceinline__ void note_labels(const Rows& r, const Layout<1>& logical, unsigned bad, int64_t position,
                                            int64_t target_at, int64_t target_step, LabelTally<A>& tally,
                                            BlockScratch& s) {
#pragma unroll 1
  for (int j = 0; __any_sync(kAllLanes, bad); ++j, bad >>= 1) {
    Kind kind = kValid;
    int64_t row = 0, label = 0;
    if (bad & 1) {
      label = r.target.load_label(target_at + j * target_step);
      kind = math::kind_of_class(label, r.classes);
      row = logical.locate(position + j);
    }
    tally.target.template note<int64_t>(s.target_found[warp_id()], kind, row, label, r.classes);
  }
}

__device__ __forceinline__ int64_t element_index(const Rows& r, int64_t logical_row, int64_t c) {
  return element_index(logical_row, c, r.classes, r.inner);
}

}  // namespace lossguard::cuda
