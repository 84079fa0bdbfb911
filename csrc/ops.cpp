// The ops: they check shapes, allocate, dispatch, and know nothing of a loss's inside.
//
// Every forward returns (loss, saved); `saved` is what its backward needs and cheaper than to compute
// anew (losses.h). Integers stand for what is spelled in Python: `flags` is laid out in policy.h.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/launchers.h"
#include "cpu/parallel.h"
#include "losses.h"
#include "operations.h"
#include "pending.h"
#include "stats.h"

#if defined(LOSSGUARD_WITH_CUDA)
#include "cuda/launchers.h"
#include "torch_stream.h"
#endif

namespace lossguard {

// torch's own thread pool. A throw inside a worker would lose its text: kernels do not throw.
void cpu::parallel_for_impl(int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, 1, body, context));
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

bool is_float(DType d) { return d != DType::i64 && d != DType::u8; }

DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::Double: return DType::f64;
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Long: return DType::i64;
    case ScalarType::Byte: return DType::u8;
    default: throw_unsupported(std::string(name) + " has the dtype " + torch::headeronly::toString(t.scalar_type()));
  }
}

void require(bool holds, const char* why) {
  if (!holds) throw_unsupported(why);
}

View view(const Tensor& t, const char* name) {
  require(t.dim() <= kMaxDims, "more than 64 dimensions");
  View v;
  v.present = true;
  v.dtype = dtype_of(t, name);
  v.data = const_cast<void*>(t.const_data_ptr());
  v.ndim = int(t.dim());
  const auto sizes = t.sizes(), strides = t.strides();
  for (int d = 0; d < v.ndim; ++d) {
    v.sizes[d] = sizes[d];
    v.strides[d] = strides[d];
  }
  require(v.data || v.numel() == 0, "a tensor whose storage was freed");
  return v;
}
View view(const MaybeTensor& t, const char* name) { return t ? view(*t, name) : View{}; }

bool same_shape(const View& a, const View& b) {
  if (a.ndim != b.ndim) return false;
  for (int d = 0; d < a.ndim; ++d)
    if (a.sizes[d] != b.sizes[d]) return false;
  return true;
}
// v as if it had the shape of `like`, which it must broadcast to.
View broadcast(const View& v, const View& like, const char* why) {
  if (!v) return v;
  require(v.ndim <= like.ndim, why);
  View out = like;
  out.data = v.data;
  out.dtype = v.dtype;
  for (int d = 0; d < like.ndim; ++d) {
    const int from = d - (like.ndim - v.ndim);
    out.strides[d] = 0;
    if (from < 0 || v.sizes[from] == 1) continue;
    require(v.sizes[from] == like.sizes[d], why);
    out.strides[d] = v.strides[from];
  }
  return out;
}

int32_t code_of(DType d) {
  switch (d) {
    case DType::f32: return aoti_torch_dtype_float32();
    case DType::f64: return aoti_torch_dtype_float64();
    case DType::f16: return aoti_torch_dtype_float16();
    default: return aoti_torch_dtype_bfloat16();
  }
}
// A contiguous tensor beside `like`, through the cheapest door the stable ABI has.
Tensor empty(const Tensor& like, const int64_t* sizes, int ndim, DType dtype) {
  int64_t strides[kMaxDims], stride = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  int32_t device;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(ndim, sizes, strides, code_of(dtype), device, like.get_device_index(), &handle));
  return Tensor(handle);
}

// As torch's empty_like, which keeps the strides of a dense tensor, but for the common case directly.
Tensor empty_like(const Tensor& like, const View& v) {
  int64_t stride = 1;
  bool contiguous = true;
  for (int d = v.ndim - 1; d >= 0; --d) {
    contiguous = contiguous && (v.strides[d] == stride || v.sizes[d] == 1);
    stride *= v.sizes[d];
  }
  return contiguous ? empty(like, v.sizes, v.ndim, v.dtype) : torch::stable::empty_like(like);
}

