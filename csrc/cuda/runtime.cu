#include "runtime.h"

#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "launch.h"

namespace lossguard::cuda {
namespace {

constexpr int kMailsAtOnce = 64;
constexpr size_t kAlignment = 256;

#define LG_TRY(call) \
  if (Error error = words(call)) return error

// Both are created at first use and live as long as the process: at its end the driver may be gone already.
struct Device {
  std::mutex mutex;
  std::vector<std::pair<Mail*, Mail*>> mails;  // on the host, on the device
  std::vector<int> free;
  std::map<void*, Workspace> workspaces;  // by stream
};
std::mutex devices_mutex;

Device& device(int index) {
  static auto& devices = *new std::map<int, Device>;
  const std::lock_guard<std::mutex> lock(devices_mutex);
  return devices[index];
}

// Allocations are legal while another of the process's streams records a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Done when it returns. Not on the null stream, which many streams do not wait for, nor on one that records a graph.
Error clear(void* memory, size_t size) {
  cudaStream_t stream;
  LG_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const cudaError_t cleared = cudaMemsetAsync(memory, 0, size, stream);
  const cudaError_t done = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return words(cleared != cudaSuccess ? cleared : done);
}

Error allocate(const Place& place, Workspace& w) {
  const RelaxedCapture relaxed;
  LG_TRY(cudaDeviceGetAttribute(&w.multiprocessors, cudaDevAttrMultiProcessorCount, place.device));
  w.max_blocks = w.multiprocessors * kBlocksPerMultiprocessor;
  const size_t parts = size_t(w.max_blocks) + 1;
  const size_t sizes[] = {sizeof(unsigned),         parts * sizeof(Partial), parts * sizeof(Record), parts * sizeof(Record),
                          sizeof(Violations), parts * kSplitValues * sizeof(double)};
  size_t total = 0, offsets[6];
  for (int i = 0; i < 6; ++i) {
    offsets[i] = total;
    total += (sizes[i] + kAlignment - 1) / kAlignment * kAlignment;
  }
  char* memory = nullptr;
  LG_TRY(cudaMalloc(reinterpret_cast<void**>(&memory), total));
  if (Error error = clear(memory, total)) {
    cudaFree(memory);
    return error;
  }
  w.scratch.ticket = reinterpret_cast<unsigned*>(memory + offsets[0]);
  w.scratch.partials = reinterpret_cast<Partial*>(memory + offsets[1]);
  w.scratch.target_found = reinterpret_cast<Record*>(memory + offsets[2]);
  w.scratch.input_found = reinterpret_cast<Record*>(memory + offsets[3]);
  w.scratch.report = reinterpret_cast<Violations*>(memory + offsets[4]);
  w.scratch.splits = reinterpret_cast<double*>(memory + offsets[5]);
  return nullptr;
}

Error add_mails(Device& d) {
  const RelaxedCapture relaxed;
  void *host = nullptr, *mapped = nullptr;
  LG_TRY(cudaHostAlloc(&host, kMailsAtOnce * sizeof(Mail), cudaHostAllocMapped | cudaHostAllocPortable));
  LG_TRY(cudaHostGetDevicePointer(&mapped, host, 0));
  for (int i = 0; i < kMailsAtOnce; ++i) {
    Mail* mail = static_cast<Mail*>(host) + i;
    mail->flag = 0;
    d.free.push_back(int(d.mails.size()));
    d.mails.emplace_back(mail, static_cast<Mail*>(mapped) + i);
  }
  return nullptr;
}

const char* as_text(int version, char (&text)[32]) {
  std::snprintf(text, sizeof text, "%d.%d", version / 1000, version % 1000 / 10);
  return text;
}

}  // namespace

Error words(int cuda_error) {
  if (cuda_error == cudaSuccess) return nullptr;
  cudaGetLastError();  // or it would be taken for the next call's
  if (cuda_error == cudaErrorInsufficientDriver) {
    thread_local std::string text;
    char driver_text[32], runtime_text[32];
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
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
  cudaDriverGetVersion(&status.driver);
  cudaRuntimeGetVersion(&status.runtime);
  status.error = words(cudaGetDeviceCount(&devices));
  return status;
}

bool is_capturing(const Place& place) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(static_cast<cudaStream_t>(place.stream), &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

Error workspace_of(const Place& place, Workspace& out) {
  LG_TRY(cudaSetDevice(place.device));  // ours alone: the runtime is linked in statically
  Device& d = device(place.device);
  const std::lock_guard<std::mutex> lock(d.mutex);
  const auto found = d.workspaces.find(place.stream);
  if (found != d.workspaces.end()) {
    out = found->second;
    return nullptr;
  }
  if (Error error = allocate(place, out)) return error;
  d.workspaces.emplace(place.stream, out);
  return nullptr;
}

Error MailHold::take(const Place& place) {
  Device& d = device(place.device);
  const std::lock_guard<std::mutex> lock(d.mutex);
  if (d.free.empty())
    if (Error error = add_mails(d)) return error;
  slot_ = d.free.back();
  d.free.pop_back();
  device_ = place.device;
  on_device_ = d.mails[slot_].second;
  return nullptr;
}

Error MailHold::wait(const Place& place, Violations& found) {
  if (Error error = words(cudaStreamSynchronize(static_cast<cudaStream_t>(place.stream)))) {
    slot_ = -1;  // nobody knows what may still be written there
    return error;
  }
  Mail* mail;
  {
    Device& d = device(device_);
    const std::lock_guard<std::mutex> lock(d.mutex);
    mail = d.mails[slot_].first;
  }
  if (__atomic_load_n(&mail->flag, __ATOMIC_ACQUIRE)) {
    found = mail->violations;
    __atomic_store_n(&mail->flag, 0, __ATOMIC_RELEASE);
  }
  return nullptr;
}

MailHold::~MailHold() {
  if (slot_ < 0) return;
  Device& d = device(device_);
  const std::lock_guard<std::mutex> lock(d.mutex);
  d.free.push_back(slot_);
}

}  // namespace lossguard::cuda
