// Small kernels, right ones and ones with a bug: what the emulator must compute, refuse and report. Run by
// tests/test_cuda_emulator.py, one case a process: `selftest CASE` prints what failed, or what a bug was answered with.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "emulator.h"

namespace {

constexpr unsigned kAll = 0xffffffffu;

std::atomic<int> failures{0};
#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      std::printf("line %d: %s is false\n", __LINE__, #condition); \
      ++failures; \
    } \
  } while (0)
#define CHECK_CUDA(call) \
  do { \
    if (cudaError_t error = (call)) { \
      std::printf("line %d: %s\n", __LINE__, cudaGetErrorString(error)); \
      ++failures; \
    } \
  } while (0)

template <class... Parameters, class... Arguments>
cudaError_t launch_in(cudaStream_t stream, void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                      const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, const Arguments&... arguments) {
  return launch_in(nullptr, kernel, blocks, threads, arguments...);
}

// What a launch with a bug was answered with.
void show(cudaError_t error) { std::printf("%s\n", error ? cudaGetErrorString(error) : "no error"); }

template <class T>
T* device_array(size_t n) {
  T* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, n * sizeof(T)));
  return memory;
}
template <class T>
T* device_copy(const std::vector<T>& values) {
  T* memory = device_array<T>(values.size());
  CHECK_CUDA(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}
template <class T>
std::vector<T> host_copy(const T* memory, size_t n) {
  std::vector<T> values(n);
  CHECK_CUDA(cudaMemcpy(values.data(), memory, n * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

// ---- a reduction: per-block partials, a ticket, the last block adds up

enum Bug { kNone, kNoSync, kNoSyncAtEnd, kNoFence, kEarlyFence, kBlockFence, kNoReaderFence };

struct Reduction {
  const int* values;
  int n;
  int* partials;
  unsigned* ticket;
  int* result;
  Bug bug;
};

struct ReductionScratch {
  int warps[32];
  bool last;
};

__device__ int warp_sum(int v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(kAll, v, step);
  return v;
}

__global__ void reduce(Reduction r) {
  LG_SHARED(ReductionScratch, s);
  int sum = 0;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < unsigned(r.n); i += gridDim.x * blockDim.x)
    sum += r.values[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = sum;
  if (r.bug != kNoSync) __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned w = 1; w < blockDim.x / 32; ++w) sum += s.warps[w];
    if (r.bug == kEarlyFence) __threadfence();
    r.partials[blockIdx.x] = sum;
    if (r.bug == kBlockFence) __threadfence_block();
    if (r.bug == kNone || r.bug == kNoSync || r.bug == kNoSyncAtEnd || r.bug == kNoReaderFence) __threadfence();
    s.last = atomicAdd(r.ticket, 1u) == gridDim.x - 1;
  }
  if (r.bug != kNoSyncAtEnd) __syncthreads();
  if (!s.last) return;
  if (r.bug != kNoReaderFence) __threadfence();
  if (threadIdx.x < 32) {
    sum = 0;
    for (unsigned b = threadIdx.x; b < gridDim.x; b += 32) sum += r.partials[b];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) {
      *r.result = sum;
      *r.ticket = 0;
    }
  }
}

void reduction(Bug bug, int repeat) {
  const int n = 5000, blocks = 4;
  std::vector<int> values(n);
  int expected = 0;
  for (int i = 0; i < n; ++i) expected += values[i] = i * 7919 % 1000;
  Reduction r{};
  r.values = device_copy(values);
  r.n = n;
  r.partials = device_array<int>(blocks);
  r.ticket = device_copy<unsigned>({0});
  r.result = device_array<int>(1);
  r.bug = bug;
  for (int i = 0; i < repeat; ++i) {
    CHECK_CUDA(launch(reduce, blocks, 96, r));
    CHECK_CUDA(cudaStreamSynchronize(nullptr));
    CHECK(host_copy(r.result, 1)[0] == expected);
    CHECK(host_copy(r.ticket, 1)[0] == 0);
  }
}

// ---- collectives: each lane works out by itself what it must get

template <class T>
__device__ bool shuffles_right() {
  const unsigned lane = threadIdx.x % 32;
  const auto value_of = [](unsigned l) { return T(T(l * 1000003) - T(16) * T(l % 5)); };
  const T v = value_of(lane);
  bool ok = true;
  for (int width = 1; width <= 32; width *= 2) {
    const unsigned first = lane / width * width;
    for (int step = 0; step < width; ++step) {
      ok &= __shfl_sync(kAll, v, int(step), width) == value_of(first + step);
      const T up = __shfl_up_sync(kAll, v, unsigned(step), width);
      ok &= up == value_of(lane - first >= unsigned(step) ? lane - step : lane);
      const T down = __shfl_down_sync(kAll, v, unsigned(step), width);
      ok &= down == value_of(lane + step < first + width ? lane + step : lane);
      ok &= __shfl_xor_sync(kAll, v, step, width) == value_of(lane ^ unsigned(step));
    }
  }
  return ok;
}

__global__ void check_shuffles(unsigned* wrong) {
  if (!shuffles_right<int>() || !shuffles_right<unsigned>()) atomicAdd(wrong, 1u);
  if (!shuffles_right<float>() || !shuffles_right<double>()) atomicAdd(wrong, 1u);
  if (!shuffles_right<long>() || !shuffles_right<unsigned long long>()) atomicAdd(wrong, 1u);
}

__global__ void check_votes(unsigned* wrong) {
  const unsigned t = threadIdx.x, lane = t % 32, warp = t / 32;
  bool ok = true;
  for (unsigned i = 0; i < 32; ++i) {
    ok &= __ballot_sync(kAll, lane <= i) == kAll >> (31 - i);
    ok &= (__any_sync(kAll, lane == i && warp == 1) != 0) == (warp == 1);
    ok &= (__all_sync(kAll, lane != i || warp != 1) != 0) == (warp != 1);
    ok &= __syncthreads_count(t % 32 < i) == int(i * blockDim.x / 32);
    ok &= (__syncthreads_or(t == i) != 0) == (i < blockDim.x);
    ok &= __syncthreads_and(t != i) == 0;
    ok &= __syncthreads_and(1) != 0 && !__syncthreads_or(0);
  }
  // Parts of a warp on their own, and a mask that crosses them afterwards.
  if (lane < 16) {
    for (int i = 0; i < 3; ++i) ok &= __ballot_sync(0x0000ffffu, lane % 2 == 0) == 0x00005555u;
  } else {
    for (int i = 0; i < 5; ++i) ok &= __ballot_sync(0xffff0000u, lane % 2 == 1) == 0xaaaa0000u;
  }
  if (lane == 0 || lane == 5) ok &= __ballot_sync(0x00000021u, lane == 5) == 0x00000020u;
  if (lane < 8) ok &= __ballot_sync(0x000000ffu, lane == 3) == 0x00000008u;
  __syncwarp();
  ok &= __popc(kAll) == 32 && __ffs(0x50) == 5 && __ffs(0) == 0 && __popcll(~0ull) == 64;
  if (!ok) atomicAdd(wrong, 1u);
}

__global__ void check_poison(unsigned* wrong) {
  struct Data {
    float f[3];
    int i;
  };
  LG_SHARED(Data, s);
  if (!(s.f[0] != s.f[0]) || s.i != -1) atomicAdd(wrong, 1u);
  __syncthreads();
  if (threadIdx.x == 0) s = {{1, 2, 3}, 5};
}

void count_wrong(void (*kernel)(unsigned*), unsigned blocks, unsigned threads) {
  unsigned* wrong = device_copy<unsigned>({0});
  CHECK_CUDA(launch(kernel, blocks, threads, wrong));
  CHECK(host_copy(wrong, 1)[0] == 0);
}

__global__ void check_atomics(unsigned* counters, int* signed_counters, unsigned long long* wide) {
  atomicAdd(&counters[0], threadIdx.x);
  atomicMax(&counters[1], threadIdx.x);
  atomicMin(&counters[2], threadIdx.x + 7);
  atomicOr(&counters[3], 1u << threadIdx.x % 32);
  for (unsigned seen = counters[4];;) {
    const unsigned old = atomicCAS(&counters[4], seen, seen + 2);
    if (old == seen) break;
    seen = old;
  }
  atomicAdd(signed_counters, -1);
  atomicAdd(wide, 1ull << 33);
}

void atomics() {
  unsigned* counters = device_copy<unsigned>({0, 0, 100, 0, 0});
  int* signed_counter = device_copy<int>({0});
  unsigned long long* wide = device_copy<unsigned long long>({0});
  CHECK_CUDA(launch(check_atomics, 3, 64, counters, signed_counter, wide));
  CHECK((host_copy(counters, 5) == std::vector<unsigned>{3 * 63 * 32, 63, 7, kAll, 2 * 3 * 64}));
  CHECK(host_copy(signed_counter, 1)[0] == -3 * 64);
  CHECK(host_copy(wide, 1)[0] == (3ull * 64) << 33);
}

// ---- kernels with a bug that is an error

__global__ void divergent_barrier() {
  if (threadIdx.x < 17)
    __syncthreads();
  else
    __syncthreads();
}
__global__ void barrier_after_exit() {
  if (threadIdx.x >= 50) return;
  __syncthreads();
}
__global__ void lane_not_in_mask() { __shfl_sync(0x0000ffffu, int(threadIdx.x), 0); }
__global__ void source_outside_mask() {
  if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, int(threadIdx.x), 20);
}
__global__ void exited_lane() {
  if (threadIdx.x == 3) return;
  __syncwarp();
}
__global__ void different_collectives() {
  if (threadIdx.x % 2)
    __any_sync(kAll, 1);
  else
    __shfl_sync(kAll, 1, 0);
}
__global__ void deadlock() {
  if (threadIdx.x >= 32 && threadIdx.x < 40) __syncwarp();
  __syncthreads();
}
struct Huge {
  char bytes[(48 << 10) + 1];
};
__global__ void huge_shared() {
  LG_SHARED(Huge, s);
  s.bytes[threadIdx.x] = 0;
}
__global__ void fine(int* out) {
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) *out = 1;
}