// What a forward saved: kernels read it as one run. Hooks on saved tensors may have changed its strides.
Tensor as_run(const Tensor& saved) {
  require(saved.dim() == 1, "saved is not of this loss");
  return saved.stride(0) == 1 ? saved : torch::stable::contiguous(saved);
}
DType saved_dtype(const View& input) { return input.dtype == DType::f64 ? DType::f64 : DType::f32; }
DType loss_dtype(const View& input, const Flags& flags) {
  return flags.float_loss && input.dtype != DType::f64 ? DType::f32 : input.dtype;
}
void require_autocast_or_same(const View& v, const View& input, const Flags& flags, const char* why) {
  require(!v || v.dtype == input.dtype || (flags.float_loss && is_float(v.dtype) && v.dtype != DType::f64 && input.dtype != DType::f64), why);
}
// A gradient of the loss, repeated over the rows or elements where it is one number.
View grad_over(const Tensor& grad, const View& elements) {
  const View g = view(grad, "grad");
  require(is_float(g.dtype), "grad must be floating point");
  return g.ndim == 0 ? broadcast(g, elements, "") : g;
}

Call call(const char* loss, int64_t site, const Flags& flags, const View& input, const View& target, const Tensor& like) {
  int32_t device;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  return {loss, site, flags, Given(input), Given(target), device, like.get_device_index()};
}

// ---- the launchers of the device a tensor lies on

#if defined(LOSSGUARD_WITH_CUDA)

// Where kernels are launched: the tensor's device, made current for as long as this lives, and torch's stream.
class OnCuda {
 public:
#if defined(LOSSGUARD_EMULATED)
  explicit OnCuda(const Tensor&) : place_(current_place(emulated_place.device)) {}
  static bool has(const Tensor&) { return true; }
#else
  explicit OnCuda(const Tensor& t) : guard_(t.get_device_index()), place_(current_place(t.get_device_index())) {}
  static bool has(const Tensor& t) { return t.is_cuda(); }
#endif
  // What the forward that is launched next works in, if that is to be the graph's: torch allocates it in the graph's pool.
  void lend_scratch(const Tensor& like) {
    if (!place_.capturing) return;
    int64_t bytes;
    check(cuda::scratch_size(place_.device, bytes));
    const int64_t size = (bytes + 7) / 8;
    scratch_.emplace(empty(like, &size, 1, DType::f64));
    place_.scratch = scratch_->mutable_data_ptr();
#if defined(LOSSGUARD_EMULATED)
    new Tensor(*scratch_);  // there is no pool of the graph's that would keep it
#endif
  }
  const cuda::Place& place() const { return place_; }
  static void check(cuda::Error error) {
    if (error) throw std::runtime_error(std::string("lossguard on CUDA: ") + error);
  }

 private:
#if !defined(LOSSGUARD_EMULATED)
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  cuda::Place place_;
  MaybeTensor scratch_;
};

// What a forward found: on the CPU at once; of a launch on CUDA it will lie in `slot`.
struct Outcome {
  Violations violations;
  cuda::Place place{};
  cuda::Slot* slot = nullptr;
};

#define LOSSGUARD_FORWARD(name, Loss)                                    \
  Outcome name(const Loss& a, const View& loss, const Tensor& like) {    \
    if (!OnCuda::has(like)) return {cpu::name(a, loss)};                 \
    OnCuda on(like);                                                     \
    on.lend_scratch(like);                                               \
    Outcome outcome{{}, on.place()};                                     \
    OnCuda::check(cuda::name(a, loss, on.place(), outcome.slot));        \
    return outcome;                                                      \
  }
#define LOSSGUARD_BACKWARD(name, Loss)                                                    \
  void name(const Loss& a, const View& grad, const View& out, const Tensor& like) {       \
    if (!OnCuda::has(like)) return cpu::name(a, grad, out);                               \
    const OnCuda on(like);                                                                \
    OnCuda::check(cuda::name(a, grad, out, on.place()));                                  \
  }

#else

struct Outcome {
  Violations violations;
};
#define LOSSGUARD_FORWARD(name, Loss) \
  Outcome name(const Loss& a, const View& loss, const Tensor&) { return {cpu::name(a, loss)}; }
