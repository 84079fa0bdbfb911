// Host side of a launch: its grid, its errors, and what every forward hands to finish.h.
#pragma once
#include <algorithm>

#include "calls.h"
#include "finish.h"
#include "layout.h"
#include "runtime.h"

namespace lossguard::cuda {

constexpr int kBlocksPerMultiprocessor = 8;

// Kernels with more blocks than `max_blocks` do not exist: they walk their work in steps of the grid.
struct Gpu {
  int multiprocessors;
  int max_blocks;
};
// What a forward needs besides its tensors. The scratch memory is its stream's, allocated at the first use and kept.
struct Workspace : Gpu {
  Scratch scratch;
  Mail* mail;      // the slot's, and the device's bell: as the device sees them
  uint32_t* bell;
};

Error gpu_of(const Place& place, Gpu& gpu);
// A slot for one launch. Afterwards, that launch is told about, or the slot given back.
Error prepare(const Place& place, Workspace& workspace, Slot*& slot);
Error launched(const Place& place, Slot& slot);
// CUDA loads a kernel at its first launch, which may not be captured.
Error load(const void* kernel);
Error words(int cuda_error);  // of a cudaError_t; null for success

#define LG_TRY(call) \
  if (Error error = words(call)) return error

inline int grid_for(const Gpu& gpu, int64_t blocks) { return int(std::clamp<int64_t>(blocks, 1, gpu.max_blocks)); }

template <class... Parameters, class... Arguments>
Error launch(void (*kernel)(Parameters...), int blocks, const Place& place, const Arguments&... arguments) {
  if (place.capturing)
    if (Error error = load(reinterpret_cast<const void*>(kernel))) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(place.stream);
  return words(LG_CUDA(cudaLaunchKernelEx, &config, kernel, arguments...));
}

// f(T()) for the type of a tensor's elements.
template <class F>
Error by_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f64: return f(double());
    case DType::f16: return f(Half());
    case DType::bf16: return f(BFloat16());
    default: return f(float());
  }
}

// What every forward does around its launch.
template <class F>
Error forward(const Place& place, Slot*& slot, const F& launch) {
  Workspace workspace;
  if (Error error = prepare(place, workspace, slot)) return error;
  Error error = launch(workspace);
  if (!error) error = launched(place, *slot);
  if (error) give_back(*slot);
  return error;
}

// The end of `saved`.
inline Operand tail_of(const View& saved) {
  Operand tail = operand(saved);
  tail.data = static_cast<char*>(saved.data) +
              (saved.numel() - kSavedTail) * (saved.dtype == DType::f64 ? sizeof(double) : sizeof(float));
  return tail;
}

constexpr Error kTooManyDims = "more than 32 dimensions that no two of can be merged";

// What is the same for every loss.
inline Finish make_finish(const Workspace& w, const Flags& flags, const View& saved, const View& loss) {
  Finish f{};
  f.scratch = w.scratch;
  f.mail = w.mail;
  f.bell = w.bell;
  if (flags.reduction != Reduction::none) f.loss = operand(loss);
  f.tail = tail_of(saved);
  f.mean = flags.reduction == Reduction::mean;
  f.strict = flags.policy.strict;
  f.check_finite = flags.policy.check_finite;
  f.of_bad = flags.policy.on_violation == OnViolation::raise ? std::numeric_limits<double>::quiet_NaN() : 0;
  f.target_check = Check::unit_interval;
  f.input_check = Check::finite;
  f.watch_input = f.check_finite;
  f.target_seen = f.input_seen = -1;
  return f;
}

}  // namespace lossguard::cuda
