// The emulator's controls, for C++ drivers; below, the same for ctypes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cuda_emulator {

// Which of the threads that can run goes on: the first, the last, any. A thread runs until it has to wait; under
// `random` also until its next atomic or fence, and several blocks are resident at once.
enum class Schedule { ascending, descending, random };
void set_schedule(Schedule schedule, uint64_t seed = 1);

// Small GPUs, all alike.
void set_devices(int count, int multiprocessors);
// Lower than the runtime's (CUDART_VERSION), every call fails with cudaErrorInsufficientDriver.
void set_driver_version(int version);

// While held, events recorded since are not complete: a query says so, a wait for one lets it and what came before it
// in its stream complete. Completion publishes what kernels wrote to mapped memory.
void hold_events(bool hold);
// One word of what kernels wrote to mapped memory reaches the host, the first that has not. False if there is none.
bool publish_next_word();

// Off (the default), work runs within the call that enqueues it. On, it runs when the host waits or asks, in an order
// that the seed chooses among those that streams and events allow.
void set_late_execution(bool late);

struct LaunchRecord {
  std::string kernel;  // with its template arguments
  unsigned blocks, threads;
};
std::vector<LaunchRecord> launch_log();
void clear_launch_log();

// Of one launch and one buffer. Sectors are 32 bytes, each counted once.
struct Traffic {
  size_t launch;       // its number since clear_traffic()
  std::string kernel;  // with its template arguments
  std::string buffer;  // empty: no registered one
  uint64_t loaded_bytes, stored_bytes, loaded_sectors, stored_sectors;
};
// Only builds with traffic.cpp have these: elsewhere their addresses are null.
#define EMULATOR_OPTIONAL __attribute__((weak))
EMULATOR_OPTIONAL std::vector<Traffic> traffic();
EMULATOR_OPTIONAL void clear_traffic();
EMULATOR_OPTIONAL void register_buffer(const std::string& name, const void* memory, size_t size);
EMULATOR_OPTIONAL void clear_buffers();

}  // namespace cuda_emulator

extern "C" {
#define EMULATOR_VISIBLE __attribute__((visibility("default")))
EMULATOR_VISIBLE void lossguard_emulator_set_schedule(const char* name, uint64_t seed);  // "ascending", ...
EMULATOR_VISIBLE void lossguard_emulator_set_devices(int count, int multiprocessors);
EMULATOR_VISIBLE void lossguard_emulator_set_driver_version(int version);
EMULATOR_VISIBLE void lossguard_emulator_hold_events(int hold);  // what has run is published when they no longer are
EMULATOR_VISIBLE void lossguard_emulator_set_late_execution(int late);
// Launches do nothing: for timing what the host has to do for one.
EMULATOR_VISIBLE void lossguard_emulator_skip_kernels(int skip);
EMULATOR_VISIBLE void* lossguard_emulator_create_stream(int device);
// Graphs, by the functions of CUDA's that `include/` declares. A capture that was spoiled ends in null.
EMULATOR_VISIBLE int lossguard_emulator_begin_capture(void* stream);
EMULATOR_VISIBLE void* lossguard_emulator_end_capture(void* stream);
EMULATOR_VISIBLE void lossguard_emulator_destroy_graph(void* graph);
EMULATOR_VISIBLE int lossguard_emulator_replay(void* graph, void* stream);
// Lines of text: kernel, blocks, threads, with tabs between. Valid until the calling thread's next call.
EMULATOR_VISIBLE const char* lossguard_emulator_log();
EMULATOR_VISIBLE void lossguard_emulator_clear_log();
// Lines of text: the members of Traffic, with tabs between.
EMULATOR_VISIBLE EMULATOR_OPTIONAL const char* lossguard_emulator_traffic();
EMULATOR_VISIBLE EMULATOR_OPTIONAL void lossguard_emulator_clear_traffic();
EMULATOR_VISIBLE EMULATOR_OPTIONAL void lossguard_emulator_register_buffer(const char* name, const void* memory,
                                                                           size_t size);
EMULATOR_VISIBLE EMULATOR_OPTIONAL void lossguard_emulator_clear_buffers();
#undef EMULATOR_VISIBLE
#undef EMULATOR_OPTIONAL
}
