#include "runtime.h"

#include <pthread.h>

#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "launch.h"

namespace lossguard::cuda {

struct Slot {
  int device;
  Mail *on_host, *on_device;
  cudaEvent_t event = nullptr;  // behind the launch
  uint32_t lost = 0;            // of Mail::lost, what the host has taken note of
  bool shared = false;
  uint32_t graph_is_gone = 0;
};

namespace {

constexpr int kSlotsAtOnce = 64;
constexpr int kMostDevices = 64;
constexpr size_t kAlignment = 256;
std::atomic<int> most_slots{1024};

// Created at first use; lives as long as the process: at its end the driver may be gone already.
struct Device {
  std::mutex mutex;
  Gpu gpu{};
  uint32_t *bell_on_host = nullptr, *bell_on_device = nullptr;
  std::deque<Slot> slots;
  std::vector<Slot*> free;
  int shared = 0;  // slots
  struct OfStream {
    Scratch scratch;
    Slot* overflow;  // of its launches that find no slot free
  };
  std::map<void*, OfStream> streams;
};
std::mutex devices_mutex;
Device* devices[kMostDevices];
std::atomic<uint32_t*> bells[kMostDevices];
std::atomic<int> devices_used{0};  // the highest, and one

// ---- fork

std::atomic<bool> forked{false};
constexpr Error kForked =
    "this process was forked from one that had used CUDA, which does not survive that: start it by \"spawn\" or "
    "\"forkserver\"";

void after_fork() { forked = true; }

// While a stream of the process records a graph, many calls are legal only so, even those that touch no stream.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(bool needed = true) : needed_(needed) { exchange(); }
  ~RelaxedCapture() { exchange(); }

