// Shadows the toolkit's header: half precision, converted as the hardware does it. To the nearest, ties to even, with
// subnormals; a NaN becomes the one with all mantissa bits set and no sign.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

struct __half_raw {
  unsigned short x;
};

struct alignas(2) __half {
  __half() = default;
  __half(const __half_raw& raw) : bits(raw.x) {}
  __half(float v);
  operator float() const;
  operator __half_raw() const { return {bits}; }

  unsigned short bits;
};
using half = __half;

inline __half __ushort_as_half(unsigned short v) { return __half_raw{v}; }
inline __half __short_as_half(short v) { return __half_raw{static_cast<unsigned short>(v)}; }
inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline short __half_as_short(__half v) { return static_cast<short>(v.bits); }

namespace cuda_emulator {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits;
  if (rest > 0x7c00) {
    bits = 0x7fffffff;
#if defined(__F16C__)
  } else {
    static_cast<void>(sign);
    return _cvtsh_ss(half);
#else
  } else if (rest == 0x7c00) {
    bits = sign | 0x7f800000;
  } else if (rest < 0x0400) {  // subnormal, or zero: exact in float
    const float magnitude = float(rest) * 0x1p-24f;
    std::memcpy(&bits, &magnitude, sizeof bits);
    bits |= sign;
  } else {
    bits = sign | ((rest << 13) + ((127 - 15) << 23));
#endif
  }
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline uint16_t float_to_half(float v) {
  if (v != v) return 0x7fff;
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and beyond round to infinity
  if (rest < 0x38800000) {                                 // below 2^-14: a multiple of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &rest, sizeof magnitude);
    magnitude += 0.5f;  // whose last bit is worth 2^-24: the addition rounds as it should
    uint32_t rounded;
    std::memcpy(&rounded, &magnitude, sizeof rounded);
    return uint16_t(sign | (rounded - 0x3f000000));
  }
  const uint32_t rounded = rest + 0xfff + (rest >> 13 & 1);
  return uint16_t(sign | ((rounded - ((127 - 15) << 23)) >> 13));
#endif
}

}  // namespace cuda_emulator

inline float __half2float(__half v) { return cuda_emulator::half_to_float(v.bits); }
inline __half __float2half_rn(float v) { return __ushort_as_half(cuda_emulator::float_to_half(v)); }
inline __half __float2half(float v) { return __float2half_rn(v); }
inline __half::__half(float v) : bits(cuda_emulator::float_to_half(v)) {}
inline __half::operator float() const { return __half2float(*this); }
