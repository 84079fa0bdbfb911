// Shadows the toolkit's header where a .cu file is compiled by g++ for the emulator.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define LOSSGUARD_CUDA_EMULATOR 1

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ "declare shared memory with LG_SHARED(Type, name)"
#define __forceinline__ inline  // a hint: GCC would take minutes over kernels inlined whole
#define __noinline__  // empty: libstdc++ says __attribute__((__noinline__))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

#include "vector_types.h"

#include "cuda_runtime_api.h"

#include "../device.h"