#define LOSSGUARD_BACKWARD(name, Loss) \
  void name(const Loss& a, const View& grad, const View& out, const Tensor&) { cpu::name(a, grad, out); }

#endif

// Raises what is wrong, now or later. `call` says what was called.
template <class MakeCall>
void settle(const Outcome& outcome, const Flags& flags, const View& saved, const MakeCall& call) {
#if defined(LOSSGUARD_WITH_CUDA)
  if (outcome.slot) {
    const Policy& policy = flags.policy;
    pending::add(outcome.place, *outcome.slot, saved.data, call());
    if (policy.when == When::immediately && policy.on_violation != OnViolation::skip && !outcome.place.capturing)
      pending::wait(pending::Until::own, Moment::the_call);
    return;
  }
#else
  static_cast<void>(flags), static_cast<void>(saved);
#endif
  if (outcome.violations.count) deliver({{call(), outcome.violations}}, Moment::the_call);
}

namespace launch {
LOSSGUARD_FORWARD(elementwise_forward, ElementwiseLoss)
LOSSGUARD_BACKWARD(elementwise_backward, ElementwiseLoss)
LOSSGUARD_FORWARD(cross_entropy_forward, RowLoss)
LOSSGUARD_BACKWARD(cross_entropy_backward, RowLoss)
LOSSGUARD_FORWARD(nll_forward, RowLoss)
LOSSGUARD_BACKWARD(nll_backward, RowLoss)
}  // namespace launch

// ---- BCE and BCE-with-logits

ElementwiseLoss elementwise(bool with_logits, const Tensor& input, const Tensor& target, const MaybeTensor& weight,
                            const MaybeTensor& pos_weight, int64_t flags) {
  ElementwiseLoss a;
  a.with_logits = with_logits;
  a.flags = decode(flags);
  a.input = view(input, "input");
  a.target = view(target, "target");
  require(is_float(a.input.dtype), "input must be floating point");
  require(same_shape(a.input, a.target), "target must have the shape of input");
  require_autocast_or_same(a.target, a.input, a.flags, "target must have the dtype of input");
  a.weight = broadcast(view(weight, "weight"), a.input, "weight must broadcast to the shape of input");
  a.pos_weight = broadcast(view(pos_weight, "pos_weight"), a.input, "pos_weight must broadcast to the shape of input");
  require(!a.weight || is_float(a.weight.dtype), "weight must be floating point");
  require(!a.pos_weight || is_float(a.pos_weight.dtype), "pos_weight must be floating point");
  return a;
}

std::tuple<Tensor, Tensor> elementwise_forward(const char* name, ElementwiseLoss&& a, const Tensor& input, int64_t site) {
  pending::poll(Moment::a_call);
  const int64_t tail = kSavedTail;
  Tensor saved = empty(input, &tail, 1, saved_dtype(a.input));
  a.saved = view(saved, "saved");
  const DType dtype = loss_dtype(a.input, a.flags);
  Tensor loss = a.flags.reduction != Reduction::none ? empty(input, nullptr, 0, dtype)
                : dtype == a.input.dtype             ? empty_like(input, a.input)
                                                     : empty(input, a.input.sizes, a.input.ndim, dtype);
  if (!a.flags.recomputed) stats::count(site, name, a.input.numel());
  const Outcome outcome = launch::elementwise_forward(a, view(loss, "loss"), input);
  settle(outcome, a.flags, a.saved, [&] { return call(name, site, a.flags, a.input, a.target, input); });
  return {std::move(loss), std::move(saved)};
}

Tensor elementwise_backward(ElementwiseLoss&& a, const Tensor& grad, const Tensor& input, const Tensor& given) {
  pending::begin_backward(given.const_data_ptr());
  const Tensor saved = as_run(given);
  a.saved = view(saved, "saved");
  require(a.saved.numel() == kSavedTail && a.saved.dtype == saved_dtype(a.input), "saved is not of this loss");
  const View g = grad_over(grad, a.input);
  require(same_shape(g, a.input), "grad must have the shape of the loss");
  Tensor out = empty_like(input, a.input);
  launch::elementwise_backward(a, g, view(out, "out"), input);
  return out;
}