 private:
  void exchange() {
    if (needed_) LG_CUDA(cudaThreadExchangeStreamCaptureMode, &mode_);
  }
  bool needed_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Done when it returns. Not on the null stream, which many streams do not wait for, nor on one that records a graph.
Error clear(void* memory, size_t size) {
  cudaStream_t stream;
  LG_TRY(LG_CUDA(cudaStreamCreateWithFlags, &stream, cudaStreamNonBlocking));
  const cudaError_t cleared = LG_CUDA(cudaMemsetAsync, memory, 0, size, stream);
  const cudaError_t done = LG_CUDA(cudaStreamSynchronize, stream);
  LG_CUDA(cudaStreamDestroy, stream);
  return words(cleared != cudaSuccess ? cleared : done);
}

// Pinned memory, as the host and as the device see it. Zeros.
template <class T>
Error map(size_t count, T*& on_host, T*& on_device) {
  const RelaxedCapture relaxed;
  void *host = nullptr, *mapped = nullptr;
  LG_TRY(LG_CUDA(cudaHostAlloc, &host, count * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable));
  LG_TRY(LG_CUDA(cudaHostGetDevicePointer, &mapped, host, 0));
  on_host = static_cast<T*>(host);
  on_device = static_cast<T*>(mapped);
  for (size_t i = 0; i < count; ++i) on_host[i] = T{};
  return nullptr;
}

// The device of a place, made current for this thread: the runtime is linked in statically, so that torch's is another.
Error enter(const Place& place, Device*& out) {
  if (forked) return kForked;
  LG_TRY(LG_CUDA(cudaSetDevice, place.device));
  const std::lock_guard<std::mutex> lock(devices_mutex);
  out = devices[place.device];
  if (out) return nullptr;
  auto d = std::make_unique<Device>();
  LG_TRY(LG_CUDA(cudaDeviceGetAttribute, &d->gpu.multiprocessors, cudaDevAttrMultiProcessorCount, place.device));
  d->gpu.max_blocks = d->gpu.multiprocessors * kBlocksPerMultiprocessor;
  if (Error error = map(1, d->bell_on_host, d->bell_on_device)) return error;
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork);
  static_cast<void>(registered);
  bells[place.device] = d->bell_on_host;
  devices[place.device] = out = d.release();
  if (devices_used <= place.device) devices_used = place.device + 1;
  return nullptr;
}

struct Parts {
  size_t offsets[6], total = 0;
  explicit Parts(const Gpu& gpu) {
    const size_t parts = size_t(gpu.max_blocks) + 1;
    const size_t sizes[] = {sizeof(unsigned),       parts * sizeof(Partial), parts * sizeof(Record),
                            parts * sizeof(Record), sizeof(Violations),      parts * kSplitValues * sizeof(double)};
    for (int i = 0; i < 6; ++i) {
      offsets[i] = total;
      total += (sizes[i] + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  Scratch in(void* memory) const {
    const auto at = [&](int i) { return static_cast<void*>(static_cast<char*>(memory) + offsets[i]); };
    return {static_cast<unsigned*>(at(0)), static_cast<Partial*>(at(1)),    static_cast<Record*>(at(2)),
            static_cast<Record*>(at(3)),   static_cast<Violations*>(at(4)), static_cast<double*>(at(5))};
  }
};

Error add_slots(Device& d, int device, int count) {
  Mail *on_host = nullptr, *on_device = nullptr;
  if (Error error = map(size_t(count), on_host, on_device)) return error;
  for (int i = 0; i < count; ++i) {
    Slot slot{device, on_host + i, on_device + i};
    LG_TRY(LG_CUDA(cudaEventCreateWithFlags, &slot.event, cudaEventDisableTiming));
    d.slots.push_back(slot);
    d.free.push_back(&d.slots.back());
  }
  return nullptr;
}

// Null if as many as there may be are in use.
Error take_slot(Device& d, int device, Slot*& slot) {
  slot = nullptr;
  if (d.free.empty()) {
    const int room = most_slots - (int(d.slots.size()) - d.shared);
    if (room <= 0) return nullptr;
    if (Error error = add_slots(d, device, std::min(room, kSlotsAtOnce))) return error;
  }
  slot = d.free.back();
  d.free.pop_back();
  __atomic_store_n(&slot->on_host->flag, 0, __ATOMIC_RELAXED);  // of a launch that nobody asked
  return nullptr;
}

Error add_shared_slot(Device& d, int device, Slot*& slot) {
  if (d.free.empty())
    if (Error error = add_slots(d, device, kSlotsAtOnce)) return error;
  if (Error error = take_slot(d, device, slot)) return error;
  slot->shared = true;
  ++d.shared;
  return nullptr;
}

// For all replays of a launch that is being captured, until the graph is destroyed, and all that was made of it.
Error add_captured_slot(Device& d, const Place& place, Slot*& slot) {
  if (Error error = add_shared_slot(d, place.device, slot)) return error;
  cudaStreamCaptureStatus status;
  cudaGraph_t graph = nullptr;
  cudaUserObject_t object;
  const auto tell = [](void* slot) { __atomic_store_n(&static_cast<Slot*>(slot)->graph_is_gone, 1, __ATOMIC_RELEASE); };
  LG_TRY(LG_CUDA(cudaStreamGetCaptureInfo, static_cast<cudaStream_t>(place.stream), &status, nullptr, &graph));
  LG_TRY(LG_CUDA(cudaUserObjectCreate, &object, slot, cudaHostFn_t(tell), 1u, unsigned(cudaUserObjectNoDestructorSync)));
  return words(LG_CUDA(cudaGraphRetainUserObject, graph, object, 1u, unsigned(cudaGraphUserObjectMove)));
}

Error add_stream(Device& d, const Place& place, Device::OfStream*& out) {
  const RelaxedCapture relaxed;
  Device::OfStream added;
  if (Error error = add_shared_slot(d, place.device, added.overflow)) return error;
  const Parts parts(d.gpu);
  void* memory = nullptr;
  LG_TRY(LG_CUDA(cudaMalloc, &memory, parts.total));
  if (Error error = clear(memory, parts.total)) {
    LG_CUDA(cudaFree, memory);
    return error;
  }
  added.scratch = parts.in(memory);
  out = &d.streams.emplace(place.stream, added).first->second;
  return nullptr;
}

cudaStream_t stream_of(const Place& place) { return static_cast<cudaStream_t>(place.stream); }

const char* as_text(int version, char (&text)[32]) {
  std::snprintf(text, sizeof text, "%d.%d", version / 1000, version % 1000 / 10);
  return text;
}

}  // namespace

Error words(int cuda_error) {
  if (cuda_error == cudaSuccess) return nullptr;
  LG_CUDA(cudaGetLastError);  // or it would be taken for the next call's
  if (cuda_error == cudaErrorInsufficientDriver) {
    thread_local std::string text;
    char driver_text[32], runtime_text[32];
    int driver = 0, runtime = 0;
    LG_CUDA(cudaDriverGetVersion, &driver);
    LG_CUDA(cudaRuntimeGetVersion, &runtime);
    if (driver == 0) return "there is no NVIDIA driver";
    text = std::string("the NVIDIA driver is too old: it supports CUDA ") + as_text(driver, driver_text) +
           ", and lossguard was built with CUDA " + as_text(runtime, runtime_text) +
           ". Update the driver, or build lossguard with an older CUDA toolkit.";
    return text.c_str();
  }
  return cudaGetErrorString(cudaError_t(cuda_error));
}

DriverStatus driver_status() {
  DriverStatus status;
  int devices = 0;
  LG_CUDA(cudaDriverGetVersion, &status.driver);
  LG_CUDA(cudaRuntimeGetVersion, &status.runtime);
  status.error = words(LG_CUDA(cudaGetDeviceCount, &devices));
  return status;
}

bool is_capturing(const Place& place) {
  if (forked) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return LG_CUDA(cudaStreamIsCapturing, stream_of(place), &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

Error scratch_size(int device, int64_t& bytes) {
  Device* d;
  if (Error error = enter({device, nullptr}, d)) return error;
  bytes = int64_t(Parts(d->gpu).total);
  return nullptr;
}

Error gpu_of(const Place& place, Gpu& gpu) {
  Device* d;
  if (Error error = enter(place, d)) return error;
  gpu = d->gpu;
  return nullptr;
}

Error prepare(const Place& place, Workspace& workspace, Slot*& slot) {
  Device* d;
  if (Error error = enter(place, d)) return error;
  static_cast<Gpu&>(workspace) = d->gpu;
  {
    const std::lock_guard<std::mutex> lock(d->mutex);
    if (place.capturing) {
      workspace.scratch = Parts(d->gpu).in(place.scratch);
      if (Error error = add_captured_slot(*d, place, slot)) return error;
    } else {
      Device::OfStream* of_stream = nullptr;
      const auto found = d->streams.find(place.stream);
      if (found != d->streams.end())
        of_stream = &found->second;
      else if (Error error = add_stream(*d, place, of_stream))
        return error;
      workspace.scratch = of_stream->scratch;
      if (Error error = take_slot(*d, place.device, slot)) return error;
      if (!slot) slot = of_stream->overflow;
    }
  }
  workspace.mail = slot->on_device;
  workspace.bell = d->bell_on_device;
  // At each replay, whatever has been in this memory since the last.
  if (place.capturing)
    LG_TRY(LG_CUDA(cudaMemsetAsync, workspace.scratch.ticket, 0, sizeof(unsigned), stream_of(place)));
  return nullptr;
}

Error launched(const Place& place, Slot& slot) {
  if (place.capturing) return nullptr;  // an event recorded there is the graph's
  return words(LG_CUDA(cudaEventRecord, slot.event, stream_of(place)));
}

Error load(const void* kernel) {
  const RelaxedCapture relaxed;
  cudaFuncAttributes attributes;
  return words(LG_CUDA(cudaFuncGetAttributes, &attributes, kernel));
}

bool bell_rang() {
  if (forked) return false;
  bool rang = false;
  for (int i = 0; i < devices_used.load(std::memory_order_acquire); ++i) {
    uint32_t* const bell = bells[i].load(std::memory_order_relaxed);
    if (!bell || !__atomic_load_n(bell, __ATOMIC_ACQUIRE)) continue;
    __atomic_store_n(bell, 0, __ATOMIC_SEQ_CST);  // before the mails are looked at: one that comes now rings again
    rang = true;
  }
  return rang;
}

Answer ask(Slot& slot, bool query, Violations& found, int64_t& lost) {
  const RelaxedCapture relaxed(query);
  const bool over = query && LG_CUDA(cudaEventQuery, slot.event) != cudaErrorNotReady;  // after an error nothing comes
  if (__atomic_load_n(&slot.on_host->flag, __ATOMIC_ACQUIRE)) {
    found = slot.on_host->violations;
    const uint32_t lost_ever = __atomic_load_n(&slot.on_host->lost, __ATOMIC_RELAXED);
    lost = lost_ever - slot.lost;
    slot.lost = lost_ever;
    __atomic_store_n(&slot.on_host->flag, 0, __ATOMIC_RELEASE);
    return Answer::wrong;
  }
  return over && !slot.shared ? Answer::right : Answer::none_yet;
}

Error wait(const Slot& slot) {
  if (forked) return kForked;
  const RelaxedCapture relaxed;
  if (LG_CUDA(cudaEventQuery, slot.event) == cudaSuccess) return nullptr;
  return words(LG_CUDA(cudaEventSynchronize, slot.event));
}

void give_back(Slot& slot) {
  if (slot.shared && !is_abandoned(slot)) return;
  Device& d = *devices[slot.device];
  const std::lock_guard<std::mutex> lock(d.mutex);
  d.shared -= slot.shared;
  slot.shared = false;
  slot.graph_is_gone = 0;
  d.free.push_back(&slot);
}

bool is_shared(const Slot& slot) { return slot.shared; }

bool is_abandoned(const Slot& slot) { return __atomic_load_n(&slot.graph_is_gone, __ATOMIC_ACQUIRE); }

Error drain(const Place& place) {
  if (forked) return kForked;
  const RelaxedCapture relaxed;
  LG_TRY(LG_CUDA(cudaSetDevice, place.device));
  return words(LG_CUDA(cudaStreamSynchronize, stream_of(place)));
}

void limit_slots(int most) { most_slots = most; }

void for_runtime_calls(void (*f)(const char*, int64_t, void*), void* context) {
  for (size_t i = 0; i < std::size(kRuntimeCalls); ++i) f(kRuntimeCalls[i], runtime_calls[i].load(), context);
}

}  // namespace lossguard::cuda
