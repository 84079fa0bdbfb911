// Host side of a launch: its grid, its errors, and what every forward hands to finish.h.
#pragma once
#include <algorithm>

#include "finish.h"
#include "layout.h"
#include "runtime.h"

namespace lossguard::cuda {

constexpr int kBlocksPerMultiprocessor = 8;

// Of a stream, allocated at its first use and kept. Kernels with more blocks than `max_blocks` do not exist:
// they walk their work in steps of the grid.
struct Workspace {
  Scratch scratch;
  int multiprocessors;
  int max_blocks;
};
// Why not, in CUDA's words, or null.
Error workspace_of(const Place& place, Workspace& out);

// A piece of mailbox that one launch may write to. Absent where nobody will read it.
class MailHold {
 public:
  MailHold() = default;
  MailHold(const MailHold&) = delete;
  ~MailHold();
  Error take(const Place& place);
  Mail* on_device() const { return on_device_; }
  // Waits for the stream; fills `found` if the launch sent a report.
  Error wait(const Place& place, Violations& found);

 private:
  int device_ = -1;
  int slot_ = -1;
  Mail* on_device_ = nullptr;
};

bool is_capturing(const Place& place);
Error words(int cuda_error);  // of a cudaError_t; null for success

inline int grid_for(const Workspace& w, int64_t blocks) {
  return int(std::clamp<int64_t>(blocks, 1, w.max_blocks));
}

template <class... Parameters, class... Arguments>
Error launch(void (*kernel)(Parameters...), int blocks, const Place& place, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(place.stream);
  return words(cudaLaunchKernelEx(&config, kernel, arguments...));
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

// What every forward does around its launch. A captured launch reports nothing: its replays have no host to wait.
template <class F>
Error forward(const Flags& flags, const Place& place, Violations& found, const F& launch) {
  Workspace workspace;
  MailHold mail;
  if (Error error = workspace_of(place, workspace)) return error;
  if (flags.policy.on_violation != OnViolation::skip && !is_capturing(place))
    if (Error error = mail.take(place)) return error;
  if (Error error = launch(workspace, mail)) return error;
  return mail.on_device() ? mail.wait(place, found) : nullptr;
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
inline Finish make_finish(const Workspace& w, const MailHold& mail, const Flags& flags, const View& saved, const View& loss) {
  Finish f{};
  f.scratch = w.scratch;
  f.mail = mail.on_device();
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
