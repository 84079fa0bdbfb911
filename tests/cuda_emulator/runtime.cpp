// The host's side: devices, streams, events, memory, launches; and the emulator's controls.
//
// Work goes into its stream's queue. By default it is run at once; under late execution, when the host waits or asks.
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "engine.h"
#include "fiber.h"
#include "memory.h"

namespace cuda_emulator {

namespace {

// ---- settings

[[noreturn]] void bad_setting(const char* name, const char* value) {
  fprintf(stderr, "emulator: %s=%s is not a setting\n", name, value);
  abort();
}

bool parse_schedule(const char* name, Schedule& schedule) {
  const char* names[] = {"ascending", "descending", "random"};
  for (int i = 0; i < 3; ++i)
    if (!strcmp(name, names[i])) {
      schedule = Schedule(i);
      return true;
    }
  return false;
}

template <class T>
void read(const char* name, T& value) {
  const char* text = getenv(name);
  if (!text) return;
  char* end;
  const unsigned long long number = strtoull(text, &end, 10);
  if (!*text || *end) bad_setting(name, text);
  value = T(number);
}

}  // namespace

Settings::Settings() {
  if (const char* name = getenv("LOSSGUARD_EMULATOR_SCHEDULE"))
    if (!parse_schedule(name, schedule)) bad_setting("LOSSGUARD_EMULATOR_SCHEDULE", name);
  read("LOSSGUARD_EMULATOR_SEED", seed);
  read("LOSSGUARD_EMULATOR_RESIDENT_BLOCKS", resident_blocks);
  read("LOSSGUARD_EMULATOR_DEVICES", devices);
  read("LOSSGUARD_EMULATOR_MULTIPROCESSORS", multiprocessors);
  read("LOSSGUARD_EMULATOR_DRIVER_VERSION", driver_version);
  read("LOSSGUARD_EMULATOR_LATE", late);
}
Settings settings;

using Action = std::function<std::string(cudaStream_t)>;  // returns nothing, or what went wrong

// Work in a stream.
struct Operation {
  cudaStream_t stream;
  uint64_t number;                                // in its stream
  std::vector<std::shared_ptr<Operation>> after;  // of other streams
  Action action;
  bool done = false;
  uint64_t writes = 0;  // the last write to mapped memory that is published once the host knows that this is done
  uint64_t enqueued, finished;  // addresses for TSan
};
using OperationPtr = std::shared_ptr<Operation>;

}  // namespace cuda_emulator

// Destroyed with the last graph that has it.
struct CUuserObject_st {
  void* memory;
  cudaHostFn_t destroy;
  ~CUuserObject_st() { destroy(memory); }
};

// What was recorded, in its order.
struct CUgraph_st {
  std::vector<cuda_emulator::Action> actions;
  std::vector<std::shared_ptr<CUuserObject_st>> retained;
};
struct CUgraphExec_st : CUgraph_st {
  cuda_emulator::OperationPtr last;  // of its last launch: launches of one graph follow each other
};

struct CUstream_st {
  int device;
  bool is_null, non_blocking;
  std::deque<cuda_emulator::OperationPtr> queue;
  cuda_emulator::OperationPtr last;
  uint64_t enqueued = 0;
  uint64_t let_complete = 0;  // operations up to this one may be seen to be complete although events are held
  cuda_emulator::Clock clock;
  std::vector<cuda_emulator::Fiber*> kept_fibers;
  std::unique_ptr<CUgraph_st> capture;  // being recorded
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  bool capture_failed = false;

  CUstream_st(int device, bool is_null, bool non_blocking)
      : device(device), is_null(is_null), non_blocking(non_blocking) {}
  ~CUstream_st() {
    for (cuda_emulator::Fiber* fiber : kept_fibers)
      if (fiber) cuda_emulator::fibers.give_back(fiber);
  }
};

struct CUevent_st {
  int device;
  cuda_emulator::OperationPtr recorded;
  bool captured = false;  // recorded last while its stream was being captured: part of a graph, and of no use outside
};

