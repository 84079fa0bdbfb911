// Runs of any dtype to and from the type the arithmetic is done in.
#pragma once
#include <cstdint>
#include <cstring>

#include "../view.h"
#include "../math/number.h"

#if defined(__F16C__)
#include <immintrin.h>
#else
#include <torch/headeronly/util/Half.h>
#endif

namespace lossguard::LOSSGUARD_ISA {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// clang-format off
template <class A> LG_HD A widen(float v) { return A(v); }
template <class A> LG_HD A widen(double v) { return A(v); }
// clang-format on
template <class A>
LG_HD A widen(BFloat16 v) {
  const uint32_t bits = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return A(f);
}
template <class A>
LG_HD A widen(Half v) {
#if defined(__F16C__)
  return A(_cvtsh_ss(v.bits));
#else
  return A(float(c10::Half(v.bits, c10::Half::from_bits())));
#endif
}

LG_HD void narrow(float v, float& out) { out = v; }
LG_HD void narrow(double v, float& out) { out = float(v); }
LG_HD void narrow(double v, double& out) { out = v; }
LG_HD void narrow(float v, double& out) { out = v; }
template <class A>
LG_HD void narrow(A v, BFloat16& out) {  // to nearest, ties to even
  const float f = float(v);
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  out.bits = f != f ? uint16_t(0x7fc0) : uint16_t(rounded);
}
template <class A>
LG_HD void narrow(A v, Half& out) {
#if defined(__F16C__)
  out.bits = _cvtss_sh(float(v), _MM_FROUND_TO_NEAREST_INT);
#else
  out.bits = c10::Half(float(v)).x;
#endif
}

template <class S, class A>
LG_HD void load_as(const S* from, int64_t stride, int64_t n, A* to) {
  int64_t i = 0;
  if (stride == 1) {
#if defined(__F16C__)
    if constexpr (sizeof(A) == 4 && __is_same(S, Half))
      for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < n; ++i) to[i] = widen<A>(from[i]);
  } else {
    for (; i < n; ++i) to[i] = widen<A>(from[i * stride]);
  }
}
template <class S, class A>
LG_HD void store_as(S* to, int64_t stride, int64_t n, const A* from) {
  int64_t i = 0;
  if (stride == 1) {
#if defined(__F16C__)
    if constexpr (sizeof(A) == 4 && __is_same(S, Half))
      for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) narrow(from[i], to[i]);
  } else {
    for (; i < n; ++i) narrow(from[i], to[i * stride]);
  }
}

// n elements of v from `offset` on, `stride` apart.
template <class A>
static void load_run(const View& v, int64_t offset, int64_t stride, int64_t n, A* to) {
  switch (v.dtype) {
    case DType::f32: return load_as(static_cast<const float*>(v.data) + offset, stride, n, to);
    case DType::f64: return load_as(static_cast<const double*>(v.data) + offset, stride, n, to);
    case DType::f16: return load_as(static_cast<const Half*>(v.data) + offset, stride, n, to);
    case DType::bf16: return load_as(static_cast<const BFloat16*>(v.data) + offset, stride, n, to);
    default: __builtin_unreachable();
  }
}
template <class A>
static void store_run(const View& v, int64_t offset, int64_t stride, int64_t n, const A* from) {
  switch (v.dtype) {
    case DType::f32: return store_as(static_cast<float*>(v.data) + offset, stride, n, from);
    case DType::f64: return store_as(static_cast<double*>(v.data) + offset, stride, n, from);
    case DType::f16: return store_as(static_cast<Half*>(v.data) + offset, stride, n, from);
    case DType::bf16: return store_as(static_cast<BFloat16*>(v.data) + offset, stride, n, from);
    default: __builtin_unreachable();
  }
}
LG_HD int64_t load_label(const View& v, int64_t offset) {
  return v.dtype == DType::i64 ? static_cast<const int64_t*>(v.data)[offset]
                               : static_cast<const uint8_t*>(v.data)[offset];
}
static inline void load_label_run(const View& v, int64_t offset, int64_t stride, int64_t n, int64_t* to) {
  if (v.dtype == DType::i64) {
    const int64_t* from = static_cast<const int64_t*>(v.data) + offset;
    if (stride == 1)
      std::memcpy(to, from, n * sizeof *to);
    else
      for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
  } else {
    const uint8_t* from = static_cast<const uint8_t*>(v.data) + offset;
    for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
  }
}

template <class A>
constexpr DType dtype_of = sizeof(A) == 8 ? DType::f64 : DType::f32;

// A pointer to elements of v in the type A if they lie there as they are, else null.
template <class A>
LG_HD A* in_place(const View& v, int64_t offset, int64_t stride) {
  return v.dtype == dtype_of<A> && stride == 1 ? static_cast<A*>(v.data) + offset : nullptr;
}

}  // namespace lossguard::LOSSGUARD_ISA
