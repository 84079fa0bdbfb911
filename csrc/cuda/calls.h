// Every call of the CUDA runtime by the host goes through LG_CUDA and is counted: torch's own debugging of
// synchronizations does not see a runtime that is linked in statically, and a test holds a step to what it may call.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace lossguard::cuda {

#define LOSSGUARD_RUNTIME_CALLS(X)                                                                                   \
  X(cudaDeviceGetAttribute) X(cudaDriverGetVersion) X(cudaEventCreateWithFlags) X(cudaEventQuery) X(cudaEventRecord) \
  X(cudaEventSynchronize) X(cudaFree) X(cudaFuncGetAttributes) X(cudaGetDeviceCount) X(cudaGetLastError)             \
  X(cudaGraphRetainUserObject) X(cudaHostAlloc) X(cudaHostGetDevicePointer) X(cudaLaunchKernelEx) X(cudaMalloc)      \
  X(cudaMemsetAsync) X(cudaRuntimeGetVersion) X(cudaSetDevice) X(cudaStreamCreateWithFlags) X(cudaStreamDestroy)     \
  X(cudaStreamGetCaptureInfo) X(cudaStreamIsCapturing) X(cudaStreamSynchronize)                                      \
  X(cudaThreadExchangeStreamCaptureMode) X(cudaUserObjectCreate)

enum class RuntimeCall {
#define X(name) name,
  LOSSGUARD_RUNTIME_CALLS(X)
#undef X
};
constexpr const char* kRuntimeCalls[] = {
#define X(name) #name,
    LOSSGUARD_RUNTIME_CALLS(X)
#undef X
};
inline std::atomic<int64_t> runtime_calls[sizeof(kRuntimeCalls) / sizeof(*kRuntimeCalls)];

#define LG_CUDA(function, ...) \
  (runtime_calls[int(RuntimeCall::function)].fetch_add(1, std::memory_order_relaxed), function(__VA_ARGS__))

}  // namespace lossguard::cuda