void error_of(void (*kernel)()) {
  const cudaError_t error = launch(kernel, 2, 64);
  show(error);
  CHECK(error == cudaErrorLaunchFailure);
  CHECK(cudaGetLastError() == error && cudaGetLastError() == cudaSuccess);
  // The next launch is none the worse.
  int* out = device_copy<int>({0});
  CHECK_CUDA(launch(fine, 1, 64, out));
  CHECK(host_copy(out, 1)[0] == 1);
}

void launch_configurations() {
  int* out = device_copy<int>({0});
  CHECK(launch(fine, 1, 1025, out) == cudaErrorInvalidConfiguration);
  CHECK(launch(fine, 0, 32, out) == cudaErrorInvalidConfiguration);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = 60 << 10;
  CHECK(cudaLaunchKernelEx(&config, fine, out) == cudaErrorInvalidValue);
  CHECK_CUDA(cudaFuncSetAttribute(fine, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 << 10));
  CHECK_CUDA(cudaLaunchKernelEx(&config, fine, out));
  CHECK(cudaFuncSetAttribute(fine, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10) == cudaErrorInvalidValue);
  config.dynamicSmemBytes = 0;
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_CUDA(cudaSetDevice(1));
  config.stream = stream;
  CHECK(cudaLaunchKernelEx(&config, fine, out) == cudaErrorInvalidResourceHandle);
  CHECK_CUDA(cudaSetDevice(0));
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaLaunchKernelEx(&config, fine, out));
  CHECK_CUDA(cudaStreamDestroy(stream));
  CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
}