std::tuple<Tensor, Tensor> bce_forward(const Tensor& input, const Tensor& target, const MaybeTensor& weight,
                                       int64_t flags, int64_t site) {
  return elementwise_forward("BCELoss", elementwise(false, input, target, weight, std::nullopt, flags), input, site);
}
Tensor bce_backward(const Tensor& grad, const Tensor& input, const Tensor& target, const MaybeTensor& weight,
                    const Tensor& saved, int64_t flags) {
  return elementwise_backward(elementwise(false, input, target, weight, std::nullopt, flags), grad, input, saved);
}
std::tuple<Tensor, Tensor> bce_with_logits_forward(const Tensor& input, const Tensor& target, const MaybeTensor& weight,
                                                   const MaybeTensor& pos_weight, int64_t flags, int64_t site) {
  return elementwise_forward("BCEWithLogitsLoss", elementwise(true, input, target, weight, pos_weight, flags), input,
                             site);
}
Tensor bce_with_logits_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                const MaybeTensor& weight, const MaybeTensor& pos_weight, const Tensor& saved,
                                int64_t flags) {
  return elementwise_backward(elementwise(true, input, target, weight, pos_weight, flags), grad, input, saved);
}

// ---- cross-entropy and NLL

RowLoss rows(const Tensor& input, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
             double smoothing, int64_t flags) {
  RowLoss a;
  a.flags = decode(flags);
  a.input = view(input, "input");
  a.target = view(target, "target");
  a.weight = view(weight, "weight");
  a.ignore_index = ignore_index;
  a.smoothing = smoothing;
  require(is_float(a.input.dtype), "input must be floating point");
  require(a.input.ndim >= 1, "input must have a class dimension");
  a.class_dim = a.input.ndim == 1 ? 0 : 1;
  a.probabilities = is_float(a.target.dtype);
  if (a.probabilities) {
    require(same_shape(a.input, a.target), "class probabilities must have the shape of input");
    require_autocast_or_same(a.target, a.input, a.flags, "class probabilities must have the dtype of input");
    require(ignore_index < 0, "ignore_index is not defined for class probabilities");
  } else if (a.input.ndim == 1 && a.target.ndim == 1) {
    require(a.target.sizes[0] == 1, "target must be one class index");  // as native: () or (1)
    a.target.ndim = 0;
  } else {
    require(same_shape(a.input.without_dim(a.class_dim), a.target), "target must have the shape of input without classes");
  }
  if (a.weight) {
    require(a.weight.ndim == 1 && a.weight.sizes[0] == a.classes(), "weight must have one element a class");
    require_autocast_or_same(a.weight, a.input, a.flags, "weight must have the dtype of input");
  }
  return a;
}

Call call(const char* name, int64_t site, const RowLoss& a, const Tensor& input, const Tensor& target) {
  // a.target has no dimension where (1) stands for ()
  Call c = call(name, site, a.flags, a.input, view(target, "target"), input);
  c.num_classes = a.classes();
  c.ignore_index = a.ignore_index;
  return c;
}

// As SavedTail says.
int64_t saved_size(const RowLoss& a, bool with_lse) {
  const int64_t rows = a.input.without_dim(a.class_dim).numel();
  return kSavedTail + (with_lse ? rows : 0) + (with_lse && a.saves_mass() ? rows : 0);
}

// A row's loss each, or one number.
Tensor row_loss(const RowLoss& a, const Tensor& input) {
  const View rows = a.input.without_dim(a.class_dim);
  const bool each = a.flags.reduction == Reduction::none;
  return empty(input, rows.sizes, each ? rows.ndim : 0, loss_dtype(a.input, a.flags));
}

