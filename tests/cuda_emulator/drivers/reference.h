// What a call must give: the formulas of csrc/math in double, an element or a row after the other, and a plain scan of
// the tensors in logical order for the report.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "losses.h"
#include "math/bce.h"
#include "math/check.h"
#include "math/cross_entropy.h"
#include "report.h"
#include "tensor.h"

namespace drivers {

struct Elements {
  bool with_logits = false;
  Flags flags{};
  Tensor input, target, weight, pos_weight;
};

struct Rows {
  bool nll = false;
  Flags flags{};
  Tensor input, target, weight;
  bool probabilities = false;
  int64_t ignore_index = -100;
  double smoothing = 0;

  int class_dim() const { return input.view().ndim == 1 ? 0 : 1; }
  int64_t classes() const { return input.view().sizes[class_dim()]; }
  int64_t inner() const {
    int64_t n = 1;
    for (int d = class_dim() + 1; d < input.view().ndim; ++d) n *= input.view().sizes[d];
    return n;
  }
  int64_t rows() const { return input.view().without_dim(class_dim()).numel(); }
  int64_t index(int64_t row, int64_t c) const { return (row / inner() * classes() + c) * inner() + row % inner(); }
  // The class a label names, or -1.
  int64_t class_of(int64_t row) const {
    const int64_t label = probabilities ? -1 : target.label(row);
    return label != ignore_index && math::is_class(label, classes()) ? label : -1;
  }
  bool saves_mass() const { return probabilities || (smoothing != 0 && weight); }
};

struct Expected {
  std::vector<double> loss;  // of every element or row
  double total = 0, denominator = 0;
  std::vector<double> grad;  // of the input
  double largest_scale = 0;  // by which a row's or an element's gradient was multiplied
  Violations found;

  double reduced(Reduction reduction) const { return reduction == Reduction::mean ? total / denominator : total; }
};

// One tensor's section of the report. Elements that count come in logical order.
template <class V>  // int64_t for labels
class Scan {
 public:
  Scan(Subject subject, Check check, int64_t classes = -1) : classes_(classes) {
    section_.subject = subject;
    section_.check = check;
  }
  void see(int64_t index, V v, Kind kind) {
    ++section_.seen;
    if (kind == kValid) {
      widen(section_.has_valid_range, section_.valid_min, section_.valid_max, v);
      return;
    }
    ++section_.count;
    ++section_.kinds[kind];
    if (kind != kNaN) widen(section_.has_offender_range, section_.offender_min, section_.offender_max, v);
    if (section_.check == Check::class_index) {
      section_.well_known[kMinusOne] += v == -1;
      section_.well_known[kMinus100] += v == -100;
      section_.well_known[k255] += v == 255;
      section_.well_known[kNumClasses] += v == V(classes_);
    }
    if (section_.listed == kListed) return;
    section_.index[section_.listed] = index;
    of(section_.value[section_.listed++]) = v;
  }
  void add_to(Violations& found) const {
    if (section_.count) found.sections[found.count++] = section_;
  }

 private:
  static V& of(Value& value) {
    if constexpr (std::is_same_v<V, int64_t>)
      return value.i;
    else
      return value.d;
  }
  static void widen(bool& has, Value& low, Value& high, V v) {
    if (!has || v < of(low)) of(low) = v;
    if (!has || v > of(high)) of(high) = v;
    has = true;
  }

