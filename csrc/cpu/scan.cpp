#define LOSSGUARD_ISA baseline
#include "scan.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "../math/check.h"
#include "convert.h"
#include "elementwise.h"
#include "parallel.h"
#include "../space.h"

namespace lossguard::cpu {
namespace {

using namespace baseline;

bool less(Check check, Value a, Value b) { return check == Check::class_index ? a.i < b.i : a.d < b.d; }

void widen_range(Check check, bool& has, Value& low, Value& high, Value by_low, Value by_high) {
  if (!has || less(check, by_low, low)) low = by_low;
  if (!has || less(check, high, by_high)) high = by_high;
  has = true;
}

Value as_value(int64_t v) {
  Value value;
  value.i = v;
  return value;
}
Value as_value(double v) {
  Value value;
  value.d = v;
  return value;
}

// What a check finds at an element. T is int64_t for labels, else double.
template <class T>
struct Finding {
  bool counts;  // false: ignored or exempt
  T value = T(0);
  Kind kind = kValid;
};

template <class T>
void add_offender(Section& s, int64_t index, T v, Kind kind, int64_t classes) {
  const Value value = as_value(v);
  if (s.check == Check::class_index) {
    s.well_known[kMinusOne] += v == -1;
    s.well_known[kMinus100] += v == -100;
    s.well_known[k255] += v == 255;
    s.well_known[kNumClasses] += v == classes;
  }
  ++s.count;
  ++s.kinds[kind];
  if (kind != kNaN) widen_range(s.check, s.has_offender_range, s.offender_min, s.offender_max, value, value);
  if (s.listed < kListed) {
    s.index[s.listed] = index;
    s.value[s.listed++] = value;
  }
}

// `b` follows `a` in index order.
void append(Section& a, const Section& b) {
  a.seen += b.seen;
  a.count += b.count;
  for (int i = 0; i < kKinds; ++i) a.kinds[i] += b.kinds[i];
  for (int i = 0; i < kWellKnown; ++i) a.well_known[i] += b.well_known[i];
  if (b.has_offender_range)
    widen_range(a.check, a.has_offender_range, a.offender_min, a.offender_max, b.offender_min, b.offender_max);
  if (b.has_valid_range) widen_range(a.check, a.has_valid_range, a.valid_min, a.valid_max, b.valid_min, b.valid_max);
  for (int i = 0; i < b.listed && a.listed < kListed; ++i) {
    a.index[a.listed] = b.index[i];
    a.value[a.listed++] = b.value[i];
  }
}

template <class T>
T largest() {
  return std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
}
template <class T>
T smallest() {
  return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::min();
}

// f(linear index, offsets of the K operands) -> Finding<T> for every element, in logical order.
template <class T, int K, class F>
Section scan_elements(Subject subject, Check check, const View* const (&views)[K], const F& f, int64_t classes = -1) {
  const Space<K> space(views, Order::logical);
  Section whole;
  whole.subject = subject;
  whole.check = check;
  constexpr int64_t block = 1 << 16;
  const int64_t n = space.numel(), blocks = (n + block - 1) / block;
  const std::unique_ptr<Section[]> partial(new Section[blocks]);
  for_each_block(blocks, [&](int64_t b) {
    Section s = whole;
    T low = largest<T>(), high = smallest<T>();
    space.walk(b * block, std::min(block, n - b * block), [&](int64_t position, int64_t length, const int64_t* offsets) {
      int64_t at[K];
      std::copy_n(offsets, K, at);
      for (int64_t i = 0; i < length; ++i) {
        const int64_t index = b * block + position + i;
        const Finding<T> found = f(index, at);
        for (int k = 0; k < K; ++k) at[k] += space.inner_stride(k);
        if (!found.counts) continue;
        ++s.seen;
        if (found.kind == kValid) {
          low = std::min(low, found.value);
          high = std::max(high, found.value);
        } else {
          add_offender(s, index, found.value, found.kind, classes);
        }
      }
    });
    s.valid_min = as_value(low);
    s.valid_max = as_value(high);
    s.has_valid_range = low <= high;
    partial[b] = s;
  });
  for (int64_t b = 0; b < blocks; ++b) append(whole, partial[b]);
  return whole;
}

void keep(Violations& v, const Section& s) {
  if (s.count) v.sections[v.count++] = s;
}

template <class A>
A load(const View& v, int64_t offset) {
  A a;
  load_run(v, offset, 1, 1, &a);
  return a;
}

// Elements with a weight of 0 are exempt where `exempt` has them.
template <class A>
Section scan_unit(Subject subject, const View& v, const View& exempt, math::UnitBounds<A> bounds) {
  const View* const views[] = {&v, &exempt};
  return scan_elements<double>(subject, Check::unit_interval, views, [&](int64_t, const int64_t* at) -> Finding<double> {
    if (exempt && load<A>(exempt, at[1]) == A(0)) return {false};
    const A a = load<A>(v, at[0]);
    return {true, double(a), math::kind_of_probability(a, bounds)};
  });
}

template <class A>
Violations scan_as(const ElementwiseLoss& a) {
  Violations v;
  if (!a.with_logits) {
    const auto bounds = math::exact_unit_bounds<A>();
    keep(v, scan_unit<A>(Subject::target, a.target, View{}, bounds));
    keep(v, scan_unit<A>(Subject::input, a.input, View{}, bounds));
    return v;
  }
  if (a.flags.policy.strict)
    keep(v, scan_unit<A>(Subject::target, a.target, a.weight,
                         math::tolerant_unit_bounds<A>(epsilon_of(a.target.dtype))));
  if (a.flags.policy.check_finite) {
    const View* const views[] = {&a.input};
    keep(v, scan_elements<double>(Subject::input, Check::finite, views, [&](int64_t, const int64_t* at) {
           const A x = load<A>(a.input, at[0]);
           return Finding<double>{true, double(x), math::kind_of_nonfinite(x)};
         }));
  }
  return v;
}

Section scan_labels(const RowLoss& a) {
  const View* const views[] = {&a.target};
  const int64_t classes = a.classes();
  return scan_elements<int64_t>(Subject::target, Check::class_index, views, [&](int64_t, const int64_t* at) {
    const int64_t label = load_label(a.target, at[0]);
    return Finding<int64_t>{label != a.ignore_index, label, math::kind_of_class(label, classes)};
  }, classes);
}

// The operand of rows, repeated along the class dimension.
View repeat_rows(View rows, int class_dim, int64_t classes) {
  for (int d = rows.ndim; d > class_dim; --d) {
    rows.sizes[d] = rows.sizes[d - 1];
    rows.strides[d] = rows.strides[d - 1];
  }
  rows.sizes[class_dim] = classes;
  rows.strides[class_dim] = 0;
  ++rows.ndim;
  return rows;
}

bool counts(const RowLoss& a, int64_t label) { return label != a.ignore_index && math::is_class(label, a.classes()); }

template <class A>
Violations scan_cross_entropy_as(const RowLoss& a) {
  Violations v;
  if (!a.probabilities) {
    keep(v, scan_labels(a));
  } else if (a.flags.policy.strict) {
    View weight = a.weight;
    if (weight) {  // (C) as the shape of the target
      weight = a.target;
      weight.data = a.weight.data;
      weight.dtype = a.weight.dtype;
      std::fill_n(weight.strides, weight.ndim, int64_t(0));
      weight.strides[a.class_dim] = a.weight.strides[0];
    }
    keep(v, scan_unit<A>(Subject::target, a.target, weight,
                         math::tolerant_unit_bounds<A>(epsilon_of(a.target.dtype))));
  }
  if (a.flags.policy.check_finite) {
    const View rows = a.input.without_dim(a.class_dim);
    const View lse = repeat_rows(rows.dense_over(a.saved), a.class_dim, a.classes());
    const View label = a.probabilities ? View{} : repeat_rows(a.target, a.class_dim, a.classes());
    const View* const views[] = {&a.input, &lse, &label};
    keep(v, scan_elements<double>(Subject::input, Check::finite, views, [&](int64_t, const int64_t* at) -> Finding<double> {
           if (label && !counts(a, load_label(label, at[2]))) return {false};
           const A x = load<A>(a.input, at[0]);
           Kind kind = math::kind_of_nonfinite(x);
           // -inf masks a class; a row with nothing else (lse = -inf) has no distribution
           if (kind == kNegInf && !(load<A>(lse, at[1]) == x)) kind = kValid;
           return {true, double(x), kind};
         }));
  }
  return v;
}

template <class A>
Violations scan_nll_as(const RowLoss& a) {
  Violations v;
  keep(v, scan_labels(a));
  if (!a.flags.policy.check_finite) return v;
  const View rows = a.input.without_dim(a.class_dim);
  const View* const views[] = {&a.target, &rows};
  Section s = scan_elements<double>(Subject::input, Check::finite, views, [&](int64_t, const int64_t* at) -> Finding<double> {
    const int64_t label = load_label(a.target, at[0]);
    if (!counts(a, label)) return {false};
    const A x = load<A>(a.input, at[1] + label * a.input.strides[a.class_dim]);
    return {true, double(x), math::kind_of_nonfinite(x)};
  });
  // From rows to elements of the input.
  const View* const labels[] = {&a.target};
  const Space<1> space(labels, Order::logical);
  int64_t inner = 1;  // elements behind one class
  for (int d = a.class_dim + 1; d < a.input.ndim; ++d) inner *= a.input.sizes[d];
  for (int i = 0; i < s.listed; ++i)
    space.walk(s.index[i], 1, [&](int64_t, int64_t, const int64_t* at) {
      const int64_t row = s.index[i], label = load_label(a.target, at[0]);
      s.index[i] = (row / inner * a.classes() + label) * inner + row % inner;
    });
  keep(v, s);
  return v;
}

}  // namespace

// clang-format off
Violations scan(const ElementwiseLoss& a) { return a.input.dtype == DType::f64 ? scan_as<double>(a) : scan_as<float>(a); }
Violations scan_cross_entropy(const RowLoss& a) { return a.input.dtype == DType::f64 ? scan_cross_entropy_as<double>(a) : scan_cross_entropy_as<float>(a); }
Violations scan_nll(const RowLoss& a) { return a.input.dtype == DType::f64 ? scan_nll_as<double>(a) : scan_nll_as<float>(a); }
// clang-format on

}  // namespace lossguard::cpu
