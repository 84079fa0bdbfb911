// Where torch launches CUDA kernels now.
#pragma once
#include <cstdint>

#include "cuda/runtime.h"

#if defined(LOSSGUARD_EMULATED)

namespace lossguard {
// What tests/cuda_emulator runs CPU tensors on, in this thread.
inline thread_local cuda::Place emulated_place{0, nullptr};

inline cuda::Place torch_place(int device) {
  return device == emulated_place.device ? emulated_place : cuda::Place{device, nullptr};
}
}  // namespace lossguard

#else

// Lives in libtorch_cuda: null under a CPU-only torch, where no CUDA tensor can reach us.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace lossguard {
inline cuda::Place torch_place(int device) {
  cuda::Place place{device, nullptr};
  if (aoti_torch_get_current_cuda_stream) aoti_torch_get_current_cuda_stream(device, &place.stream);
  return place;
}
}  // namespace lossguard

#endif

namespace lossguard {
inline cuda::Place current_place(int device) {
  cuda::Place place = torch_place(device);
  place.capturing = cuda::is_capturing(place);
  return place;
}
}  // namespace lossguard
