// The CUDA stream that torch launches on.
#pragma once
#include <cstdint>

#if defined(LOSSGUARD_EMULATED)
#include "cuda/runtime.h"

namespace lossguard {
// What tests/cuda_emulator runs CPU tensors on, in this thread.
inline thread_local cuda::Place emulated_place{0, nullptr};
inline void* current_stream(int device) {
  return device == emulated_place.device ? emulated_place.stream : nullptr;
}
}  // namespace lossguard

#else

// Lives in libtorch_cuda: null under a CPU-only torch, where no CUDA tensor can reach us.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace lossguard {
inline void* current_stream(int device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream) aoti_torch_get_current_cuda_stream(device, &stream);
  return stream;
}
}  // namespace lossguard
#endif
