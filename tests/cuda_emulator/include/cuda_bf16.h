// Shadows the toolkit's header: bfloat16, the upper half of a float. To the nearest, ties to even; a NaN becomes the
// one with all mantissa bits set and no sign.
#pragma once
#include <cstdint>
#include <cstring>

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
  __nv_bfloat16() = default;
  __nv_bfloat16(const __nv_bfloat16_raw& raw) : bits(raw.x) {}
  __nv_bfloat16(float v);
  operator float() const;
  operator __nv_bfloat16_raw() const { return {bits}; }

  unsigned short bits;
};
using nv_bfloat16 = __nv_bfloat16;

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return __nv_bfloat16_raw{v}; }
inline __nv_bfloat16 __short_as_bfloat16(short v) { return __nv_bfloat16_raw{static_cast<unsigned short>(v)}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline short __bfloat16_as_short(__nv_bfloat16 v) { return static_cast<short>(v.bits); }

inline float __bfloat162float(__nv_bfloat16 v) {
  const uint32_t bits = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  if (v != v) return __ushort_as_bfloat16(0x7fff);
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return __ushort_as_bfloat16(static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}
inline __nv_bfloat16 __float2bfloat16(float v) { return __float2bfloat16_rn(v); }
inline __nv_bfloat16::__nv_bfloat16(float v) : __nv_bfloat16(__float2bfloat16_rn(v)) {}
inline __nv_bfloat16::operator float() const { return __bfloat162float(*this); }
