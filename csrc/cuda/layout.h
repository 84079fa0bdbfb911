// Strided operands as a kernel argument: what Space (csrc/space.h) found about them, in the device's hands.
#pragma once
#define LOSSGUARD_ISA cuda
#include "../space.h"
#include "device.h"

namespace lossguard::cuda {

// Dimensions left when those of size 1 are dropped and neighbours are merged. Each doubles the number of
// elements at least: no tensor of fewer than 2^33 elements has more.
constexpr int kDims = 32;

template <int K>
struct Layout {
  int64_t numel = 0;
  int ndim = 0;
  bool narrow = false;  // positions fit 32 bits, where division is cheap
  int64_t sizes[kDims];
  int64_t strides[K][kDims];

  // Where element `position` of the walk lies in each operand.
  __device__ __forceinline__ void locate(int64_t position, int64_t (&at)[K]) const {
#pragma unroll
    for (int k = 0; k < K; ++k) at[k] = 0;
    int64_t rest = position;
#pragma unroll 1
    for (int d = ndim - 1; d > 0; --d) {
      const int64_t next = narrow ? int64_t(uint32_t(rest) / uint32_t(sizes[d])) : rest / sizes[d];
      const int64_t i = rest - next * sizes[d];
      rest = next;
#pragma unroll
      for (int k = 0; k < K; ++k) at[k] += i * strides[k][d];
    }
#pragma unroll
    for (int k = 0; k < K; ++k) at[k] += rest * strides[k][0];
  }
  __device__ __forceinline__ int64_t locate(int64_t position) const {
    static_assert(K == 1, "several operands");
    int64_t at[1];
    locate(position, at);
    return at[0];
  }
};

template <int K>
bool make_layout(const Space<K>& space, Layout<K>& layout) {
  layout.numel = space.numel();
  layout.ndim = space.ndim();
  layout.narrow = layout.numel < int64_t(1) << 31;
  if (layout.ndim > kDims) return false;
  for (int d = 0; d < layout.ndim; ++d) {
    layout.sizes[d] = space.size(d);
    for (int k = 0; k < K; ++k) layout.strides[k][d] = space.stride_of(k, d);
  }
  return true;
}

// From the position in a walk that follows the memory of `first` to the index in its logical order.
inline bool make_logical(const View& first, Layout<1>& layout) {
  const View logical = first.dense_over(first);
  const View* const views[] = {&first, &logical};
  const Space<2> space(views, Order::memory);
  layout.numel = space.numel();
  layout.ndim = space.ndim();
  layout.narrow = layout.numel < int64_t(1) << 31;
  if (layout.ndim > kDims) return false;
  for (int d = 0; d < layout.ndim; ++d) {
    layout.sizes[d] = space.size(d);
    layout.strides[0][d] = space.stride_of(1, d);
  }
  return true;
}

}  // namespace lossguard::cuda