std::tuple<Tensor, Tensor> cross_entropy_forward(const Tensor& input, const Tensor& target, const MaybeTensor& weight,
                                                 int64_t ignore_index, double smoothing, int64_t flags, int64_t site) {
  RowLoss a = rows(input, target, weight, ignore_index, smoothing, flags);
  pending::poll(Moment::a_call);
  const int64_t size = saved_size(a, true);
  Tensor saved = empty(input, &size, 1, saved_dtype(a.input));
  a.saved = view(saved, "saved");
  Tensor loss = row_loss(a, input);
  if (!a.flags.recomputed) stats::count(site, "CrossEntropyLoss", a.target.numel());
  const Outcome outcome = launch::cross_entropy_forward(a, view(loss, "loss"), input);
  settle(outcome, a.flags, a.saved, [&] { return call("CrossEntropyLoss", site, a, input, target); });
  return {std::move(loss), std::move(saved)};
}

std::tuple<Tensor, Tensor> nll_forward(const Tensor& input, const Tensor& target, const MaybeTensor& weight,
                                       int64_t ignore_index, int64_t flags, int64_t site) {
  RowLoss a = rows(input, target, weight, ignore_index, 0, flags);
  require(!a.probabilities, "target must hold class indices");
  pending::poll(Moment::a_call);
  const int64_t tail = kSavedTail;
  Tensor saved = empty(input, &tail, 1, saved_dtype(a.input));
  a.saved = view(saved, "saved");
  Tensor loss = row_loss(a, input);
  if (!a.flags.recomputed) stats::count(site, "NLLLoss", a.target.numel());
  const Outcome outcome = launch::nll_forward(a, view(loss, "loss"), input);
  settle(outcome, a.flags, a.saved, [&] { return call("NLLLoss", site, a, input, target); });
  return {std::move(loss), std::move(saved)};
}

Tensor row_backward(void (*backward)(const RowLoss&, const View&, const View&, const Tensor&), RowLoss&& a,
                    const Tensor& grad, const Tensor& input, const Tensor& given, bool with_lse) {
  pending::begin_backward(given.const_data_ptr());
  const View per_row = a.input.without_dim(a.class_dim);
  const Tensor saved = as_run(given);
  a.saved = view(saved, "saved");
  require(a.saved.numel() == saved_size(a, with_lse) && a.saved.dtype == saved_dtype(a.input),
          "saved is not of this loss");
  const View g = grad_over(grad, per_row);
  require(same_shape(g, per_row), "grad must have the shape of the loss");
  Tensor out = empty_like(input, a.input);
  backward(a, g, view(out, "out"), input);
  return out;
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& input, const Tensor& target, const MaybeTensor& weight,
                              const Tensor& saved, int64_t ignore_index, double smoothing, int64_t flags) {
  return row_backward(launch::cross_entropy_backward, rows(input, target, weight, ignore_index, smoothing, flags), grad,
                      input, saved, true);
}
Tensor nll_backward(const Tensor& grad, const Tensor& input, const Tensor& target, const MaybeTensor& weight,
                    const Tensor& saved, int64_t ignore_index, int64_t flags) {
  RowLoss a = rows(input, target, weight, ignore_index, 0, flags);
  require(!a.probabilities, "target must hold class indices");
  return row_backward(launch::nll_backward, std::move(a), grad, input, saved, false);
}

// ---- indices of other operations: NLL's check of labels, with no log-probabilities to pick

