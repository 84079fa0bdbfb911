// A borrowed strided tensor: what ops hand to launchers. No torch type crosses that line.
#pragma once
#include <cstdint>

namespace lossguard {

enum class DType : int32_t { f32, f64, f16, bf16, i64, u8 };

constexpr double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-52;
    case DType::f16: return 0x1p-10;
    case DType::bf16: return 0x1p-7;
    default: return 0x1p-23;
  }
}

constexpr int kMaxDims = 64;  // beyond, calls go to native torch

struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  bool present = false;  // an empty tensor is present although its data pointer may be null
  int ndim = 0;
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];  // in elements

  View() {}
  View(const View& v) { *this = v; }
  View& operator=(const View& v) {  // not all 64 dimensions
    data = v.data;
    dtype = v.dtype;
    present = v.present;
    ndim = v.ndim;
    for (int d = 0; d < v.ndim; ++d) {
      sizes[d] = v.sizes[d];
      strides[d] = v.strides[d];
    }
    return *this;
  }
  explicit operator bool() const { return present; }

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= sizes[d];
    return n;
  }
  // This shape, laid row-major over the storage of another view.
  View dense_over(const View& storage) const {
    View v = *this;
    v.data = storage.data;
    v.dtype = storage.dtype;
    v.present = storage.present;
    int64_t stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      v.strides[d] = stride;
      stride *= sizes[d];
    }
    return v;
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
