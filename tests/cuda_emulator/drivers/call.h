// A call as ops.cpp makes it, with buffers of its own, and what is wrong with its results.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "cuda/launchers.h"
#include "reference.h"

namespace drivers {

inline ElementwiseLoss arguments(const Elements& a, const Tensor& saved) {
  ElementwiseLoss loss{};
  loss.with_logits = a.with_logits;
  loss.input = a.input.view();
  loss.target = a.target.view();
  loss.weight = a.weight.view();
  loss.pos_weight = a.pos_weight.view();
  loss.saved = saved.view();
  loss.flags = a.flags;
  return loss;
}
inline RowLoss arguments(const Rows& a, const Tensor& saved) {
  RowLoss loss{};
  loss.input = a.input.view();
  loss.class_dim = a.class_dim();
  loss.target = a.target.view();
  loss.probabilities = a.probabilities;
  loss.weight = a.weight.view();
  loss.ignore_index = a.ignore_index;
  loss.smoothing = a.smoothing;
  loss.saved = saved.view();
  loss.flags = a.flags;
  return loss;
}

inline int64_t saved_size(const Elements&) { return kSavedTail; }
inline int64_t saved_size(const Rows& a) { return kSavedTail + (a.nll ? 0 : a.rows() * (a.saves_mass() ? 2 : 1)); }
// Of what has a loss each.
inline Sizes each_sizes(const Elements& a) { return a.input.sizes(); }
inline Sizes each_sizes(const Rows& a) {
  const View rows = a.input.view().without_dim(a.class_dim());
  return Sizes(rows.sizes, rows.sizes + rows.ndim);
}

// Where the results lie.
struct Layouts {
  Layout each = Layout::dense;  // a loss each, and its gradient
  Layout out = Layout::dense;   // the gradient of the input
  bool one_grad = true;         // the gradient of a loss that is reduced, or a sum of losses
};


// Empty, or the first that is wrong with a report.
inline std::string compare(const Violations& got, const Violations& want) {
  const auto text = [](const char* what, int64_t is, int64_t should) {
    return std::string(what) + " in the report is " + std::to_string(is) + " and should be " + std::to_string(should);
  };
  if (got.count != want.count) return text("number of tensors", got.count, want.count);
  for (int s = 0; s < want.count; ++s) {
    const Section &g = got.sections[s], &w = want.sections[s];
    const auto same = [&](Value a, Value b) {
      return w.check == Check::class_index ? a.i == b.i : a.d == b.d || (a.d != a.d && b.d != b.d);
    };
    if (g.subject != w.subject || g.check != w.check) return "another tensor, or another check, in the report";
    if (g.seen != w.seen) return text("seen", g.seen, w.seen);
    if (g.count != w.count) return text("count", g.count, w.count);
    for (int k = 0; k < kKinds; ++k)
      if (g.kinds[k] != w.kinds[k]) return text("count of a kind", g.kinds[k], w.kinds[k]);
    for (int k = 0; k < kWellKnown; ++k)
      if (g.well_known[k] != w.well_known[k]) return text("count of a well-known label", g.well_known[k], w.well_known[k]);
    if (g.has_offender_range != w.has_offender_range || g.has_valid_range != w.has_valid_range)
      return "there is a range in the report, or none";
    if (w.has_offender_range && !(same(g.offender_min, w.offender_min) && same(g.offender_max, w.offender_max)))
      return "the range of offenders in the report is wrong";
    if (w.has_valid_range && !(same(g.valid_min, w.valid_min) && same(g.valid_max, w.valid_max)))
      return "the range of valid values in the report is wrong";
    if (g.listed != w.listed) return text("number listed", g.listed, w.listed);
    for (int i = 0; i < w.listed; ++i) {
      if (g.index[i] != w.index[i]) return text("an index", g.index[i], w.index[i]);
      if (!same(g.value[i], w.value[i])) return "a value in the report is wrong";
    }
  }
  return "";
}

template <class Loss>
class Call {
 public:
  Loss loss;

  Call(const Loss& a, const Layouts& layouts, uint64_t seed) : loss(a), layouts_(layouts) {
    const bool each = loss.flags.reduction == Reduction::none;
    const DType input = loss.input.dtype();
    loss_dtype_ = loss.flags.float_loss && input != DType::f64 ? DType::f32 : input;
    grad_ = Tensor(loss_dtype_, each_sizes(loss), each && !layouts.one_grad ? layouts.each : Layout::one);
    Random random(seed);
    for (int64_t i = 0; i < grad_.numel(); ++i) grad_.set(i, random.between(0.5, 2));
    before_ = inputs();
    renew();
  }

  // Results of their own for another run.
  void renew() {
    const bool each = loss.flags.reduction == Reduction::none;
    result_ = each ? Tensor(loss_dtype_, each_sizes(loss), layouts_.each) : Tensor(loss_dtype_, {});
    saved_ = Tensor(loss.input.dtype() == DType::f64 ? DType::f64 : DType::f32, {saved_size(loss)});
    out_ = Tensor(loss.input.dtype(), loss.input.sizes(), layouts_.out);
    found = Violations{};
    slot = nullptr;
  }

