// What is a valid value, and what kind of wrong an invalid one is.
#pragma once
#include <cstdint>

#include "../report.h"
#include "number.h"

namespace lossguard::math {

// Bounds of a probability. The checks native torch has are exact; those it lacks leave room for
// rounding: 4 ulp at 1 in the tensor's type, and 1e-6 at least (a bicubic resize of a float32 mask
// reaches 1 + 8e-7, ten times 0.1 sums to 1.0000001).
template <class T>
struct UnitBounds {
  T low, high;
};

template <class T>
LG_HD UnitBounds<T> exact_unit_bounds() {
  return {T(0), T(1)};
}
template <class T>
LG_HD UnitBounds<T> tolerant_unit_bounds(double epsilon) {
  const double tolerance = 4 * epsilon > 1e-6 ? 4 * epsilon : 1e-6;
  return {T(-tolerance), T(1 + tolerance)};
}

// False for NaN. V is a scalar or a vector of them.
template <class V, class T>
LG_HD auto in_unit_interval(V v, UnitBounds<T> bounds) {
  return (v >= V(bounds.low)) & (v <= V(bounds.high));
}
LG_HD bool is_class(int64_t target, int64_t num_classes) {
  return uint64_t(target) < uint64_t(num_classes);
}

LG_HD Kind kind_of_class(int64_t target, int64_t num_classes) {
  return is_class(target, num_classes) ? kValid : target < 0 ? kBelow : kAbove;
}
template <class T>
LG_HD Kind kind_of_nonfinite(T v) {
  return v != v ? kNaN : v - v == T(0) ? kValid : v > T(0) ? kPosInf : kNegInf;
}
template <class T>
LG_HD Kind kind_of_probability(T v, UnitBounds<T> bounds) {
  if (in_unit_interval(v, bounds)) return kValid;
  const Kind kind = kind_of_nonfinite(v);
  return kind != kValid ? kind : v < bounds.low ? kBelow : kAbove;
}

}  // namespace lossguard::math