// A copy of `index` to go on with, after a check that it is in [0, source.size(dim)); for `take` dim is -1, and the
// indices count all elements. Callers have added the size to negative ones where `flags` say that those count from the end.
Tensor check_index(const Tensor& index, const Tensor& source, int64_t dim, int64_t operation, int64_t flags, int64_t site) {
  require(operation >= 0 && operation < int64_t(std::size(kOperations)), "no such operation");
  require(dim >= -1 && dim < std::max<int64_t>(source.dim(), 1), "no such dimension");
  require(index.dim() < kMaxDims, "too many dimensions");
  const std::vector<int64_t> shape(source.sizes().begin(), source.sizes().end());
  pending::poll(Moment::a_call);
  RowLoss a;
  a.flags = decode(flags);
  a.flags.reduction = Reduction::sum;
  a.flags.policy.check_finite = false;
  a.flags.needs_grad = true;  // what comes of a wrong one is not to be stepped on
  a.target = view(index, "index");
  require(!is_float(a.target.dtype), "index must be int64 or uint8");
  const int64_t one = 1, tail = kSavedTail;
  const Tensor zero = empty(index, &one, 1, DType::f32);
  Tensor saved = empty(index, &tail, 1, DType::f32), loss = empty(index, nullptr, 0, DType::f32);
  a.saved = view(saved, "saved");
  // As many log-probabilities as the source has elements along dim, a row of them for each index: all the same one.
  a.input = View{};
  a.input.present = true;
  a.input.dtype = DType::f32;
  a.input.data = const_cast<void*>(zero.const_data_ptr());
  a.input.ndim = a.target.ndim + 1;
  a.class_dim = a.target.ndim == 0 ? 0 : 1;
  for (int d = 0, from = 0; d < a.input.ndim; ++d) {
    a.input.strides[d] = 0;
    a.input.sizes[d] = d == a.class_dim ? dim < 0 || shape.empty() ? source.numel() : shape[dim] : a.target.sizes[from++];
  }
  a.ignore_index = -1 - (int64_t(1) << 62);  // none: far from every size
  const Outcome outcome = launch::nll_forward(a, view(loss, "loss"), index);
  settle(outcome, a.flags, View{}, [&] {
    Call c = call(kOperations[operation], site, a.flags, a.input, a.target, index);
    c.input = Given(shape, DType::f32);
    c.num_classes = a.classes();
    return c;
  });
  return torch::stable::clone(index);
}

}  // namespace
}  // namespace lossguard

STABLE_TORCH_LIBRARY(lossguard, m) {
  m.def("bce_forward(Tensor input, Tensor target, Tensor? weight, int flags, int site) -> (Tensor, Tensor)");
  m.def("bce_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight, Tensor saved, int flags) -> Tensor");
  m.def(
      "bce_with_logits_forward(Tensor input, Tensor target, Tensor? weight, Tensor? pos_weight, int flags, int site)"
      " -> (Tensor, Tensor)");
  m.def(
      "bce_with_logits_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight, Tensor? pos_weight, "
      "Tensor saved, int flags) -> Tensor");
  m.def(
      "cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
      "int flags, int site) -> (Tensor, Tensor)");
  m.def(
      "cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight, Tensor saved, "
      "int ignore_index, float label_smoothing, int flags) -> Tensor");
  m.def(
      "nll_forward(Tensor input, Tensor target, Tensor? weight, int ignore_index, int flags, int site)"
      " -> (Tensor, Tensor)");
  m.def(
      "nll_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight, Tensor saved, int ignore_index, "
      "int flags) -> Tensor");
  m.def("check_index(Tensor index, Tensor source, int dim, int operation, int flags, int site) -> Tensor");
}

#define LOSSGUARD_IMPL(key)                          \
  STABLE_TORCH_LIBRARY_IMPL(lossguard, key, m) {     \
    using namespace lossguard;                       \
    m.impl("bce_forward", TORCH_BOX(&bce_forward));                              \
    m.impl("bce_backward", TORCH_BOX(&bce_backward));                            \
    m.impl("bce_with_logits_forward", TORCH_BOX(&bce_with_logits_forward));      \
    m.impl("bce_with_logits_backward", TORCH_BOX(&bce_with_logits_backward));    \
    m.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));          \
    m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));        \
    m.impl("nll_forward", TORCH_BOX(&nll_forward));                              \
    m.impl("nll_backward", TORCH_BOX(&nll_backward));                            \
    m.impl("check_index", TORCH_BOX(&check_index));                              \
  }

LOSSGUARD_IMPL(CPU)
#if defined(LOSSGUARD_WITH_CUDA) && !defined(LOSSGUARD_EMULATED)
LOSSGUARD_IMPL(CUDA)
#endif