  Section section_{};
  int64_t classes_;
};

// Bounds as the kernels compare them: in float, but for float64.
inline math::UnitBounds<double> bounds_in(DType compared, math::UnitBounds<double> bounds) {
  if (compared == DType::f64) return bounds;
  return {double(float(bounds.low)), double(float(bounds.high))};
}

inline bool is_finite(double v) { return v - v == 0; }

// grad: of the loss, for every element.
inline Expected expected(const Elements& a, const Tensor& grad) {
  const Policy& policy = a.flags.policy;
  const auto tolerant = math::tolerant_unit_bounds<double>(epsilon_of(a.target.dtype()));
  const auto bounds = bounds_in(a.input.dtype(), a.with_logits ? tolerant : math::exact_unit_bounds<double>());
  const double of_bad = policy.on_violation == OnViolation::raise ? std::numeric_limits<double>::quiet_NaN() : 0;
  const int64_t n = a.input.numel();
  Expected e;
  Scan<double> targets(Subject::target, Check::unit_interval);
  Scan<double> inputs(Subject::input, a.with_logits ? Check::finite : Check::unit_interval);
  std::vector<bool> bad;
  for (int64_t i = 0; i < n; ++i) {
    const double x = a.input.get(i), y = a.target.get(i);
    const double w = a.weight ? a.weight.get(i) : 1, pos_weight = a.pos_weight ? a.pos_weight.get(i) : 1;
    Kind target = kValid, input = kValid;
    if (!a.with_logits || (policy.strict && w != 0)) {
      target = math::kind_of_probability(y, bounds);
      targets.see(i, y, target);
    }
    if (!a.with_logits || policy.check_finite) {
      input = a.with_logits ? math::kind_of_nonfinite(x) : math::kind_of_probability(x, bounds);
      inputs.see(i, x, input);
    }
    bad.push_back(target != kValid || input != kValid);
    if (bad.back())
      e.loss.push_back(of_bad);
    else
      e.loss.push_back(w * (a.with_logits ? math::bce_logits_loss(x, y, pos_weight) : math::bce_loss(x, y)));
    e.total += e.loss.back();
    e.denominator += !bad.back();
  }
  targets.add_to(e.found);
  inputs.add_to(e.found);
  for (int64_t i = 0; i < n; ++i) {
    const double x = a.input.get(i), y = a.target.get(i);
    const double w = a.weight ? a.weight.get(i) : 1, pos_weight = a.pos_weight ? a.pos_weight.get(i) : 1;
    const double scale = w * grad.get(i) / (a.flags.reduction == Reduction::mean ? e.denominator : 1);
    const double d = a.with_logits ? math::bce_logits_grad(x, y, pos_weight) : math::bce_grad(x, y);
    e.grad.push_back(bad[size_t(i)] ? 0 : scale * d);
    if (!bad[size_t(i)]) e.largest_scale = std::max(e.largest_scale, std::fabs(scale));
  }
  return e;
}

// grad: of the loss, for every row.
inline Expected expected(const Rows& a, const Tensor& grad) {
  const Policy& policy = a.flags.policy;
  const auto bounds =
      bounds_in(a.input.dtype(), math::tolerant_unit_bounds<double>(epsilon_of(a.target.dtype())));
  const double of_bad = policy.on_violation == OnViolation::raise ? std::numeric_limits<double>::quiet_NaN() : 0;
  const int64_t n = a.rows(), classes = a.classes();
  const double keep = 1 - a.smoothing, spread = a.smoothing / double(classes);
  const auto weight = [&](int64_t c) { return a.weight ? a.weight.get(c) : 1.0; };

  Expected e;
  Scan<int64_t> labels(Subject::target, Check::class_index, classes);
  Scan<double> probabilities(Subject::target, Check::unit_interval);
  Scan<double> inputs(Subject::input, Check::finite);
  struct Row {
    bool zero;
    double lse, mass;
  };
  std::vector<Row> rows;
  for (int64_t row = 0; row < n; ++row) {
    const auto x = [&](int64_t c) { return a.input.get(a.index(row, c)); };
    bool bad = false, ignored = false;
    int64_t label = -1;
    if (!a.probabilities) {
      label = a.target.label(row);
      const Kind kind = math::kind_of_class(label, classes);
      ignored = label == a.ignore_index;
      if (!ignored) labels.see(row, label, kind);
      bad = !ignored && kind != kValid;
    }
    double m = -std::numeric_limits<double>::infinity(), sum = 0, mass = 0, moment = 0;
    for (int64_t c = 0; c < classes; ++c) m = math::max(x(c), m);
    if (m == -std::numeric_limits<double>::infinity()) m = 0;
    for (int64_t c = 0; c < classes; ++c) {
      double v = weight(c);
      if (a.probabilities) {
        const double q = a.target.get(a.index(row, c));
        v = math::smoothed(q, weight(c), keep, spread);
        if (policy.strict && weight(c) != 0 && math::kind_of_probability(q, bounds) != kValid) bad = true;
      }
      sum += std::exp(x(c) - m);
      mass += v;
      moment += math::moment_term(v, x(c) - m);
    }
    const double lse = math::log_sum_exp(m, sum);
    const bool sound = !bad && !ignored;
    // NLL reads one element a row, and reports them row by row.
    if (policy.check_finite && a.nll && sound)
      inputs.see(a.index(row, label), x(label), math::kind_of_nonfinite(x(label)));
    if (policy.check_finite && sound && !is_finite(a.nll ? x(label) : lse)) bad = true;
    double loss = 0;
    if (bad) {
      loss = of_bad;
    } else if (!ignored) {
      if (a.nll)
        loss = -weight(label) * x(label);
      else if (a.probabilities)
        loss = math::spread_loss(lse, m, mass, moment);
      else
        loss = math::label_loss(lse, x(label), weight(label), a.smoothing);
      if (!a.nll && !a.probabilities && a.smoothing != 0) loss += spread * math::spread_loss(lse, m, mass, moment);
      e.denominator += a.probabilities ? 1 : weight(label);
    }
    e.loss.push_back(loss);
    e.total += loss;
    rows.push_back({bad || ignored, lse, mass});
  }
  if (a.smoothing != 0 && e.denominator == 0) e.total = 0;  // natively 0 / 0

  // Element after element, in logical order.
  e.grad.assign(size_t(a.input.numel()), 0);
  for (int64_t i = 0; i < a.input.numel(); ++i) {
    const int64_t c = i / a.inner() % classes, row = i / (a.inner() * classes) * a.inner() + i % a.inner();
    const double x = a.input.get(i);
    const int64_t label = a.probabilities ? -1 : a.target.label(row);
    const Row& of = rows[size_t(row)];
    if (a.probabilities && policy.strict && weight(c) != 0) {
      const double q = a.target.get(i);
      probabilities.see(i, q, math::kind_of_probability(q, bounds));
    }
    if (policy.check_finite && !a.nll && (a.probabilities || a.class_of(row) >= 0)) {
      Kind kind = math::kind_of_nonfinite(x);
      // -inf masks a class, but not all of a row's.
      if (kind == kNegInf && of.lse != x) kind = kValid;
      inputs.see(i, x, kind);
    }
    if (of.zero) continue;
    const double scale = grad.get(row) / (a.flags.reduction == Reduction::mean ? e.denominator : 1);
    const double of_label = c == label ? scale * keep * weight(c) : 0;
    if (a.nll)
      e.grad[size_t(i)] = -of_label;
    else if (a.probabilities)
      e.grad[size_t(i)] = math::logit_grad(x, of.lse, scale * of.mass,
                                           scale * math::smoothed(a.target.get(i), weight(c), keep, spread));
    else
      e.grad[size_t(i)] = math::logit_grad(x, of.lse, scale * (keep * weight(label) + spread * of.mass),
                                           scale * spread * weight(c)) - of_label;
    e.largest_scale = std::max(e.largest_scale, std::fabs(scale) * std::max(1.0, a.probabilities ? of.mass : weight(label)));
  }
  if (!a.probabilities) labels.add_to(e.found);
  probabilities.add_to(e.found);
  inputs.add_to(e.found);
  return e;
}

}  // namespace drivers