void devices() {
  int value = 0;
  CHECK_CUDA(cudaGetDeviceCount(&value));
  CHECK(value == 2);
  CHECK_CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1));
  CHECK(value == 4);
  CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice);
  cuda_emulator::set_devices(3, 16);
  CHECK_CUDA(cudaSetDevice(2));
  std::thread([] {
    int device = -1;
    CHECK_CUDA(cudaGetDevice(&device));
    CHECK(device == 0);  // each thread has its own
  }).join();
  CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, fine, 256, 0));
  CHECK(value == 4);
  cuda_emulator::set_driver_version(12080);
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 4) == cudaErrorInsufficientDriver);
  CHECK(cudaGetDeviceCount(&value) == cudaErrorInsufficientDriver);
}

// ---- memory out of bounds, for AddressSanitizer

struct Four {
  int v[4];
};
__global__ void shared_overflow(int index) {
  LG_SHARED(Four, s);
  s.v[index + int(threadIdx.x)] = 1;
  __syncthreads();
}
__global__ void write_at(int* memory, int index) {
  if (threadIdx.x == 5) memory[index] = 1;
}
__global__ void load_pack(const float* memory, uint4* out) {
  *out = *reinterpret_cast<const uint4*>(memory);
}

// ---- mapped memory

struct Letter {
  int flag;
  int payload[200];
};

