// A borrowed strided tensor: what ops hand to launchers. No torch type crosses that line.
#pragma once
#include <cstdint>

namespace lossguard {

enum class DType : int32_t { f32, f64, f16, bf16, i64, u8 };

constexpr int kMaxDims = 64;  // torch's own limit

struct View {
  void* data = nullptr;  // null: the operand is absent
  DType dtype = DType::f32;
  int ndim = 0;
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];  // in elements

  explicit operator bool() const { return ndim >= 0 && present; }
  bool present = false;  // an empty tensor is present although its data pointer may be null

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= sizes[d];
    return n;
  }
  View without_dim(int dim) const {
    View v = *this;
    for (int d = dim + 1; d < ndim; ++d) {
      v.sizes[d - 1] = sizes[d];
      v.strides[d - 1] = strides[d];
    }
    v.ndim = ndim - 1;
    return v;
  }
};

}  // namespace lossguard