  auto arguments() const { return drivers::arguments(loss, saved_); }
  const View& result() const { return result_.view(); }

  cuda::Error forward(const cuda::Place& place) {
    cuda::Slot* taken = nullptr;
    cuda::Error error;
    if constexpr (std::is_same_v<Loss, Elements>)
      error = cuda::elementwise_forward(arguments(), result(), place, taken);
    else
      error = (loss.nll ? cuda::nll_forward : cuda::cross_entropy_forward)(arguments(), result(), place, taken);
    if (!error) slot.reset(taken);
    return error;
  }
  // Where the forward's report will lie, and the report.
  struct GiveBack {
    void operator()(cuda::Slot* s) const { cuda::give_back(*s); }
  };
  std::unique_ptr<cuda::Slot, GiveBack> slot;
  Violations found;
  int64_t lost = 0;
  // Without waiting; with `query`, CUDA is asked whether the launch is over.
  void ask(bool query) {
    if (slot && cuda::ask(*slot, query, found, lost) != cuda::Answer::none_yet) slot = nullptr;
  }
  cuda::Error wait() {
    const cuda::Error error = cuda::wait(*slot);
    ask(true);
    return error;
  }
  cuda::Error backward(const cuda::Place& place) const {
    if constexpr (std::is_same_v<Loss, Elements>)
      return cuda::elementwise_backward(arguments(), grad_.view(), out_.view(), place);
    else
      return (loss.nll ? cuda::nll_backward : cuda::cross_entropy_backward)(arguments(), grad_.view(), out_.view(),
                                                                            place);
  }

  // What was written, bit for bit.
  std::vector<std::vector<char>> results() const { return {result_.contents(), saved_.contents(), out_.contents()}; }

  std::string wrong_report() const {
    return compare(found, want().found);
  }
  // Empty, or the first that is wrong. The stream has been waited for.
  std::string wrong() const {
    if (inputs() != before_) return "an input was written to";
    if (!result_.untouched_between() || !out_.untouched_between()) return "written between the elements of a result";
    if (std::string why = wrong_report(); !why.empty()) return why;
    const Expected& want = this->want();

    const Policy& policy = loss.flags.policy;
    const int64_t tail = saved_.numel() - kSavedTail;
    if (saved_.get(tail + kStrict) != policy.strict || saved_.get(tail + kCheckFinite) != policy.check_finite)
      return "the policy was not saved";
    if (std::string why = differs("denominator", 0, saved_, tail + kDenominator, want.denominator, want.denominator); !why.empty())
      return why;
    double sum = 0;
    for (double each : want.loss) sum += std::fabs(each);
    if (loss.flags.reduction != Reduction::none) {
      const double scale = (1 + sum) / (loss.flags.reduction == Reduction::mean ? want.denominator : 1);
      if (std::string why = differs("loss", 0, result_, 0, want.reduced(loss.flags.reduction), scale); !why.empty()) return why;
    } else {
      for (size_t i = 0; i < want.loss.size(); ++i)
        if (std::string why = differs("loss", i, result_, int64_t(i), want.loss[i], 1); !why.empty()) return why;
    }
    for (size_t i = 0; i < want.grad.size(); ++i)
      if (std::string why = differs("gradient", i, out_, int64_t(i), want.grad[i], want.largest_scale); !why.empty()) return why;
    return "";
  }

 private:
  const Expected& want() const {
    if (!want_) want_ = expected(loss, grad_);
    return *want_;
  }
  // The arithmetic is float's, or double's for float64; `scale` is the magnitude of what was added up.
  std::string differs(const char* what, size_t i, const Tensor& t, int64_t at, double want, double scale) const {
    const double got = t.get(at), expected = t.rounded(want);
    if (got == expected || (got != got && expected != expected)) return "";
    const double precision = loss.input.dtype() == DType::f64 ? 1e-12 : 1e-5;
    const double tiny = t.dtype() == DType::f16 ? 0x1p-24 : 0;
    const double tolerance = precision * (std::fabs(want) + scale) + epsilon_of(t.dtype()) * std::fabs(want) + tiny;
    if (std::fabs(got - want) <= tolerance) return "";
    char text[160];
    std::snprintf(text, sizeof text, "%s %zu is %.9g and should be %.9g", what, i, got, want);
    return text;
  }
  std::vector<std::vector<char>> inputs() const {
    std::vector<std::vector<char>> all = {loss.input.contents(), loss.target.contents(), grad_.contents()};
    if (loss.weight) all.push_back(loss.weight.contents());
    return all;
  }

  Layouts layouts_;
  DType loss_dtype_;
  Tensor grad_, result_, saved_, out_;
  std::vector<std::vector<char>> before_;
  mutable std::optional<Expected> want_;
};

}  // namespace drivers