__global__ void send(Letter* letter, int value) {
  for (unsigned i = threadIdx.x; i < 200; i += blockDim.x) letter->payload[i] = value + int(i);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *static_cast<volatile int*>(&letter->flag) = value;
}
__global__ void read_flag(const Letter* letter, int* out) { *out = letter->flag; }

struct Mailbox {
  Letter *host, *device;
  Mailbox() {
    CHECK_CUDA(cudaHostAlloc(&host, sizeof(Letter), cudaHostAllocMapped | cudaHostAllocPortable));
    CHECK_CUDA(cudaHostGetDevicePointer(&device, host, 0));
  }
  int flag() const { return __atomic_load_n(&host->flag, __ATOMIC_ACQUIRE); }
  bool holds(int value) const {
    bool ok = flag() == value;
    for (int i = 0; i < 200; ++i) ok &= host->payload[i] == value + i;
    return ok;
  }
};

void publication() {
  const Mailbox mail;
  CHECK(mail.host != mail.device && mail.flag() == 0);
  CHECK_CUDA(launch(send, 1, 64, mail.device, 1));
  CHECK(mail.flag() == 0 && mail.host->payload[0] == 0);
  CHECK_CUDA(cudaStreamSynchronize(nullptr));
  CHECK(mail.holds(1));
  // What the host writes is there for the next kernel.
  mail.host->flag = 77;
  int* out = device_copy<int>({0});
  CHECK_CUDA(launch(read_flag, 1, 1, mail.device, out));
  CHECK(host_copy(out, 1)[0] == 77);
  // An event publishes what came before it and no more.
  cudaEvent_t event;
  CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CHECK_CUDA(launch(send, 1, 64, mail.device, 2));
  CHECK_CUDA(cudaEventRecord(event));
  CHECK_CUDA(launch(send, 1, 64, mail.device, 3));
  CHECK(mail.flag() == 77);
  CHECK_CUDA(cudaEventQuery(event));
  CHECK(mail.holds(2));
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK(mail.holds(3));
  CHECK_CUDA(cudaEventDestroy(event));
  CHECK_CUDA(cudaFreeHost(mail.host));
}

void held_events() {
  const Mailbox mail;
  cudaEvent_t before, first, second;
  for (cudaEvent_t* event : {&before, &first, &second})
    CHECK_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  CHECK_CUDA(cudaEventQuery(first));  // never recorded: complete
  CHECK_CUDA(cudaEventRecord(before));
  cuda_emulator::hold_events(true);
  CHECK_CUDA(cudaEventQuery(before));
  CHECK_CUDA(launch(send, 1, 64, mail.device, 1));
  CHECK_CUDA(cudaEventRecord(first));
  CHECK_CUDA(launch(send, 1, 64, mail.device, 2));
  CHECK_CUDA(cudaEventRecord(second));
  CHECK(cudaEventQuery(first) == cudaErrorNotReady && cudaEventQuery(second) == cudaErrorNotReady);
  CHECK(cudaStreamQuery(nullptr) == cudaErrorNotReady);
  CHECK(mail.flag() == 0);
  CHECK_CUDA(cudaEventSynchronize(first));  // a wait ends
  CHECK(mail.holds(1));
  CHECK_CUDA(cudaEventQuery(first));
  CHECK(cudaEventQuery(second) == cudaErrorNotReady);
  cuda_emulator::hold_events(false);
  CHECK(mail.holds(1));  // not before the host learns of it
  CHECK_CUDA(cudaEventQuery(second));
  CHECK(mail.holds(2));
  lossguard_emulator_hold_events(1);
  CHECK_CUDA(cudaEventQuery(second));
  CHECK_CUDA(cudaEventRecord(second));
  CHECK(cudaEventQuery(second) == cudaErrorNotReady);
  CHECK_CUDA(cudaStreamSynchronize(nullptr));
  CHECK_CUDA(cudaEventQuery(second));
}

