// Vectors of floating-point numbers on top of the compiler's vector extension, with the names of
// math/number.h. One source serves every instruction set: a translation unit is compiled with its
// flags and with LOSSGUARD_ISA naming a namespace of its own, so that nothing is merged across them.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../math/number.h"

#if defined(__AVX2__)
#define LOSSGUARD_VECTOR_BYTES 32
#else
#define LOSSGUARD_VECTOR_BYTES 16
#endif

namespace lossguard::LOSSGUARD_ISA {

// GCC takes the attribute on plain types only, not on template parameters.
template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  using Int = int32_t;
  typedef float Raw __attribute__((vector_size(LOSSGUARD_VECTOR_BYTES)));
  typedef int32_t IntRaw __attribute__((vector_size(LOSSGUARD_VECTOR_BYTES)));
};
template <>
struct Lanes<double> {
  using Int = int64_t;
  typedef double Raw __attribute__((vector_size(LOSSGUARD_VECTOR_BYTES)));
  typedef int64_t IntRaw __attribute__((vector_size(LOSSGUARD_VECTOR_BYTES)));
};

template <class T>
struct Mask {
  typename Lanes<T>::IntRaw m;  // each lane 0 or -1
};

template <class T>
struct Simd {
  static constexpr int size = LOSSGUARD_VECTOR_BYTES / sizeof(T);
  using Raw = typename Lanes<T>::Raw;
  Raw v;

  Simd() = default;
  LG_HD_MEMBER explicit Simd(Raw raw) : v(raw) {}
  LG_HD_MEMBER Simd(T s) : v(s - Raw{}) {}  // broadcast
  template <class S, class = std::enable_if_t<std::is_arithmetic_v<S> && !std::is_same_v<S, T>>>
  LG_HD_MEMBER explicit Simd(S s) : Simd(T(s)) {}

  LG_HD_MEMBER static Simd load(const T* p) {
    Simd r;
    std::memcpy(&r.v, p, sizeof(Raw));
    return r;
  }
  LG_HD_MEMBER void store(T* p) const { std::memcpy(p, &v, sizeof(Raw)); }
};

// clang-format off
template <class T> LG_HD Simd<T> operator+(Simd<T> a, Simd<T> b) { return Simd<T>(a.v + b.v); }
template <class T> LG_HD Simd<T> operator-(Simd<T> a, Simd<T> b) { return Simd<T>(a.v - b.v); }
template <class T> LG_HD Simd<T> operator*(Simd<T> a, Simd<T> b) { return Simd<T>(a.v * b.v); }
template <class T> LG_HD Simd<T> operator/(Simd<T> a, Simd<T> b) { return Simd<T>(a.v / b.v); }
template <class T> LG_HD Simd<T> operator-(Simd<T> a) { return Simd<T>(-a.v); }
template <class T> LG_HD Mask<T> operator<(Simd<T> a, Simd<T> b) { return {a.v < b.v}; }
template <class T> LG_HD Mask<T> operator<=(Simd<T> a, Simd<T> b) { return {a.v <= b.v}; }
template <class T> LG_HD Mask<T> operator>(Simd<T> a, Simd<T> b) { return {a.v > b.v}; }
template <class T> LG_HD Mask<T> operator>=(Simd<T> a, Simd<T> b) { return {a.v >= b.v}; }
template <class T> LG_HD Mask<T> operator==(Simd<T> a, Simd<T> b) { return {a.v == b.v}; }
template <class T> LG_HD Mask<T> operator&(Mask<T> a, Mask<T> b) { return {a.m & b.m}; }
template <class T> LG_HD Mask<T> operator|(Mask<T> a, Mask<T> b) { return {a.m | b.m}; }
template <class T> LG_HD Mask<T> operator!(Mask<T> a) { return {~a.m}; }
// clang-format on

template <class T>
LG_HD Simd<T> select(Mask<T> m, Simd<T> a, Simd<T> b) {
  return Simd<T>(m.m ? a.v : b.v);
}
template <class T>
LG_HD Simd<T> max(Simd<T> a, Simd<T> b) {
  return select(a > b, a, b);
}
template <class T>
LG_HD Simd<T> bits(typename Lanes<T>::IntRaw i) {
  Simd<T> r;
  std::memcpy(&r.v, &i, sizeof(r.v));
  return r;
}
template <class T>
LG_HD typename Lanes<T>::IntRaw bits(Simd<T> a) {
  typename Lanes<T>::IntRaw r;
  std::memcpy(&r, &a.v, sizeof(r));
  return r;
}
template <class T>
LG_HD Simd<T> abs(Simd<T> a) {
  using I = typename Lanes<T>::Int;
  return bits<T>(bits(a) & std::numeric_limits<I>::max());
}

