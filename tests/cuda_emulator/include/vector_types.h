// CUDA's short vectors and dim3. As for nvcc, any memory may be accessed through them (may_alias), and an address must
// be a multiple of the alignment (-fsanitize=undefined names one that is not).
#pragma once

#define EMULATOR_VECTOR2(Name, Scalar, alignment) \
  struct alignas(alignment) [[gnu::may_alias]] Name { \
    Scalar x, y; \
  }; \
  inline Name make_##Name(Scalar x, Scalar y) { return Name{x, y}; }
#define EMULATOR_VECTOR3(Name, Scalar) \
  struct Name { \
    Scalar x, y, z; \
  }; \
  inline Name make_##Name(Scalar x, Scalar y, Scalar z) { return Name{x, y, z}; }
#define EMULATOR_VECTOR4(Name, Scalar, alignment) \
  struct alignas(alignment) [[gnu::may_alias]] Name { \
    Scalar x, y, z, w; \
  }; \
  inline Name make_##Name(Scalar x, Scalar y, Scalar z, Scalar w) { return Name{x, y, z, w}; }

EMULATOR_VECTOR2(char2, signed char, 2)
EMULATOR_VECTOR2(uchar2, unsigned char, 2)
EMULATOR_VECTOR2(short2, short, 4)
EMULATOR_VECTOR2(ushort2, unsigned short, 4)
EMULATOR_VECTOR2(int2, int, 8)
EMULATOR_VECTOR2(uint2, unsigned, 8)
EMULATOR_VECTOR2(float2, float, 8)
EMULATOR_VECTOR2(longlong2, long long, 16)
EMULATOR_VECTOR2(ulonglong2, unsigned long long, 16)
EMULATOR_VECTOR2(double2, double, 16)
EMULATOR_VECTOR3(int3, int)
EMULATOR_VECTOR3(uint3, unsigned)
EMULATOR_VECTOR3(float3, float)
EMULATOR_VECTOR4(char4, signed char, 4)
EMULATOR_VECTOR4(uchar4, unsigned char, 4)
EMULATOR_VECTOR4(short4, short, 8)
EMULATOR_VECTOR4(ushort4, unsigned short, 8)
EMULATOR_VECTOR4(int4, int, 16)
EMULATOR_VECTOR4(uint4, unsigned, 16)
EMULATOR_VECTOR4(float4, float, 16)

#undef EMULATOR_VECTOR2
#undef EMULATOR_VECTOR3
#undef EMULATOR_VECTOR4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