// Whoever sees the flag sees the payload, at any time.
void publication_order() {
  const Mailbox mail;
  std::atomic<bool> done{false};
  std::atomic<int> seen{0}, torn{0};
  std::thread poller([&] {
    int last = 0;
    while (!done) {
      const int flag = mail.flag();
      if (flag == last) continue;
      last = flag;
      ++seen;
      if (__atomic_load_n(&mail.host->payload[199], __ATOMIC_RELAXED) < flag + 199) ++torn;
    }
  });
  for (int i = 1; i <= 1000; ++i) {
    CHECK_CUDA(launch(send, 1, 32, mail.device, i));
    CHECK_CUDA(cudaStreamSynchronize(nullptr));
  }
  while (!seen) std::this_thread::yield();
  done = true;
  poller.join();
  CHECK(torn == 0);
}

// ---- streams

__global__ void append(int* list, int value) { list[++list[0]] = value; }
__global__ void add_to(int* value, int n) { value[threadIdx.x] += n; }

// The orders in which work of three streams ran, over many seeds: `wait` makes the third wait for the first.
void late_execution() {
  std::map<std::vector<int>, int> orders;
  for (int seed = 0; seed < 200; ++seed) {
    cuda_emulator::set_schedule(cuda_emulator::Schedule::random, uint64_t(seed));
    int* list = device_copy<int>(std::vector<int>(8, 0));
    cudaStream_t streams[3];
    cudaEvent_t event;
    CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (cudaStream_t& stream : streams) CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cuda_emulator::set_late_execution(true);
    CHECK_CUDA(launch_in(streams[0], append, 1, 1, list, 1));
    CHECK_CUDA(launch_in(streams[0], append, 1, 1, list, 2));
    CHECK_CUDA(cudaEventRecord(event, streams[0]));
    CHECK_CUDA(launch_in(streams[1], append, 1, 1, list, 3));
    CHECK_CUDA(cudaStreamWaitEvent(streams[2], event));
    CHECK_CUDA(launch_in(streams[2], append, 1, 1, list, 4));
    CHECK(list[0] == 0);  // nothing has run
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<int> order(list + 1, list + 5);
    ++orders[order];
    const auto position = [&](int v) { return std::find(order.begin(), order.end(), v) - order.begin(); };
    CHECK(list[0] == 4 && position(1) < position(2) && position(2) < position(4));
    cuda_emulator::set_late_execution(false);
    for (cudaStream_t stream : streams) CHECK_CUDA(cudaStreamDestroy(stream));
    CHECK_CUDA(cudaEventDestroy(event));
    CHECK_CUDA(cudaFree(list));
  }
  CHECK(orders.size() == 4);  // 3 can be anywhere
}

void late_errors() {
  cuda_emulator::set_late_execution(true);
  CHECK_CUDA(launch(divergent_barrier, 1, 64));
  const cudaError_t error = cudaStreamSynchronize(nullptr);
  CHECK(error == cudaErrorLaunchFailure);
  show(error);
  CHECK_CUDA(cudaStreamSynchronize(nullptr));
}

void two_streams(bool wait) {
  int* values = device_copy<int>(std::vector<int>(32, 1));
  cudaStream_t a, b;
  cudaEvent_t event;
  CHECK_CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CHECK_CUDA(launch_in(a, add_to, 1, 32, values, 1));
  CHECK_CUDA(cudaEventRecord(event, a));
  if (wait) CHECK_CUDA(cudaStreamWaitEvent(b, event));
  CHECK_CUDA(launch_in(b, add_to, 1, 32, values, 1));
  CHECK_CUDA(cudaStreamSynchronize(b));
  if (!wait) CHECK_CUDA(cudaStreamSynchronize(a));
  CHECK(values[31] == 3);
}

void read_without_waiting() {
  int* values = device_copy<int>(std::vector<int>(32, 1));
  CHECK_CUDA(launch(add_to, 1, 32, values, 1));
  CHECK(values[7] == 2);
}

void host_threads() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      cudaStream_t stream;
      CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      int* values = device_array<int>(64);
      CHECK_CUDA(cudaMemsetAsync(values, 0, 64 * sizeof(int), stream));
      for (int i = 0; i < 50; ++i) CHECK_CUDA(launch_in(stream, add_to, 1, 64, values, t));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      for (int i = 0; i < 64; ++i) CHECK(values[i] == 50 * t);
      CHECK(launch_in(stream, divergent_barrier, 1, 64) == cudaErrorLaunchFailure);
      CHECK_CUDA(cudaFree(values));
      CHECK_CUDA(cudaStreamDestroy(stream));
    });
  for (std::thread& thread : threads) thread.join();
}

