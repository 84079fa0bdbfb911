// What a kernel can use: the CUDA built-in variables and functions, as calls into the engine.
//
// The collectives take their caller's source location as a default argument, so that the engine can say which
// __syncthreads() met which.
#pragma once
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

#include "include/vector_types.h"

// The running thread's: set at each switch.
#define EMULATOR_HIDDEN __attribute__((visibility("hidden")))
extern EMULATOR_HIDDEN uint3 threadIdx, blockIdx;
extern EMULATOR_HIDDEN dim3 blockDim, gridDim;
#undef EMULATOR_HIDDEN
constexpr int warpSize = 32;

namespace cuda_emulator {

using Location = std::source_location;
enum class Scope { block, device, system };
// Not instrumented: it is in the engine.
void store_system(uint32_t* p, uint32_t v);

enum class Atomic { add, exchange, compare_and_swap, minimum, maximum, bit_and, bit_or };

// The number of threads of the block that came with a predicate.
int block_barrier(bool predicate, Location where);
void warp_barrier(uint32_t mask, Location where);
uint32_t warp_ballot(uint32_t mask, bool predicate, Location where);
uint64_t warp_shuffle(uint32_t mask, uint64_t value, unsigned source_lane, Location where);
void fence(Scope scope);
// The old value. T: int, unsigned or unsigned long long.
template <class T>
T atomic(T* address, Atomic operation, T operand, T compare = T());

// The calling block's variable of this name: `tag` is an address that no other has.
void* shared_variable(const void* tag, size_t size);
void* dynamic_shared_memory();

// Which lane a shuffle reads, by CUDA's rules: a lane beyond the segment of `width` lanes means one's own value.
enum class Shuffle { index, up, down, exclusive_or };
inline unsigned source_of(Shuffle kind, unsigned argument, int width) {
  const unsigned lane = threadIdx.x % warpSize, first = lane & ~unsigned(width - 1), last = first + unsigned(width) - 1;
  switch (kind) {
    case Shuffle::index: return first + (argument & unsigned(width - 1));
    case Shuffle::up: return lane < first + argument ? lane : lane - argument;
    case Shuffle::down: return lane + argument > last ? lane : lane + argument;
    default: return (lane ^ argument) > last ? lane : lane ^ argument;
  }
}
template <class T>
T shuffle(Shuffle kind, uint32_t mask, T value, unsigned argument, int width, Location where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 and 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_shuffle(mask, bits, source_of(kind, argument, width), where);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace cuda_emulator

// ---- shared memory. `Type` is one type name without commas; arrays go by an alias.
#define LG_SHARED(Type, name) \
  static const char emulator_tag_##name = 0; \
  static_assert(alignof(Type) <= 16, "shared memory is aligned to 16 bytes"); \
  Type& name = *static_cast<Type*>(::cuda_emulator::shared_variable(&emulator_tag_##name, sizeof(Type)))
#define LG_DYNAMIC_SHARED(Type, name) Type* name = static_cast<Type*>(::cuda_emulator::dynamic_shared_memory())

// ---- barriers, fences, collectives

inline void __syncthreads(cuda_emulator::Location where = cuda_emulator::Location::current()) {
  cuda_emulator::block_barrier(false, where);
}
inline int __syncthreads_count(int predicate, cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::block_barrier(predicate != 0, where);
}
inline int __syncthreads_or(int predicate, cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::block_barrier(predicate != 0, where) != 0;
}
inline int __syncthreads_and(int predicate, cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::block_barrier(predicate == 0, where) == 0;
}
inline void __threadfence_block() { cuda_emulator::fence(cuda_emulator::Scope::block); }
inline void __threadfence() { cuda_emulator::fence(cuda_emulator::Scope::device); }
inline void __threadfence_system() { cuda_emulator::fence(cuda_emulator::Scope::system); }

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       cuda_emulator::Location where = cuda_emulator::Location::current()) {
  cuda_emulator::warp_barrier(mask, where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate,
                              cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::warp_ballot(mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate,
                      cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::warp_ballot(mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::warp_ballot(mask, predicate == 0, where) == 0;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize,
              cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::shuffle(cuda_emulator::Shuffle::index, mask, value, unsigned(lane), width, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                 cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::shuffle(cuda_emulator::Shuffle::up, mask, value, delta, width, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::shuffle(cuda_emulator::Shuffle::down, mask, value, delta, width, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize,
                  cuda_emulator::Location where = cuda_emulator::Location::current()) {
  return cuda_emulator::shuffle(cuda_emulator::Shuffle::exclusive_or, mask, value, unsigned(lanes), width, where);
}

// ---- a store that is no race with others like it; atomics, on int, unsigned and unsigned long long

#define LG_STORE_SYSTEM(p, v) ::cuda_emulator::store_system(p, v)

template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return cuda_emulator::atomic(p, cuda_emulator::Atomic::add, v);
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return cuda_emulator::atomic(p, cuda_emulator::Atomic::exchange, v);
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v) {
  return cuda_emulator::atomic(p, cuda_emulator::Atomic::minimum, v);
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  return cuda_emulator::atomic(p, cuda_emulator::Atomic::maximum, v);
}
template <class T>
T atomicAnd(T* p, std::type_identity_t<T> v) {
  return cuda_emulator::atomic(p, cuda_emulator::Atomic::bit_and, v);
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> v) {
  return cuda_emulator::atomic(p, cuda_emulator::Atomic::bit_or, v);
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> v) {
  return cuda_emulator::atomic(p, cuda_emulator::Atomic::compare_and_swap, v, compare);
}

// ---- memory with a hint to the caches, which are not emulated

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T v) {
  *p = v;
}
template <class T>
void __stcg(T* p, T v) {
  *p = v;
}

// ---- arithmetic

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __float_as_int(float v) { return cuda_emulator::bit_cast<int>(v); }
inline unsigned __float_as_uint(float v) { return cuda_emulator::bit_cast<unsigned>(v); }
inline float __int_as_float(int v) { return cuda_emulator::bit_cast<float>(v); }
inline float __uint_as_float(unsigned v) { return cuda_emulator::bit_cast<float>(v); }
inline long long __double_as_longlong(double v) { return cuda_emulator::bit_cast<long long>(v); }
inline double __longlong_as_double(long long v) { return cuda_emulator::bit_cast<double>(v); }
