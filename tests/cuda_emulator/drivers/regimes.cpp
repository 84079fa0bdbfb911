// Every kernel in every regime, through the launchers, against csrc/math in double and a plain scan.
//
//   regimes [--dtypes float32,bfloat16] [--schedules random] [--without PART OF A REGIME'S NAME] [PART OF ONE'S NAME ...]
//
// Prints what is wrong, and then the kernels that were reached. Calls run under one schedule after the other. Every
// fourth also runs under the others, and gives the same to the bit.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>

#include "call.h"
#include "../emulator.h"
#include "fill.h"

namespace drivers {
namespace {

// Of a grid on a GPU with one multiprocessor.
constexpr int kMostBlocks = 8;
constexpr int64_t kMostThreads = kMostBlocks * 256;

struct Options {
  std::vector<DType> dtypes = {DType::f32, DType::f64, DType::f16, DType::bf16};
  std::vector<cuda_emulator::Schedule> schedules = {cuda_emulator::Schedule::ascending,
                                                    cuda_emulator::Schedule::descending,
                                                    cuda_emulator::Schedule::random};
  std::vector<std::string> parts;  // any of them; none: all regimes
  std::string without = "?";

  bool wants(const std::string& regime) const {
    const auto has = [&](const std::string& part) { return regime.find(part) != regime.npos; };
    return !has(without) && (parts.empty() || std::any_of(parts.begin(), parts.end(), has));
  }
} options;

int failures = 0, calls = 0, launches = 0;
std::set<std::string> reached;

// ---- shapes by the dtype: p is the number of elements in 16 bytes, h that of a warp's registers

struct Unit {
  int64_t p, h;
};
Unit unit_of(DType dtype) { return {16 / bytes_of(dtype), dtype == DType::f64 ? 512 : 1024}; }
using Shape = Sizes (*)(Unit);
#define SHAPE(...) \
  [](Unit u) { \
    const auto [p, h] = u; \
    static_cast<void>(p + h); \
    return Sizes{__VA_ARGS__}; \
  }

enum class Kernel { flat, registers, block, pixels, strided };

// ---- cross-entropy and NLL

struct RowRegime {
  const char* name;
  Shape shape;
  Kernel hard, soft, nll;  // of labels, of class probabilities, of NLL's backward
  Layout layout = Layout::dense, target = Layout::dense;
  Layout out = Layout::dense;  // of the gradient
  int multiprocessors = 1;
};

// float64 takes `registers` for `flat` and `strided` for `pixels`.
const RowRegime kRowRegimes[] = {
    {"short rows", SHAPE(300, 4 * p - 1), Kernel::flat, Kernel::flat, Kernel::flat},
    {"short rows, the longest, offset", SHAPE(300, 8 * p - 1), Kernel::flat, Kernel::registers, Kernel::flat, Layout::offset,
     Layout::offset, Layout::offset},
    {"short rows, odd", SHAPE(270, 5), Kernel::flat, Kernel::flat, Kernel::flat, Layout::dense, Layout::dense,
     Layout::offset},
    {"short rows, more than the grid has threads", SHAPE(kMostThreads + 9, 3), Kernel::flat, Kernel::flat,
     Kernel::flat},
    {"short rows, channels last", SHAPE(2, 5, 4, 8), Kernel::flat, Kernel::flat, Kernel::flat, Layout::channels_last,
     Layout::channels_last, Layout::channels_last},
    {"no rows", SHAPE(0, 5), Kernel::flat, Kernel::flat, Kernel::flat},
    {"no batch", SHAPE(5), Kernel::flat, Kernel::flat, Kernel::flat},
    {"one class", SHAPE(70, 1), Kernel::flat, Kernel::flat, Kernel::flat},
    {"2 lanes a row", SHAPE(300, 2 * p), Kernel::registers, Kernel::registers, Kernel::flat},
    {"2 lanes a row, apart", SHAPE(150, 8 * p), Kernel::registers, Kernel::registers, Kernel::strided, Layout::padded,
     Layout::padded, Layout::padded},
    {"2 lanes a row, unaligned", SHAPE(131, 4 * p + 1), Kernel::registers, Kernel::registers, Kernel::strided,
     Layout::ragged, Layout::ragged, Layout::ragged},
    {"8 lanes a row", SHAPE(37, 17 * p + 1), Kernel::registers, Kernel::registers, Kernel::flat},
    {"32 lanes a row", SHAPE(11, h), Kernel::registers, Kernel::registers, Kernel::flat},
    {"a block a row", SHAPE(3, h + 1), Kernel::block, Kernel::block, Kernel::flat},
    {"a block a row, more than the grid has blocks", SHAPE(kMostBlocks + 2, h + 3), Kernel::block, Kernel::block,
     Kernel::strided, Layout::ragged, Layout::ragged, Layout::ragged},
    {"a block a row, twice over it", SHAPE(2, 9 * h), Kernel::block, Kernel::block, Kernel::flat},
    {"3 blocks a row", SHAPE(1, 3 * 256 * p + 5), Kernel::block, Kernel::block, Kernel::flat, Layout::offset,
     Layout::offset, Layout::offset, 2},
    {"3 blocks for a row without batch", SHAPE(3 * 256 * p), Kernel::block, Kernel::block, Kernel::flat, Layout::dense,
     Layout::dense, Layout::dense, 2},
    {"pixels", SHAPE(2, 5, 4, 2 * p), Kernel::pixels, Kernel::pixels, Kernel::pixels},
    {"pixels, many classes", SHAPE(1, 40, 3 * p), Kernel::pixels, Kernel::pixels, Kernel::pixels},
    {"pixels, more than the grid has threads", SHAPE(1, 2, kMostThreads + 8), Kernel::pixels, Kernel::pixels,
     Kernel::pixels},
    {"pixels, odd", SHAPE(2, 5, 3, 5), Kernel::strided, Kernel::strided, Kernel::strided},
    {"pixels, offset", SHAPE(2, 3, 4, 8), Kernel::strided, Kernel::strided, Kernel::strided, Layout::offset,
     Layout::offset, Layout::offset},
    {"rows column by column", SHAPE(41, 9), Kernel::strided, Kernel::strided, Kernel::strided, Layout::transposed,
     Layout::transposed, Layout::transposed},
    {"every second class", SHAPE(40, 9), Kernel::strided, Kernel::strided, Kernel::strided, Layout::every_second,
     Layout::every_second, Layout::every_second},
    {"five dimensions", SHAPE(2, 3, 3, 1, 5), Kernel::strided, Kernel::strided, Kernel::strided, Layout::dense,
     Layout::transposed},
    {"one row for all", SHAPE(60, 6), Kernel::registers, Kernel::registers, Kernel::flat, Layout::repeated},
    {"rows far apart", SHAPE(3, 12 * p), Kernel::registers, Kernel::registers, Kernel::strided, Layout::far,
     Layout::far, Layout::far},
    {"images far apart", SHAPE(3, 4, 2 * p), Kernel::pixels, Kernel::pixels, Kernel::pixels, Layout::far, Layout::far,
     Layout::far},
};

struct RowVariation {
  enum { ce, nll } loss;
  enum { i64, u8, probabilities, float_probabilities } target;
  Reduction reduction;
  Harm harm = Harm::none;
  bool weight = false;
  double smoothing = 0;
  bool each_grad = true;  // without reduction: a gradient each
  Policy policy = {};
};
using V = RowVariation;
constexpr Policy kFinite = {true, true, OnViolation::raise}, kLax = {false, false, OnViolation::warn};
constexpr Policy kSkip = {true, false, OnViolation::skip}, kSkipFinite = {true, true, OnViolation::skip};

const RowVariation kRowVariations[] = {
    {V::ce, V::i64, Reduction::mean},
    {V::ce, V::u8, Reduction::none, Harm::some, true},
    {V::ce, V::i64, Reduction::sum, Harm::all},
    {V::ce, V::i64, Reduction::mean, Harm::some, false, 0, true, kSkip},
    {V::ce, V::i64, Reduction::none, Harm::some, false, 0, true, kFinite},
    {V::ce, V::i64, Reduction::mean, Harm::some, true, 0.1},
    {V::ce, V::u8, Reduction::none, Harm::none, false, 0.25, false},
    {V::ce, V::probabilities, Reduction::mean},
    {V::ce, V::probabilities, Reduction::none, Harm::some, true, 0.1},
    {V::ce, V::probabilities, Reduction::sum, Harm::all, false, 0, true, kFinite},
    {V::ce, V::probabilities, Reduction::mean, Harm::none, true, 0, true, kLax},
    {V::ce, V::float_probabilities, Reduction::none, Harm::some, true},
    {V::nll, V::i64, Reduction::mean, Harm::none, true},
    {V::nll, V::u8, Reduction::none, Harm::some},
    {V::nll, V::i64, Reduction::sum, Harm::all, true},
    {V::nll, V::i64, Reduction::none, Harm::some, true, 0, true, kFinite},
    {V::nll, V::i64, Reduction::mean, Harm::some, false, 0, true, kSkipFinite},
};

Rows rows_of(const RowRegime& regime, const RowVariation& v, DType dtype, Random& random) {
  const Sizes sizes = regime.shape(unit_of(dtype));
  const bool soft = v.target == V::probabilities || v.target == V::float_probabilities;
  Rows a;
  a.nll = v.loss == V::nll;
  a.flags = {v.reduction, v.target == V::float_probabilities, v.policy, true, false};
  a.probabilities = soft;
  a.smoothing = v.smoothing;
  a.ignore_index = v.target == V::u8 ? 255 : -100;
  a.input = Tensor(dtype, sizes, regime.layout);
  const DType beside = v.target == V::float_probabilities && dtype != DType::f64 ? DType::f32 : dtype;
  if (soft) {
    a.target = Tensor(beside, sizes, regime.target);
  } else {
    const View rows = a.input.view().without_dim(a.class_dim());
    const Layout layout = regime.target == Layout::transposed ? Layout::transposed : Layout::dense;
    a.target = Tensor(v.target == V::u8 ? DType::u8 : DType::i64, Sizes(rows.sizes, rows.sizes + rows.ndim), layout);
  }
  if (v.weight) a.weight = Tensor(beside, {a.classes()});
  fill(a, v.harm, random);
  return a;
}

const char* type_of(DType dtype) {
  constexpr const char* names[] = {"float", "double", "__half", "__nv_bfloat16"};
  return names[int(dtype)];
}
const char* wide_type_of(DType dtype) { return dtype == DType::f64 ? "double" : "float"; }

std::vector<std::string> kernels_of(const RowRegime& regime, const Rows& a) {
  const std::string type = type_of(a.input.dtype());
  const int spread = a.probabilities ? 2 : a.smoothing != 0 ? 1 : 0;
  Kernel kernel = a.nll ? regime.nll : a.probabilities ? regime.soft : regime.hard;
  // What needs the probabilities in the dtype of the logits.
  if (a.probabilities && a.target.dtype() != a.input.dtype() && (kernel == Kernel::flat || kernel == Kernel::pixels))
    kernel = kernel == Kernel::flat ? Kernel::registers : Kernel::strided;
  if (kernel == Kernel::flat && a.input.dtype() == DType::f64 && !a.nll) kernel = Kernel::registers;
  const bool pixels = kernel == Kernel::pixels && a.input.dtype() != DType::f64;
  const auto strided = [&](const char* name, bool in_pixels) {
    return std::string(name) + ", " + std::to_string(in_pixels ? unit_of(a.input.dtype()).p : 1) + ">";
  };
  if (a.nll)
    return {std::string("nll_forward_rows<") + wide_type_of(a.input.dtype()) + ">",
            kernel == Kernel::flat ? "nll_backward_flat<" + type + ">"
                                   : strided(("nll_backward_strided<" + type).c_str(), pixels)};
  const std::string arguments = "<" + type + ", (Spread)" + std::to_string(spread);
  switch (kernel) {
    case Kernel::flat: return {"ce_forward_flat" + arguments + ">", "ce_backward_flat" + arguments + ">"};
    case Kernel::registers:
      return {"ce_forward_in_registers" + arguments + ">", "ce_backward_rows" + arguments + ">"};
    case Kernel::block: return {"ce_forward_by_block" + arguments + ">", "ce_backward_rows" + arguments + ">"};
    default:
      return {strided(("ce_forward_strided" + arguments).c_str(), pixels && !a.flags.policy.check_finite),
              strided(("ce_backward_strided" + arguments).c_str(), pixels)};
  }
}

// ---- BCE and BCE-with-logits

struct ElementRegime {
  const char* name;
  Shape shape;
  Kernel kernel;
  Layout input = Layout::dense, target = Layout::dense;
};

const ElementRegime kElementRegimes[] = {
    {"elements, none", SHAPE(0), Kernel::flat},
    {"elements, one", SHAPE(1), Kernel::flat},
    {"elements, a pack and one", SHAPE(p + 1), Kernel::flat},
    {"elements, a head alone", SHAPE(1), Kernel::flat, Layout::offset, Layout::offset},
    {"elements, head and tail", SHAPE(3, 37), Kernel::flat, Layout::offset, Layout::offset},
    {"elements, two tiles less one", SHAPE(1024 * p - 1), Kernel::flat},
    {"elements, more than the grid has at once", SHAPE(kMostBlocks * 512 * p + 3), Kernel::flat},
    {"elements, column-major", SHAPE(3, 5, 7), Kernel::flat, Layout::transposed, Layout::transposed},
    {"elements, channels last", SHAPE(2, 3, 4, 5), Kernel::flat, Layout::channels_last, Layout::channels_last},
    {"elements, target offset", SHAPE(3, 37), Kernel::strided, Layout::dense, Layout::offset},
    {"elements, target column-major", SHAPE(3, 5, 7), Kernel::strided, Layout::dense, Layout::transposed},
    {"elements, ragged", SHAPE(40, 9), Kernel::strided, Layout::ragged, Layout::padded},
    {"elements, every second", SHAPE(40, 9), Kernel::strided, Layout::every_second, Layout::every_second},
    {"elements, one target for all rows", SHAPE(120, 5), Kernel::strided, Layout::dense, Layout::repeated},
    {"elements, more than the grid has threads", SHAPE(kMostThreads + 7), Kernel::strided, Layout::dense,
     Layout::every_second},
    {"elements, far apart", SHAPE(3, 37), Kernel::strided, Layout::far, Layout::far},
};

struct ElementVariation {
  bool with_logits;
  Reduction reduction;
  Harm harm = Harm::none;
  bool weight = false, pos_weight = false;
  bool each_grad = true;
  Policy policy = {};
  bool float_target = false;  // autocast's
};

const ElementVariation kElementVariations[] = {
    {false, Reduction::mean},
    {false, Reduction::none, Harm::some},
    {false, Reduction::sum, Harm::all},
    {false, Reduction::none, Harm::some, true, false, false, kSkip},
    {true, Reduction::mean, Harm::some},
    {true, Reduction::none, Harm::none, false, true},
    {true, Reduction::sum, Harm::some, true, true},
    {true, Reduction::mean, Harm::all, false, false, true, kFinite},
    {true, Reduction::none, Harm::some, true, false, true, kFinite},
    {true, Reduction::none, Harm::some, false, false, true, kLax},
    {true, Reduction::mean, Harm::some, false, false, true, kSkipFinite, true},
};

Elements elements_of(const ElementRegime& regime, const ElementVariation& v, DType dtype, Random& random) {
  const Sizes sizes = regime.shape(unit_of(dtype));
  Elements a;
  a.with_logits = v.with_logits;
  a.flags = {v.reduction, v.float_target, v.policy, true, false};
  a.input = Tensor(dtype, sizes, regime.input);
  a.target = Tensor(v.float_target && dtype != DType::f64 ? DType::f32 : dtype, sizes, regime.target);
  if (v.weight) a.weight = Tensor(dtype, sizes, Layout::repeated);
  if (v.pos_weight) a.pos_weight = Tensor(dtype, sizes, Layout::repeated);
  fill(a, v.harm, random);
  return a;
}

std::vector<std::string> kernels_of(const ElementRegime& regime, const Elements& a) {
  const bool alike = !a.weight && !a.pos_weight && a.target.dtype() == a.input.dtype();
  const bool flat = regime.kernel == Kernel::flat && alike;
  const std::string arguments = std::string(flat ? type_of(a.input.dtype()) : wide_type_of(a.input.dtype())) + ", " +
                                (a.with_logits ? "true" : "false") + ">";
  const std::string kind = flat ? "flat<" : "strided<";
  return {"bce_forward_" + kind + arguments, "bce_backward_" + kind + arguments};
}

// ---- running them

std::string without(std::string text, const std::string& part) {
  for (size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
  return text;
}
std::vector<std::string> launched() {
  std::vector<std::string> names;
  for (const cuda_emulator::LaunchRecord& record : cuda_emulator::launch_log()) {
    names.push_back(without(record.kernel, "lossguard::cuda::"));
    reached.insert(names.back());
  }
  cuda_emulator::clear_launch_log();
  return names;
}

// A stream's first call finds out the size of the GPU, for good.
cuda::Place place_on(int multiprocessors) {
  static cudaStream_t streams[3] = {};
  cudaStream_t& stream = streams[multiprocessors];
  cuda_emulator::set_devices(1, multiprocessors);
  if (!stream) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return {0, stream};
}

template <class Loss>
std::string run_once(Call<Loss>& call, const cuda::Place& place, cuda_emulator::Schedule schedule,
                     const std::vector<std::string>& kernels) {
  cuda_emulator::set_schedule(schedule, uint64_t(++launches));
  if (cuda::Error error = call.forward(place)) return error;
  if (cuda::Error error = call.backward(place)) return error;
  if (cudaError_t error = cudaStreamSynchronize(static_cast<cudaStream_t>(place.stream)))
    return cudaGetErrorString(error);
  call.ask(true);
  std::string names, expected;
  for (const std::string& name : launched()) names += name + " ";
  for (const std::string& name : kernels) expected += name + " ";
  return names == expected ? "" : "launched " + names + "and not " + expected;
}

template <class Loss>
void run(const std::string& name, Call<Loss>& call, int multiprocessors, std::vector<std::string> kernels) {
  constexpr const char* schedules[] = {"ascending", "descending", "random"};
  if (call.loss.input.numel() == 0) kernels.pop_back();  // no gradient
  const cuda::Place place = place_on(multiprocessors);
  const size_t number = size_t(calls++), n = options.schedules.size();
  std::vector<std::vector<char>> first;
  for (size_t i = 0; i < (number % 4 == 0 ? n : 1); ++i) {
    const cuda_emulator::Schedule schedule = options.schedules[(number + i) % n];
    if (i > 0) call.renew();
    std::string wrong = run_once(call, place, schedule, kernels);
    if (wrong.empty()) wrong = i == 0 ? call.wrong() : call.wrong_report();
    if (wrong.empty() && i > 0 && call.results() != first) wrong = "not the same as under another schedule";
    if (i == 0) first = call.results();
    if (wrong.empty()) continue;
    if (++failures <= 20) std::printf("%s, %s: %s\n", name.c_str(), schedules[int(schedule)], wrong.c_str());
    return;
  }
}

template <class Regimes, class Variations, class Make>
void run_all(const Regimes& regimes, const Variations& variations, const Make& make) {
  for (const auto& regime : regimes) {
    const std::string of_regime = regime.name;
    if (!options.wants(of_regime)) continue;
    for (DType dtype : options.dtypes)
      for (const auto& variation : variations) {
        const size_t number = size_t(&variation - variations);
        Random random(uint64_t(&regime - regimes) * 100 + number);
        const std::string name =
            of_regime + ", " + name_of(dtype) + ", variation " + std::to_string(number);
        make(regime, variation, dtype, random, name);
      }
  }
}

void run_regimes() {
  run_all(kRowRegimes, kRowVariations,
          [](const RowRegime& regime, const RowVariation& v, DType dtype, Random& random, const std::string& name) {
            Call<Rows> call(rows_of(regime, v, dtype, random), {Layout::dense, regime.out, !v.each_grad},
                            random.next());
            run(name, call, regime.multiprocessors, kernels_of(regime, call.loss));
          });
  run_all(kElementRegimes, kElementVariations,
          [](const ElementRegime& regime, const ElementVariation& v, DType dtype, Random& random,
             const std::string& name) {
            Call<Elements> call(elements_of(regime, v, dtype, random), {regime.input, regime.input, !v.each_grad},
                                random.next());
            run(name, call, 1, kernels_of(regime, call.loss));
          });
}

// ---- the command line

template <class T, size_t n>
std::vector<T> choose(const char* text, const char* const (&names)[n]) {
  std::vector<T> chosen;
  for (std::string rest = text; !rest.empty();) {
    const std::string name = rest.substr(0, rest.find(','));
    rest.erase(0, name.size() + 1);
    size_t i = 0;
    while (i < n && name != names[i]) ++i;
    if (i == n) {
      std::fprintf(stderr, "%s is not known\n", name.c_str());
      std::exit(2);
    }
    chosen.push_back(T(i));
  }
  return chosen;
}

}  // namespace
}  // namespace drivers

int main(int argc, char** argv) {
  using namespace drivers;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--dtypes") && i + 1 < argc)
      options.dtypes = choose<DType>(argv[++i], {"float32", "float64", "float16", "bfloat16"});
    else if (!std::strcmp(argv[i], "--schedules") && i + 1 < argc)
      options.schedules = choose<cuda_emulator::Schedule>(argv[++i], {"ascending", "descending", "random"});
    else if (!std::strcmp(argv[i], "--without") && i + 1 < argc)
      options.without = argv[++i];
    else
      options.parts.push_back(argv[i]);
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was wrong before a crash is not lost
  run_regimes();
  std::printf("%d calls, %d wrong\n", calls, failures);
  for (const std::string& name : reached) std::printf("%s\n", name.c_str());
  return failures || !calls ? 1 : 0;
}