// ---- traffic

template <class T>
struct alignas(16) Pack {
  T v[16 / sizeof(T)];
};

template <class T>
__global__ void scale(const T* in, T* out, int packs, T factor) {
  LG_SHARED(T, shared_factor);
  if (threadIdx.x == 0) shared_factor = factor;
  __syncthreads();
  for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < packs; i += int(gridDim.x * blockDim.x)) {
    Pack<T> pack;
    *reinterpret_cast<uint4*>(&pack) = reinterpret_cast<const uint4*>(in)[i];
    for (T& v : pack.v) v *= shared_factor;
    reinterpret_cast<uint4*>(out)[i] = *reinterpret_cast<const uint4*>(&pack);
  }
}
__global__ void gather(const float* table, const long* indices, float* out, unsigned* counter) {
  out[threadIdx.x] = __ldg(&table[indices[threadIdx.x]]);
  if (threadIdx.x == 0) atomicAdd(counter, 1u);
}

void count_traffic() {
  const int n = 4096;
  float* x = device_copy(std::vector<float>(n, 1.0f));
  float* y = device_array<float>(n);
  std::vector<long> rows(256);
  for (int i = 0; i < 256; ++i) rows[i] = i * 16;  // each in a sector of its own
  const long* indices = device_copy(rows);
  unsigned* counter = device_copy<unsigned>({0});
  cuda_emulator::register_buffer("x", x, n * sizeof(float));
  cuda_emulator::register_buffer("y", y, n * sizeof(float));
  cuda_emulator::register_buffer("indices", indices, 256 * sizeof(long));
  for (cuda_emulator::Schedule schedule : {cuda_emulator::Schedule::ascending, cuda_emulator::Schedule::random}) {
    cuda_emulator::set_schedule(schedule);
    CHECK_CUDA(launch(scale<float>, 3, 96, x, y, n / 4, 2.0f));
    CHECK_CUDA(
        launch(scale<double>, 2, 32, reinterpret_cast<const double*>(x), reinterpret_cast<double*>(y), 100, 2.0));
    CHECK_CUDA(launch(gather, 1, 256, x, indices, y, counter));
    std::printf("%s", lossguard_emulator_traffic());
    cuda_emulator::clear_traffic();
  }
  cuda_emulator::clear_buffers();
  CHECK_CUDA(launch(scale<float>, 3, 96, x, y, n / 4, 2.0f));
  std::printf("%s", lossguard_emulator_traffic());
}

// ---- conversions

// 65536 halves to float; and back, from every float that is half way between two, and its neighbours.
void conversions() {
  const auto bits_of = [](float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    return bits;
  };
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    // By arithmetic: the value is exact in double.
    const int exponent = int(bits >> 10 & 31), fraction = int(bits & 1023);
    const double sign = bits >> 15 ? -1 : 1;
    const float v = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    if (exponent == 31 && fraction) {
      CHECK(bits_of(v) == 0x7fffffffu);
      CHECK(__half_as_ushort(__float2half_rn(v)) == 0x7fff);
    } else {
      const double magnitude = exponent == 31 ? std::numeric_limits<double>::infinity()
                               : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                              : std::ldexp(fraction, -24);
      CHECK(double(v) == sign * magnitude && std::signbit(v) == (sign < 0));
      CHECK(__half_as_ushort(__float2half_rn(v)) == bits);
      if ((bits & 0x7fff) < 0x7c00) {
        const uint32_t next_bits = bits + 1;
        const float following = __half2float(__ushort_as_half(static_cast<unsigned short>(next_bits)));
        const double next = std::isinf(following) ? 65536 : std::fabs(double(following));  // for this purpose
        const float middle = float(sign * (magnitude + next) / 2);
        const uint32_t even = bits % 2 ? next_bits : bits;
        CHECK(__half_as_ushort(__float2half_rn(middle)) == even);
        const float below = std::nextafter(middle, 0.0f), above = std::nextafter(middle, float(sign) * 1e9f);
        CHECK(__half_as_ushort(__float2half_rn(below)) == bits);
        CHECK(__half_as_ushort(__float2half_rn(above)) == next_bits);
      }
    }
    // bfloat16 is the upper half of a float.
    const float w = __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(bits)));
    CHECK(bits_of(w) == bits << 16);
    if (w != w) {
      CHECK(__bfloat16_as_ushort(__float2bfloat16_rn(w)) == 0x7fff);
    } else if ((bits & 0x7fff) < 0x7f80) {
      CHECK(__bfloat16_as_ushort(__float2bfloat16_rn(w)) == bits);
      for (const uint32_t rest : {0x7fffu, 0x8000u, 0x8001u}) {
        float v16;
        const uint32_t raw = bits << 16 | rest;
        std::memcpy(&v16, &raw, sizeof v16);
        const uint32_t expected = rest == 0x7fff || (rest == 0x8000 && bits % 2 == 0) ? bits : bits + 1;
        CHECK(__bfloat16_as_ushort(__float2bfloat16_rn(v16)) == expected);
      }
    }
    if (failures > 20) return;
  }
  CHECK(__half_as_ushort(__float2half_rn(1e30f)) == 0x7c00 && __half_as_ushort(__float2half_rn(-1e30f)) == 0xfc00);
  CHECK(__half_as_ushort(__float2half_rn(1e-30f)) == 0 && __half_as_ushort(__float2half_rn(-1e-30f)) == 0x8000);
}