namespace cuda_emulator {
namespace {

// One lock for everything: kernels run one at a time. Never destroyed: other threads may outlive the statics.
struct Runtime {
  std::mutex mutex;
  std::map<int, cudaStream_t> null_streams;  // by device
  std::set<cudaStream_t> streams;            // these included
  std::set<cudaEvent_t> events;
  std::set<void*> memory;
  std::map<const void*, int> dynamic_shared;  // by kernel, what cudaFuncSetAttribute allows
  std::set<const void*> loaded;               // kernels: at the first launch, which cannot be a captured one
  std::set<cudaGraph_t> graphs;
  std::set<cudaGraphExec_t> executables;
  bool holds_events = false;
  std::string late_error;  // of work that ran since the last wait
  Random order{settings.seed};  // of late execution
};
Runtime& runtime = *new Runtime;

thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;  // of this thread's calls
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaError_t explained_error = cudaSuccess;
thread_local std::string explanation;

cudaError_t failure(cudaError_t error, const std::string& why = "") {
  explained_error = error;
  explanation = why;
  return last_error = error;
}
cudaError_t launch_failure(const std::string& why) {
  return why.empty() ? cudaSuccess : failure(cudaErrorLaunchFailure, why);
}

// Around every call: the lock, and TSan sees nothing of the engine's own work.
class Call {
  QuietLock lock_{runtime.mutex};
  Unseen unseen_;
};

// A child must not inherit the lock as another thread's.
[[maybe_unused]] const int at_fork =
    pthread_atfork([] { runtime.mutex.lock(); }, [] { runtime.mutex.unlock(); }, [] { runtime.mutex.unlock(); });

bool driver_is_too_old() { return settings.driver_version < CUDART_VERSION; }
#define RETURN_IF_NO_DRIVER() \
  if (driver_is_too_old()) return failure(cudaErrorInsufficientDriver)

// What might wait for work that is being recorded is not allowed while any stream records, but to a thread that asks
// for it: the capture is lost.
bool spoils_a_capture() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return false;
  bool spoils = false;
  for (cudaStream_t stream : runtime.streams)
    if (stream->capture && stream->capture_mode == cudaStreamCaptureModeGlobal) spoils = stream->capture_failed = true;
  return spoils;
}
cudaError_t fail_capture(cudaStream_t stream) {
  stream->capture_failed = true;
  return failure(cudaErrorStreamCaptureUnsupported, "emulator: the stream is being captured");
}
#define RETURN_IF_SPOILING_A_CAPTURE() \
  if (spoils_a_capture())              \
  return failure(cudaErrorStreamCaptureUnsupported, "emulator: not allowed while a stream is capturing")

// ---- work in streams

// Null if there is no such stream.
cudaStream_t stream_of(cudaStream_t handle) {
  constexpr uintptr_t kLegacyDefault = 1;
  if (!handle || reinterpret_cast<uintptr_t>(handle) == kLegacyDefault) {
    cudaStream_t& stream = runtime.null_streams[current_device];
    if (!stream) runtime.streams.insert(stream = new CUstream_st(current_device, true, false));
    return stream;
  }
  return runtime.streams.count(handle) ? handle : nullptr;
}

bool may_run(const Operation& operation) {
  return std::all_of(operation.after.begin(), operation.after.end(), [](const OperationPtr& o) { return o->done; });
}

// The first of its queue.
void execute(const OperationPtr& operation) {
  CUstream_st& stream = *operation->stream;
  stream.clock.act([&] {
    acquire(&operation->enqueued);
    for (const OperationPtr& earlier : operation->after) acquire(&earlier->finished);
  });
  const std::string error = operation->action(&stream);
  stream.clock.act([&] { release(&operation->finished); });
  if (!error.empty()) runtime.late_error = error;
  operation->writes = pending_writes();
  operation->done = true;
  operation->action = nullptr;
  operation->after.clear();
  stream.queue.pop_front();
}

// One operation that may run, whichever the seed says. False if none is left.
bool execute_one() {
  std::vector<cudaStream_t> able;
  for (cudaStream_t stream : runtime.streams)
    if (!stream->queue.empty() && may_run(*stream->queue.front())) able.push_back(stream);
  if (able.empty()) return false;
  execute(able[runtime.order.below(unsigned(able.size()))]->queue.front());
  return true;
}

void execute_until(const OperationPtr& operation) {
  while (!operation->done) execute_one();
}

std::string take_late_error() {
  std::string error;
  error.swap(runtime.late_error);
  return error;
}

// What the host may know once it has seen this to be complete.
void learn_of(const OperationPtr& operation) {
  acquire(&operation->finished);
  publish_mapped_memory(operation->writes);
}

cudaError_t wait_for(const OperationPtr& operation) {
  if (!operation) return cudaSuccess;
  execute_until(operation);
  operation->stream->let_complete = std::max(operation->stream->let_complete, operation->number);
  learn_of(operation);
  return launch_failure(take_late_error());
}

cudaError_t ask_for(const OperationPtr& operation) {
  if (!operation) return cudaSuccess;
  if (!operation->done) execute_one();  // work goes on while the host polls
  const bool held = runtime.holds_events && operation->number > operation->stream->let_complete;
  if (!operation->done || held) return failure(cudaErrorNotReady);
  learn_of(operation);
  return launch_failure(take_late_error());
}

cudaError_t wait_for_device(int device) {
  cudaError_t error = cudaSuccess;
  for (cudaStream_t stream : runtime.streams)
    if (stream->device == device)
      if (cudaError_t e = wait_for(stream->last)) error = e;
  return error;
}

OperationPtr enqueue(cudaStream_t stream, Action action, std::vector<OperationPtr> after = {}) {
  auto operation = std::make_shared<Operation>();
  operation->stream = stream;
  operation->number = ++stream->enqueued;
  operation->action = std::move(action);
  operation->after = std::move(after);
  // The null stream waits for all others of its device, and they for it, but for those created as non-blocking.
  if (!stream->non_blocking)
    for (cudaStream_t other : runtime.streams)
      if (other != stream && other->device == stream->device && (other->is_null || stream->is_null) &&
          !other->non_blocking && other->last)
        operation->after.push_back(other->last);
  release(&operation->enqueued);
  stream->queue.push_back(operation);
  stream->last = operation;
  return operation;
}

// Enqueues, and runs it now unless execution is late. In a stream that is being captured, neither: it is recorded.
cudaError_t submit(cudaStream_t stream, Action action, std::vector<OperationPtr> after = {}) {
  if (stream->capture) {
    if (!after.empty()) return failure(cudaErrorNotSupported, "emulator: a capture is of one stream");
    stream->capture->actions.push_back(std::move(action));
    return cudaSuccess;
  }
  const OperationPtr operation = enqueue(stream, std::move(action), std::move(after));
  if (settings.late) return cudaSuccess;
  execute_until(operation);
  return launch_failure(take_late_error());
}

void let_all_complete() {
  for (cudaStream_t stream : runtime.streams) stream->let_complete = stream->enqueued;
}

std::string run_in(cudaStream_t stream, Grid& grid) {
  if (settings.skip_kernels) return "";
  grid.kept_fibers = &stream->kept_fibers;
  stream->clock.act([&] { release(&grid.started); });
  update_device_from_host();
  log_launch(grid);
  if (traffic_begin) traffic_begin(grid);
  const std::string error = run(grid);
  if (traffic_end) traffic_end();
  seal_mapped_memory();
  stream->clock.act([&] { acquire(&grid.finished); });
  return error;
}

}  // namespace

