// The few operations the loss formulas are written in. Here for scalars, on host and device;
// cpu/simd.h gives the same names to vectors, so that a formula is written once.
#pragma once
#include <cmath>

#if defined(__CUDACC__)
#define LG_HD static __host__ __device__ __forceinline__
#define LG_HD_MEMBER __host__ __device__ __forceinline__
#else
// Internal linkage: one formula is compiled for several instruction sets, which must not be merged.
#define LG_HD static inline __attribute__((always_inline))
#define LG_HD_MEMBER inline __attribute__((always_inline))
#endif

namespace lossguard::math {

LG_HD float exp(float x) { return ::expf(x); }
LG_HD double exp(double x) { return ::exp(x); }
LG_HD float log(float x) { return ::logf(x); }
LG_HD double log(double x) { return ::log(x); }
LG_HD float log1p(float x) { return ::log1pf(x); }
LG_HD double log1p(double x) { return ::log1p(x); }
LG_HD float abs(float x) { return ::fabsf(x); }
LG_HD double abs(double x) { return ::fabs(x); }
template <class T>
LG_HD T select(bool condition, T a, T b) {
  return condition ? a : b;
}
// A NaN in `a` gives b: the second operand is the one that counts.
template <class T>
LG_HD T max(T a, T b) {
  return a > b ? a : b;
}

}  // namespace lossguard::math