void log() {
  int* out = device_copy<int>({0});
  CHECK_CUDA(launch(fine, 3, 64, out));
  float* values = device_array<float>(16);
  CHECK_CUDA(launch(scale<float>, 1, 32, values, values, 4, 1.0f));
  std::printf("%s", lossguard_emulator_log());
  lossguard_emulator_clear_log();
  CHECK(std::string(lossguard_emulator_log()).empty());
}

const struct {
  const char* name;
  void (*run)();
} kCases[] = {
    {"reduction", [] { reduction(kNone, 3); }},
    {"reduction without sync", [] { reduction(kNoSync, 1); }},
    {"reduction without sync at its end", [] { reduction(kNoSyncAtEnd, 1); }},
    {"reduction without fence", [] { reduction(kNoFence, 1); }},
    {"reduction with early fence", [] { reduction(kEarlyFence, 1); }},
    {"reduction with block fence", [] { reduction(kBlockFence, 1); }},
    {"reduction without reader fence", [] { reduction(kNoReaderFence, 1); }},
    {"shuffles", [] { count_wrong(check_shuffles, 2, 64); }},
    {"votes", [] { count_wrong(check_votes, 2, 96); }},
    {"poison", [] { count_wrong(check_poison, 5, 64); }},
    {"atomics", atomics},
    {"divergent barrier", [] { error_of(divergent_barrier); }},
    {"barrier after exit", [] { error_of(barrier_after_exit); }},
    {"lane not in mask", [] { error_of(lane_not_in_mask); }},
    {"source outside mask", [] { error_of(source_outside_mask); }},
    {"exited lane", [] { error_of(exited_lane); }},
    {"different collectives", [] { error_of(different_collectives); }},
    {"deadlock", [] { error_of(deadlock); }},
    {"huge shared", [] { error_of(huge_shared); }},
    {"launch configurations", launch_configurations},
    {"devices", devices},
    {"shared in bounds", [] { show(launch(shared_overflow, 1, 4, 0)); }},
    {"shared overflow", [] { show(launch(shared_overflow, 1, 4, 1)); }},
    {"global overflow", [] { show(launch(write_at, 1, 32, device_array<int>(9), 9)); }},
    {"aligned", [] { show(launch(load_pack, 1, 1, device_array<float>(8), device_array<uint4>(1))); }},
    {"misaligned", [] { show(launch(load_pack, 1, 1, device_array<float>(8) + 1, device_array<uint4>(1))); }},
    {"publication", publication},
    {"held events", held_events},
    {"publication order", publication_order},
    {"late execution", late_execution},
    {"late errors", late_errors},
    {"two streams", [] { two_streams(true); }},
    {"two streams without wait", [] { two_streams(false); }},
    {"read without waiting", read_without_waiting},
    {"host threads", host_threads},
    {"traffic", count_traffic},
    {"conversions", conversions},
    {"log", log},
};

}  // namespace

int main(int argc, char** argv) {
  for (const auto& entry : kCases) {
    if (argc < 2) std::printf("%s\n", entry.name);
    if (argc < 2 || std::strcmp(argv[1], entry.name)) continue;
    entry.run();
    return failures ? 1 : 0;
  }
  return 2;
}
