// What the engine's parts know of each other: settings, the running of one grid, the traffic counter's hooks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator.h"
#include "include/cuda_runtime_api.h"
#include "sanitizers.h"

namespace cuda_emulator {

struct Fiber;

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;  // of a block
constexpr int kMaxResidentBlocks = 8;
constexpr size_t kKeptFibers = 2000;  // of a stream, under TSan, which has 8128 in all
constexpr size_t kMaxStaticShared = 48 << 10;
constexpr size_t kMaxDynamicShared = 227 << 10;

struct Settings {
  Schedule schedule = Schedule::ascending;
  uint64_t seed = 1;
  int resident_blocks = 3;  // at once, under the random schedule; the others run block after block
  int devices = 2;
  int multiprocessors = 4;  // of each
  int driver_version = CUDART_VERSION;
  bool late = false;
  bool skip_kernels = false;

  Settings();  // from the environment
};
extern Settings settings;

// A generator that is the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) {}
  uint32_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return uint32_t(state_ * 0x2545f4914f6cdd1du >> 32);
  }
  uint32_t below(uint32_t n) { return uint32_t(uint64_t(next()) * n >> 32); }

 private:
  uint64_t state_;
};

// A launch, checked and ready to run.
struct Grid {
  BoundKernel bound;
  unsigned blocks, threads;
  size_t dynamic_shared;
  // Under TSan, those of the grid's threads, as far as they reach. They stay with the stream, since TSan takes more
  // than a millisecond for a new one. A later kernel's threads may be the same to it: they come after all of these.
  std::vector<Fiber*>* kept_fibers;
  // Addresses for TSan: all threads come after `started`, and `finished` comes after all of them.
  uint64_t started, finished;
};
// Runs all of it. Empty, or what went wrong.
std::string run(Grid& grid);

// launch_log.cpp
void log_launch(const Grid& grid);
std::string kernel_name(const void* kernel);

// traffic.cpp, where it is linked in.
__attribute__((weak)) void traffic_begin(const Grid& grid);
__attribute__((weak)) void traffic_end();
__attribute__((weak)) void traffic_access(const void* address, size_t size, bool is_store);
// What CUDA would not call global memory.
bool is_shared_memory(const void* address);
bool is_built_in_variable(const void* address);

}  // namespace cuda_emulator
