// What an op hands to a launcher, whatever the device. Shapes: N rows, C classes, D1..DK further
// dimensions; "rows" are all dimensions but the class dimension, N x D1 x .. x DK.
#pragma once
#include "policy.h"
#include "view.h"

namespace lossguard {

// The forward leaves for the backward: lse per row (cross-entropy only), the mass per row where
// RowLoss::saves_mass, then this tail. float32, or float64 for float64 inputs.
enum SavedTail : int { kDenominator, kStrict, kCheckFinite, kSavedTail };

struct ElementwiseLoss {
  bool with_logits;
  View input;       // (*) probabilities, or logits
  View target;      // (*)
  View weight;      // (*) strides of 0 where it was broadcast; absent: ones
  View pos_weight;  // (*) likewise
  View saved;       // (kSavedTail)
  Flags flags;
};

struct RowLoss {
  View input;       // (N, C, D1..DK) or (C): logits; log-probabilities for NLL
  int class_dim;    // 1, or 0 without a batch
  View target;      // rows: int64 or uint8; or like input: class probabilities
  bool probabilities;
  View weight;      // (C); absent: ones
  int64_t ignore_index;
  double smoothing;
  View saved;       // see SavedTail
  Flags flags;

  int64_t classes() const { return input.sizes[class_dim]; }
  // Whether the sum of v over a row (math/cross_entropy.h) is kept for the backward, which would have to read
  // the whole row for it. -inf marks a row with a bad probability.
  bool saves_mass() const { return probabilities || (smoothing != 0 && weight); }
};

}  // namespace lossguard