void set_schedule(Schedule schedule, uint64_t seed) {
  const Call call;
  settings.schedule = schedule;
  settings.seed = seed;
  runtime.order = Random(seed);
}

void set_devices(int count, int multiprocessors) {
  const Call call;
  settings.devices = count;
  settings.multiprocessors = multiprocessors;
}

void set_driver_version(int version) {
  const Call call;
  settings.driver_version = version;
}

void hold_events(bool hold) {
  const Call call;
  let_all_complete();
  runtime.holds_events = hold;
}

bool publish_next_word() {
  const Call call;
  const uint64_t written = pending_writes(), published = published_writes();
  if (published < written) publish_mapped_memory(published + 1);
  return published < written;
}

void set_late_execution(bool late) {
  const Call call;
  settings.late = late;
  if (!late)
    while (execute_one()) {
    }
}

// ---- launches

cudaError_t launch(const cudaLaunchConfig_t& config, BoundKernel bound) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  const cudaStream_t stream = stream_of(config.stream);
  if (!stream || stream->device != current_device)
    return failure(cudaErrorInvalidResourceHandle, "emulator: the stream is not one of the current device");
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1)
    return failure(cudaErrorNotSupported, "emulator: grids and blocks have one dimension");
  if (config.numAttrs) return failure(cudaErrorNotSupported, "emulator: no launch attribute is emulated");
  if (!grid.x || grid.x > 0x7fffffffu || !block.x || block.x > kMaxThreads)
    return failure(cudaErrorInvalidConfiguration, "emulator: " + std::to_string(grid.x) + " blocks of " +
                                                      std::to_string(block.x) + " threads");
  const auto allowed = runtime.dynamic_shared.find(bound.kernel);
  const size_t most = allowed == runtime.dynamic_shared.end() ? kMaxStaticShared : size_t(allowed->second);
  if (config.dynamicSmemBytes > most)
    return failure(cudaErrorInvalidValue, "emulator: " + std::to_string(config.dynamicSmemBytes) +
                                              " bytes of dynamic shared memory, at most " + std::to_string(most));

  auto ready = std::make_shared<Grid>();
  ready->bound = std::move(bound);
  ready->blocks = grid.x;
  ready->threads = block.x;
  ready->dynamic_shared = config.dynamicSmemBytes;
  if (stream->capture && !runtime.loaded.count(ready->bound.kernel)) {
    stream->capture_failed = true;
    return failure(cudaErrorStreamCaptureUnsupported, "emulator: a kernel that is not loaded yet is being captured");
  }
  runtime.loaded.insert(ready->bound.kernel);
  return submit(stream, [ready](cudaStream_t in) {
    Grid grid = *ready;
    return run_in(in, grid);
  });
}

