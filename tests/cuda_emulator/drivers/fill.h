// Good values for a call, and bad ones among them.
#pragma once
#include "reference.h"

namespace drivers {

// What is wrong with the target (BCE: and the input), and, where finiteness is checked, with the logits.
enum class Harm { none, some, all };

inline void fill_logits(Tensor& t, Random& random) {
  for (int64_t i = 0; i < t.numel(); ++i) t.set(i, random.between(-6, 6));
}
inline void fill_weight(Tensor& t, Random& random) {
  for (int64_t i = 0; i < t.numel(); ++i) t.set(i, random.below(6) ? random.between(0.25, 2) : 0);
}

// Whether element i of n is to be bad. Some: the first, the last and about 40 others, or one in 23.
inline bool is_harmed(Harm harm, int64_t i, int64_t n, Random& random) {
  return harm == Harm::all || (harm == Harm::some && (i == 0 || i == n - 1 || random.below(std::max<int64_t>(23, n / 40)) == 0));
}

inline double bad_probability(Random& random) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  constexpr double values[] = {-0.25, 1.5, -3, 40, inf, -inf, std::numeric_limits<double>::quiet_NaN()};
  return random.pick(values);
}
inline int64_t bad_label(DType dtype, int64_t classes, Random& random) {
  if (dtype == DType::u8) return std::min<int64_t>(classes + random.below(3), 255);
  const int64_t values[] = {-1, classes, classes + 1, 255 + classes, int64_t(1) << 40, -7, INT64_MIN, INT64_MAX,
                            (int64_t(1) << 32) + 1};  // in bounds, if only 32 bits are looked at
  return random.pick(values);
}

inline void fill(Elements& a, Harm harm, Random& random) {
  const int64_t n = a.input.numel();
  constexpr double inf = std::numeric_limits<double>::infinity();
  const double non_finite[] = {inf, -inf, std::numeric_limits<double>::quiet_NaN()};
  fill_weight(a.weight, random);
  fill_weight(a.pos_weight, random);
  for (int64_t i = 0; i < n; ++i) {
    const double y = random.below(3) ? random.between(0, 1) : double(random.below(2));
    double x = a.with_logits ? random.between(-6, 6) : random.between(0.02, 0.98);
    if (!a.with_logits && random.below(9) == 0) x = y == 0 || y == 1 ? y : x;
    if (a.with_logits && a.flags.policy.check_finite && is_harmed(harm, i, n, random)) x = random.pick(non_finite);
    if (!a.with_logits && is_harmed(harm, i, n, random)) x = bad_probability(random);
    a.input.set(i, x);
    const bool is_exempt = a.with_logits && a.weight && a.weight.get(i) == 0;
    const bool is_checked = !a.with_logits || a.flags.policy.strict;
    if (is_checked && is_harmed(harm, i, n, random))
      a.target.set(i, is_exempt ? -1 : bad_probability(random));
    else
      a.target.set(i, y);
  }
}

inline void fill(Rows& a, Harm harm, Random& random) {
  const int64_t n = a.rows(), classes = a.classes();
  constexpr double inf = std::numeric_limits<double>::infinity();
  const double non_finite[] = {inf, -inf, std::numeric_limits<double>::quiet_NaN()};
  fill_weight(a.weight, random);
  fill_logits(a.input, random);
  for (int64_t row = 0; row < n; ++row) {
    int64_t label = -1;
    if (!a.probabilities) {
      label = random.below(std::min<int64_t>(classes, a.target.dtype() == DType::u8 ? 255 : classes));
      if (random.below(9) == 0) label = a.ignore_index;
      if (is_harmed(harm, row, n, random)) label = bad_label(a.target.dtype(), classes, random);
      a.target.set_label(row, label);
    } else if (a.flags.policy.strict || harm == Harm::none) {
      double sum = 0;
      for (int64_t c = 0; c < classes; ++c) {
        const double u = random.between(0, 1);
        a.target.set(a.index(row, c), u * u * u);
        sum += u * u * u;
      }
      for (int64_t c = 0; c < classes; ++c) a.target.set(a.index(row, c), a.target.get(a.index(row, c)) / sum);
    }
    if (!a.flags.policy.check_finite) continue;
    // A mask is no harm; a row with nothing else is.
    const bool is_harmed_row = is_harmed(harm, row, n, random);
    const bool all_masked = is_harmed_row && random.below(3) == 0;
    for (int64_t c = 0; c < classes; ++c) {
      const bool may_be_masked = !a.nll && !a.probabilities && c != a.class_of(row);
      if (all_masked || (may_be_masked && c % 3 == 2)) a.input.set(a.index(row, c), -inf);
    }
    if (is_harmed_row && !all_masked) {
      const int64_t c = a.nll ? a.class_of(row) : random.below(classes);
      if (c >= 0) a.input.set(a.index(row, c), random.pick(non_finite));
    }
  }
  // Each on its own: single probabilities are bad.
  if (a.probabilities && a.flags.policy.strict)
    for (int64_t i = 0; i < a.target.numel(); ++i)
      if (is_harmed(harm, i, a.target.numel(), random)) a.target.set(i, bad_probability(random));
}

}  // namespace drivers
