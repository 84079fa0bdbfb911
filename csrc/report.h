// The violation report: one layout for kernels, host and Python.
#pragma once
#include <cstdint>

namespace lossguard {

constexpr int kListed = 16;  // offenders kept with index and value

enum class Check : int32_t {
  class_index,    // 0 <= t < num_classes, or t == ignore_index
  unit_interval,  // 0 <= v <= 1
  finite,         // not NaN, not infinite
};

// Disjoint: an offender is counted under exactly one of them.
enum Kind : int32_t { kBelow, kAbove, kNaN, kPosInf, kNegInf, kKinds, kValid = kKinds };

// Labels that name their own cause; counted beside the kinds.
enum WellKnown : int32_t { kMinusOne, kMinus100, k255, kNumClasses, kWellKnown };

// Integers stay integers: a wild int64 label keeps its value.
union Value {
  int64_t i;
  double d;
};

enum class Subject : int32_t { target, input };

// What is wrong with one tensor. Indices are linear in the tensor's logical (row-major) order.
struct Section {
  Subject subject;
  Check check;
  int64_t seen = 0;   // elements that count (ignored ones do not)
  int64_t count = 0;  // offenders among them
  int64_t kinds[kKinds] = {};
  int64_t well_known[kWellKnown] = {};
  Value offender_min = {}, offender_max = {};  // of the offenders that are not NaN
  Value valid_min = {}, valid_max = {};        // of the others
  bool has_offender_range = false, has_valid_range = false;
  int listed = 0;
  int64_t index[kListed] = {};
  Value value[kListed] = {};
};

// What is wrong with one call: nothing, or one tensor, or two.
struct Violations {
  int count = 0;
  Section sections[2];
};

}  // namespace lossguard