cudaError_t set_function_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const Call call;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) > kMaxDynamicShared) return failure(cudaErrorInvalidValue);
  runtime.dynamic_shared[kernel] = value;
  return cudaSuccess;
}

cudaError_t load_kernel(const void* kernel) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  RETURN_IF_SPOILING_A_CAPTURE();
  runtime.loaded.insert(kernel);
  return cudaSuccess;
}

cudaError_t max_active_blocks(int* blocks, int threads_per_block, size_t) {
  if (threads_per_block < 1 || threads_per_block > kMaxThreads) return failure(cudaErrorInvalidValue);
  *blocks = std::clamp(kMaxThreads / threads_per_block, 1, 8);
  return cudaSuccess;
}

}  // namespace cuda_emulator

// ---- the CUDA runtime API

using namespace cuda_emulator;

cudaError_t cudaGetDeviceCount(int* count) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  *count = settings.devices;
  return settings.devices ? cudaSuccess : failure(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  if (device < 0 || device >= settings.devices) return failure(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  if (device < 0 || device >= settings.devices) return failure(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = kMaxThreads; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(kMaxStaticShared); break;
    case cudaDevAttrWarpSize: *value = kWarpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = settings.multiprocessors; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(kMaxDynamicShared); break;
    default: return failure(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  const Call call;
  RETURN_IF_NO_DRIVER();
  RETURN_IF_SPOILING_A_CAPTURE();
  return wait_for_device(current_device);
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = settings.driver_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t size) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  RETURN_IF_SPOILING_A_CAPTURE();
  *memory = nullptr;
  if (!size) return cudaSuccess;
  // Of exactly this size, for ASan.
  if (posix_memalign(memory, 256, size) != 0) return failure(cudaErrorMemoryAllocation);
  memset(*memory, 0xff, size);
  runtime.memory.insert(*memory);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  const Call call;
  RETURN_IF_SPOILING_A_CAPTURE();
  if (!memory) return cudaSuccess;
  if (!runtime.memory.erase(memory)) return failure(cudaErrorInvalidValue);
  const cudaError_t error = wait_for_device(current_device);
  free(memory);
  return error;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t size, cudaStream_t handle) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  const cudaStream_t stream = stream_of(handle);
  if (!stream) return failure(cudaErrorInvalidResourceHandle);
  return submit(stream, [=](cudaStream_t in) {
    in->clock.act([&] { memset(memory, value, size); });
    return std::string();
  });
}

cudaError_t cudaMemset(void* memory, int value, size_t size) { return cudaMemsetAsync(memory, value, size, nullptr); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t handle) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  const cudaStream_t stream = stream_of(handle);
  if (!stream) return failure(cudaErrorInvalidResourceHandle);
  // Pageable memory is read before the call returns, and written.
  const bool from_pageable = (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost) && !is_mapped(from);
  const bool to_pageable = (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost) && !is_mapped(to);
  std::shared_ptr<char[]> staged;
  if (from_pageable) {
    staged.reset(new char[size]);
    memcpy(staged.get(), from, size);
  }
  const cudaError_t error = submit(stream, [=](cudaStream_t in) {
    in->clock.act([&] { memcpy(to, from_pageable ? staged.get() : from, size); });
    return std::string();
  });
  return error || !to_pageable ? error : wait_for(stream->last);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, size, kind, nullptr);
  return error ? error : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  RETURN_IF_SPOILING_A_CAPTURE();
  *memory = allocate_mapped(size);
  return *memory ? cudaSuccess : failure(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* memory) {
  const Call call;
  RETURN_IF_SPOILING_A_CAPTURE();
  if (!memory) return cudaSuccess;
  const cudaError_t error = wait_for_device(current_device);
  return free_mapped(memory) ? error : failure(cudaErrorInvalidValue);
}

