// What every kernel is written in: 16-byte packs, conversions, warps. Nothing of a loss.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "../view.h"

// The emulator (tests/cuda_emulator) brings its own: there, each block's shared memory is an allocation.
#if !defined(LG_SHARED)
#define LG_SHARED(type, name) __shared__ type name
// A whole store that several kernels and the host may make at once. No read-modify-write: not every bus has those.
#define LG_STORE_SYSTEM(p, v) asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(uint32_t(v)) : "memory")
#endif

namespace lossguard::cuda {

using Half = __half;
using BFloat16 = __nv_bfloat16;

constexpr int kThreads = 256;  // of a block, in every kernel
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return int(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_id() { return int(threadIdx.x) / kWarp; }

// The type the arithmetic is done in.
template <class T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};
template <class T>
using wide_t = typename Wide<T>::type;

// clang-format off
template <class A> __device__ __forceinline__ A widen(float v) { return A(v); }
template <class A> __device__ __forceinline__ A widen(double v) { return A(v); }
template <class A> __device__ __forceinline__ A widen(Half v) { return A(__half2float(v)); }
template <class A> __device__ __forceinline__ A widen(BFloat16 v) { return A(__bfloat162float(v)); }
template <class T> struct Narrow;
template <> struct Narrow<float> { template <class A> static __device__ __forceinline__ float from(A v) { return float(v); } };
template <> struct Narrow<double> { template <class A> static __device__ __forceinline__ double from(A v) { return double(v); } };
template <> struct Narrow<Half> { template <class A> static __device__ __forceinline__ Half from(A v) { return __float2half_rn(float(v)); } };
template <> struct Narrow<BFloat16> { template <class A> static __device__ __forceinline__ BFloat16 from(A v) { return __float2bfloat16_rn(float(v)); } };
// clang-format on
template <class T, class A>
__device__ __forceinline__ T narrow(A v) {
  return Narrow<T>::from(v);
}

// Elements that are loaded and stored in one 16-byte access.
template <class T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  T v[size];
};
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(p);
  return pack;
}
template <class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T>& pack) {
  *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&pack);
}

// A tensor's elements where their type is known at run time only. Absent: {}.
struct Operand {
  void* data;
  DType dtype;

  explicit __host__ __device__ operator bool() const { return data != nullptr; }
  template <class A>
  __device__ __forceinline__ A load(int64_t i) const {
    switch (dtype) {
      case DType::f64: return widen<A>(static_cast<const double*>(data)[i]);
      case DType::f16: return widen<A>(static_cast<const Half*>(data)[i]);
      case DType::bf16: return widen<A>(static_cast<const BFloat16*>(data)[i]);
      default: return widen<A>(static_cast<const float*>(data)[i]);
    }
  }
  template <class A>
  __device__ __forceinline__ A load_or(int64_t i, A absent) const {
    return data ? load<A>(i) : absent;
  }
  template <class A>
  __device__ __forceinline__ void store(int64_t i, A v) const {
    switch (dtype) {
      case DType::f64: static_cast<double*>(data)[i] = narrow<double>(v); break;
      case DType::f16: static_cast<Half*>(data)[i] = narrow<Half>(v); break;
      case DType::bf16: static_cast<BFloat16*>(data)[i] = narrow<BFloat16>(v); break;
      default: static_cast<float*>(data)[i] = narrow<float>(v);
    }
  }
  __device__ __forceinline__ int64_t load_label(int64_t i) const {
    return dtype == DType::i64 ? static_cast<const int64_t*>(data)[i] : static_cast<const uint8_t*>(data)[i];
  }
};
inline Operand operand(const View& v) {
  Operand o{};
  o.data = v.data;
  o.dtype = v.dtype;
  return o;
}

template <class T>
__device__ __forceinline__ T broadcast_from(T v, int lane, int width = kWarp) {
  return __shfl_sync(kAllLanes, v, lane, width);
}
// Butterflies over groups of `width` lanes, a power of two: every lane gets the result, and the order is fixed.
template <class T>
__device__ __forceinline__ T sum_over(T v, int width = kWarp) {
  for (int step = width / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}
template <class T>
__device__ __forceinline__ T least_of(T v, int width = kWarp) {
  for (int step = width / 2; step > 0; step /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, v, step);
    v = other < v ? other : v;
  }
  return v;
}
template <class T>
__device__ __forceinline__ T greatest_of(T v, int width = kWarp) {
  for (int step = width / 2; step > 0; step /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, v, step);
    v = other > v ? other : v;
  }
  return v;
}

// Beyond every value, and below: the start of a minimum and of a maximum.
template <class T>
constexpr T kHighest =
    std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
template <class T>
constexpr T kLowest =
    std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::min();

}  // namespace lossguard::cuda