// Reductions over the lanes, in a fixed order.
template <class T>
LG_HD T sum(Simd<T> a) {
  T lanes[Simd<T>::size];
  a.store(lanes);
  for (int width = Simd<T>::size / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}
template <class T>
LG_HD T max_of(Simd<T> a) {
  T lanes[Simd<T>::size];
  a.store(lanes);
  for (int width = Simd<T>::size / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}
template <class T>
LG_HD int64_t count(Mask<T> m) {  // of lanes that hold; adds up masks that were summed, too
  int64_t n = 0;
  for (int i = 0; i < Simd<T>::size; ++i) n -= int64_t(m.m[i]);
  return n;
}

template <class T>
LG_HD bool any(Mask<T> m) {
  return count(m) != 0;
}

// a0 b0 a1 b1 .. from the lower halves (kUpper: the upper halves) of a and b.
template <bool kUpper>
LG_HD Simd<float> interleave(Simd<float> a, Simd<float> b) {
#if LOSSGUARD_VECTOR_BYTES == 32
  constexpr int o = kUpper ? 4 : 0;
  return Simd<float>(__builtin_shufflevector(a.v, b.v, o, o + 8, o + 1, o + 9, o + 2, o + 10, o + 3, o + 11));
#else
  constexpr int o = kUpper ? 2 : 0;
  return Simd<float>(__builtin_shufflevector(a.v, b.v, o, o + 4, o + 1, o + 5));
#endif
}
template <bool kUpper>
LG_HD Simd<double> interleave(Simd<double> a, Simd<double> b) {
#if LOSSGUARD_VECTOR_BYTES == 32
  constexpr int o = kUpper ? 2 : 0;
  return Simd<double>(__builtin_shufflevector(a.v, b.v, o, o + 4, o + 1, o + 5));
#else
  constexpr int o = kUpper ? 1 : 0;
  return Simd<double>(__builtin_shufflevector(a.v, b.v, o, o + 2));
#endif
}
// A square of vectors, turned: to[j * to_stride + i] = from[i * from_stride + j]. Each of log2(size)
// rounds interleaves vector i with vector i + size / 2.
template <class T>
LG_HD void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  constexpr int n = Simd<T>::size;
  Simd<T> a[n], b[n];
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) a[i] = Simd<T>::load(from + i * from_stride);
#pragma GCC unroll 3
  for (int width = n; width > 1; width /= 2) {
#pragma GCC unroll 4
    for (int i = 0; i < n / 2; ++i) {
      b[2 * i] = interleave<false>(a[i], a[i + n / 2]);
      b[2 * i + 1] = interleave<true>(a[i], a[i + n / 2]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) a[i] = b[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) a[i].store(to + i * to_stride);
}

template <class T>
struct FloatTraits;
template <>
struct FloatTraits<float> {
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float round_magic = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  static constexpr float ln2_hi = 0x1.62e4p-1f, ln2_lo = 0x1.7f7d1cp-20f;
  static constexpr float exp_low = -87.33654f;  // below it exp is subnormal: taken as 0
  static constexpr float min_normal = 0x1p-126f;
  static constexpr int32_t sqrt_half_bits = 0x3f3504f3;
  // exp(r) = 1 + r + r^2 P(r) on |r| <= ln2/2, relative error 1.0e-8 (interpolated at Chebyshev nodes)
  static constexpr float exp_poly[] = {.5f, .16666576666f, .041666554213f, .0083632328837f, .0013926250831f};
  static constexpr int log_terms = 4;
};
template <>
struct FloatTraits<double> {
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double round_magic = 0x1.8p52;
  static constexpr double ln2_hi = 0x1.62e42fee00000p-1, ln2_lo = 0x1.a39ef35793c76p-33;
  static constexpr double exp_low = -708.3964185322641;
  static constexpr double min_normal = 0x1p-1022;
  static constexpr int64_t sqrt_half_bits = 0x3fe6a09e667f3bcd;
  // relative error 1.5e-17
  static constexpr double exp_poly[] = {.50000000000000010314,     .1666666666666666746,      .041666666666623820532,
                                        .0083333333333300381973,   .0013888888917367080562,   .00019841269863171556026,
                                        .000024801521057868205199, 2.7557268276905696187e-6,  2.7620201591031548792e-7,
                                        2.5100472505694996003e-8};
  static constexpr int log_terms = 10;
};

// e^x for x <= 88 (float) or 709 (double); 0 where the result would be subnormal. NaN stays NaN.
// At most 1.5 ulp off (tests/test_vector_math.py).
template <class T>
LG_HD Simd<T> exp(Simd<T> x) {
  using V = Simd<T>;
  using F = FloatTraits<T>;
  const auto underflow = x < V(F::exp_low);
  x = select(underflow, V(F::exp_low), x);
  const V shifted = x * V(T(1.4426950408889634)) + V(F::round_magic);
  const V n = shifted - V(F::round_magic);
  const V r = (x - n * V(F::ln2_hi)) - n * V(F::ln2_lo);
  constexpr int terms = sizeof(F::exp_poly) / sizeof(T);
  V p = V(F::exp_poly[terms - 1]);
#pragma GCC unroll 16
  for (int i = terms - 2; i >= 0; --i) p = p * r + V(F::exp_poly[i]);
  p = (r * r) * p + r + V(1);
  // 2^n: the integer n sits in the low bits of `shifted`
  const auto power = (bits(shifted) - bits(V(F::round_magic)) + F::bias) << F::mantissa;
  return select(underflow, V(0), p * bits<T>(power));
}

// log(1 + x) where `carried` tells x beyond what 1 + x = u can hold; u must be >= 0.
//
// u = 2^k m with m in [sqrt(1/2), sqrt(2)), f = m - 1, s = f / (2 + f), and log(1 + f) by the atanh
// series, arranged as in Sun's fdlibm (e_log.c) so that f itself is never rounded.
template <class T>
LG_HD Simd<T> log_of_parts(Simd<T> u, Simd<T> x, bool from_log1p) {
  using V = Simd<T>;
  using F = FloatTraits<T>;
  using I = typename Lanes<T>::Int;
  const auto zero = u == V(0);
  const auto infinite = u == V(std::numeric_limits<T>::infinity());
  const auto invalid = !(u >= V(0));
  V scaled = u, k_shift(0);
  if (!from_log1p) {  // 1 + x is never subnormal
    const auto tiny = u < V(F::min_normal);
    scaled = select(tiny, u * V(T(int64_t(1) << F::mantissa)), u);
    k_shift = select(tiny, V(-F::mantissa), V(0));
  }
  const auto k_bits = (bits(scaled) - F::sqrt_half_bits) >> F::mantissa;
  const V m = bits<T>(bits(scaled) - (k_bits << F::mantissa));
  // small integer to float: the bits of round_magic plus k, less round_magic
  V k = bits<T>(k_bits + bits(V(F::round_magic))) - V(F::round_magic);
  V f = m - V(1);
  if (from_log1p) {
    // What rounding took from 1 + x goes back in; where k = 0 that makes f exactly x.
    const V lost = select(u >= V(2), V(1) - (u - x), x - (u - V(1)));
    const auto k_held = k_bits > I(F::bias) ? k_bits - k_bits + I(F::bias) : k_bits;  // else 2^-k has no exponent
    const V inverse_power = bits<T>((I(F::bias) - k_held) << F::mantissa);
    f = f + lost * inverse_power;
  }
  k = k + k_shift;
  const V s = f / (V(2) + f), z = s * s;
  V series = V(T(2) / T(2 * F::log_terms + 1));
#pragma GCC unroll 16
  for (int i = F::log_terms - 1; i >= 1; --i) series = series * z + V(T(2) / T(2 * i + 1));
  const V half_square = V(T(.5)) * f * f;
  V r = k * V(F::ln2_hi) - ((half_square - (s * (half_square + z * series) + k * V(F::ln2_lo))) - f);
  r = select(infinite, u, r);
  r = select(zero, V(-std::numeric_limits<T>::infinity()), r);
  return select(invalid, V(std::numeric_limits<T>::quiet_NaN()), r);
}

// Natural logarithm; -inf at 0, NaN below, subnormals included. At most 1.5 ulp off.
template <class T>
LG_HD Simd<T> log(Simd<T> x) {
  return log_of_parts(x, x, false);
}
// log(1 + x); accurate for small x. At most 2 ulp off.
template <class T>
LG_HD Simd<T> log1p(Simd<T> x) {
  return log_of_parts(Simd<T>(1) + x, x, true);
}

}  // namespace lossguard::LOSSGUARD_ISA