cudaError_t cudaHostGetDevicePointer(void** device_memory, void* host_memory, unsigned) {
  const Call call;
  *device_memory = device_pointer(host_memory);
  return *device_memory ? cudaSuccess : failure(cudaErrorInvalidValue);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  if (flags > cudaStreamNonBlocking) return failure(cudaErrorInvalidValue);
  runtime.streams.insert(*stream = new CUstream_st(current_device, false, flags == cudaStreamNonBlocking));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Call call;
  if (!runtime.streams.count(stream) || stream->is_null) return failure(cudaErrorInvalidResourceHandle);
  if (stream->last) execute_until(stream->last);
  runtime.streams.erase(stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  RETURN_IF_SPOILING_A_CAPTURE();
  const cudaStream_t stream = stream_of(handle);
  if (stream && stream->capture) return fail_capture(stream);
  return stream ? wait_for(stream->last) : failure(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  RETURN_IF_SPOILING_A_CAPTURE();
  const cudaStream_t stream = stream_of(handle);
  if (stream && stream->capture) return fail_capture(stream);
  return stream ? ask_for(stream->last) : failure(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  const Call call;
  const cudaStream_t stream = stream_of(handle);
  if (!stream || !runtime.events.count(event)) return failure(cudaErrorInvalidResourceHandle);
  if (event->captured) return failure(cudaErrorNotSupported, "emulator: a capture is of one stream");
  if (!event->recorded) return cudaSuccess;
  return submit(stream, [](cudaStream_t) { return std::string(); }, {event->recorded});
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Call call;
  const cudaStream_t stream = stream_of(handle);
  if (!stream) return failure(cudaErrorInvalidResourceHandle);
  *status = !stream->capture          ? cudaStreamCaptureStatusNone
            : stream->capture_failed ? cudaStreamCaptureStatusInvalidated
                                     : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  const cudaStream_t stream = stream_of(handle);
  if (!stream) return failure(cudaErrorInvalidResourceHandle);
  if (stream->is_null || stream->capture) return failure(cudaErrorStreamCaptureUnsupported);
  stream->capture = std::make_unique<CUgraph_st>();
  stream->capture_mode = mode;
  stream->capture_failed = false;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Call call;
  const cudaStream_t stream = stream_of(handle);
  *graph = nullptr;
  if (!stream || !stream->capture) return failure(cudaErrorInvalidResourceHandle);
  const std::unique_ptr<CUgraph_st> recorded = std::move(stream->capture);
  if (stream->capture_failed) return failure(cudaErrorStreamCaptureInvalidated);
  runtime.graphs.insert(*graph = new CUgraph_st(*recorded));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph) {
  if (cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
  const Call call;
  if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
  if (id) return failure(cudaErrorNotSupported, "emulator: captures have no id");
  if (graph) *graph = stream_of(handle)->capture.get();
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* memory, cudaHostFn_t destroy, unsigned references,
                                 unsigned flags) {
  if (references != 1 || flags != cudaUserObjectNoDestructorSync) return failure(cudaErrorInvalidValue);
  *object = new CUuserObject_st{memory, destroy};
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
  const Call call;
  if (!graph || count != 1) return failure(cudaErrorInvalidValue);
  if (flags != cudaGraphUserObjectMove) return failure(cudaErrorNotSupported, "emulator: references are moved");
  graph->retained.emplace_back(object);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Call call;
  if (!runtime.graphs.erase(graph)) return failure(cudaErrorInvalidValue);
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  const Call call;
  if (!runtime.graphs.count(graph)) return failure(cudaErrorInvalidValue);
  runtime.executables.insert(*executable = new CUgraphExec_st{{*graph}, nullptr});
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  const cudaStream_t stream = stream_of(handle);
  if (!stream || !runtime.executables.count(executable)) return failure(cudaErrorInvalidValue);
  if (stream->capture) return failure(cudaErrorNotSupported, "emulator: no graph within a graph");
  cudaError_t error = cudaSuccess;
  for (const Action& action : executable->actions) {
    std::vector<OperationPtr> after;
    if (executable->last) after.push_back(executable->last);
    if (cudaError_t e = submit(stream, action, std::move(after))) error = e;
    executable->last = stream->last;
  }
  return error;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const Call call;
  if (!runtime.executables.count(executable)) return failure(cudaErrorInvalidValue);
  if (cudaError_t error = wait_for(executable->last)) return error;  // what it retains goes when it is over
  runtime.executables.erase(executable);
  delete executable;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const Call call;
  RETURN_IF_NO_DRIVER();
  runtime.events.insert(*event = new CUevent_st{current_device, nullptr});
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  const Call call;
  const cudaStream_t stream = stream_of(handle);
  if (!stream || !runtime.events.count(event)) return failure(cudaErrorInvalidResourceHandle);
  if (event->device != stream->device)
    return failure(cudaErrorInvalidResourceHandle, "emulator: the event and the stream are of different devices");
  event->captured = stream->capture != nullptr;
  const cudaError_t error = submit(stream, [](cudaStream_t) { return std::string(); });
  if (!event->captured) event->recorded = stream->last;
  return error;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Call call;
  RETURN_IF_SPOILING_A_CAPTURE();
  if (!runtime.events.count(event)) return failure(cudaErrorInvalidResourceHandle);
  if (event->captured) return failure(cudaErrorCapturedEvent);
  return ask_for(event->recorded);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Call call;
  RETURN_IF_SPOILING_A_CAPTURE();
  if (!runtime.events.count(event)) return failure(cudaErrorInvalidResourceHandle);
  if (event->captured) return failure(cudaErrorCapturedEvent);
  return wait_for(event->recorded);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Call call;
  if (!runtime.events.erase(event)) return failure(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error == explained_error && !explanation.empty()) return explanation.c_str();
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
  }
  return "unrecognized error code";
}

// ---- for ctypes

void lossguard_emulator_set_schedule(const char* name, uint64_t seed) {
  Schedule schedule;
  if (!parse_schedule(name, schedule)) bad_setting("schedule", name);
  set_schedule(schedule, seed);
}
void lossguard_emulator_set_devices(int count, int multiprocessors) { set_devices(count, multiprocessors); }
void lossguard_emulator_set_driver_version(int version) { set_driver_version(version); }
void lossguard_emulator_hold_events(int hold) {
  hold_events(hold);
  while (!hold && publish_next_word()) {
  }
}
void lossguard_emulator_set_late_execution(int late) { set_late_execution(late); }
void lossguard_emulator_skip_kernels(int skip) { settings.skip_kernels = skip; }
void* lossguard_emulator_create_stream(int device) {
  int before;
  cudaStream_t stream = nullptr;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaSetDevice(before);
  return stream;
}
int lossguard_emulator_begin_capture(void* stream) {
  return cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeGlobal);
}
void* lossguard_emulator_end_capture(void* stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  if (cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph)) return nullptr;
  cudaGraphInstantiate(&executable, graph);
  cudaGraphDestroy(graph);
  return executable;
}
void lossguard_emulator_destroy_graph(void* graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }
int lossguard_emulator_replay(void* graph, void* stream) {
  return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), static_cast<cudaStream_t>(stream));
}
