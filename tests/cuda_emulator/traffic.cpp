// Counts what kernels load from and store to global memory.
//
// Kernels are compiled with -fsanitize=thread, which puts a call before every access, but linked with the functions
// below instead of ThreadSanitizer's.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "engine.h"
#include "fiber.h"

namespace cuda_emulator {
namespace {

constexpr size_t kSector = 32;

// The sectors of one stretch of memory, by direction.
struct Sectors {
  uintptr_t first;
  std::vector<uint64_t> touched[2];

  Sectors(uintptr_t begin, size_t size) : first(begin / kSector) {
    const size_t count = (begin + size - 1) / kSector - first + 1;
    for (auto& words : touched) words.resize((count + 63) / 64);
  }
  // How many of these had not been touched.
  uint64_t touch(uintptr_t address, size_t size, bool is_store) {
    uint64_t fresh = 0;
    for (uintptr_t sector = address / kSector; sector <= (address + size - 1) / kSector; ++sector) {
      uint64_t& word = touched[is_store][(sector - first) / 64];
      const uint64_t bit = uint64_t(1) << (sector - first) % 64;
      fresh += !(word & bit);
      word |= bit;
    }
    return fresh;
  }
  void clear() {
    for (auto& words : touched) std::fill(words.begin(), words.end(), 0);
  }
};

struct Counts {
  uint64_t bytes[2] = {}, sectors[2] = {};  // loaded, stored
};

struct Buffer {
  std::string name;
  uintptr_t begin;
  size_t size;
  Sectors sectors;
  Counts counts;

  Buffer(const std::string& name, uintptr_t begin, size_t size)
      : name(name), begin(begin), size(size), sectors(begin, size) {}
  bool holds(uintptr_t address) const { return address - begin < size; }
};

constexpr size_t kPage = 4096;  // of memory that is in no buffer

// Kernels, of which one runs at a time, hold the lock from beginning to end.
std::mutex mutex;
std::vector<Traffic>& counted = *new std::vector<Traffic>;
size_t launches;
std::vector<Buffer>& buffers = *new std::vector<Buffer>;
Buffer* last_buffer;
auto& other_pages = *new std::unordered_map<uintptr_t, Sectors>;
Counts others;
const Grid* running;

void count(uintptr_t address, size_t size, bool is_store) {
  if (!last_buffer || !last_buffer->holds(address)) {
    const auto found = std::find_if(buffers.begin(), buffers.end(), [&](const Buffer& b) { return b.holds(address); });
    last_buffer = found == buffers.end() ? nullptr : &*found;
  }
  if (last_buffer) {
    // An access that leaves the buffer is AddressSanitizer's affair.
    size = std::min(size, last_buffer->begin + last_buffer->size - address);
    last_buffer->counts.bytes[is_store] += size;
    last_buffer->counts.sectors[is_store] += last_buffer->sectors.touch(address, size, is_store);
    return;
  }
  others.bytes[is_store] += size;
  for (uintptr_t end = address + size; address < end;) {
    const uintptr_t page = address / kPage, next = std::min(end, (page + 1) * kPage);
    Sectors& sectors = other_pages.try_emplace(page, page * kPage, kPage).first->second;
    others.sectors[is_store] += sectors.touch(address, next - address, is_store);
    address = next;
  }
}

void record(const std::string& buffer, const Counts& counts) {
  if (!counts.bytes[0] && !counts.bytes[1]) return;
  counted.push_back({launches, kernel_name(running->bound.kernel), buffer, counts.bytes[0], counts.bytes[1],
                     counts.sectors[0], counts.sectors[1]});
}

bool is_argument(const void* address) {
  const char* arguments = static_cast<const char*>(running->bound.arguments.get());
  return address >= arguments && address < arguments + running->bound.arguments_size;
}

}  // namespace

void traffic_begin(const Grid& grid) {
  mutex.lock();  // until the end
  running = &grid;
  for (Buffer& buffer : buffers) {
    buffer.counts = Counts();
    buffer.sectors.clear();
  }
  last_buffer = nullptr;
  other_pages.clear();
  others = Counts();
}

void traffic_end() {
  for (const Buffer& buffer : buffers) record(buffer.name, buffer.counts);
  record("", others);
  ++launches;
  running = nullptr;
  mutex.unlock();
}

// Code that runs on a fiber is a kernel's; the host's may be instrumented too.
void traffic_access(const void* address, size_t size, bool is_store) {
  if (!fibers.is_on_a_stack(__builtin_frame_address(0)) || fibers.is_on_a_stack(address)) return;
  if (is_shared_memory(address) || is_built_in_variable(address) || is_argument(address)) return;
  count(reinterpret_cast<uintptr_t>(address), size, is_store);
}

std::vector<Traffic> traffic() {
  const std::lock_guard<std::mutex> lock(mutex);
  return counted;
}

void clear_traffic() {
  const std::lock_guard<std::mutex> lock(mutex);
  counted.clear();
  launches = 0;
}

void register_buffer(const std::string& name, const void* memory, size_t size) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (size) buffers.emplace_back(name, reinterpret_cast<uintptr_t>(memory), size);
}

void clear_buffers() {
  const std::lock_guard<std::mutex> lock(mutex);
  buffers.clear();
}

}  // namespace cuda_emulator

using namespace cuda_emulator;

const char* lossguard_emulator_traffic() {
  thread_local std::string text;
  text.clear();
  for (const Traffic& t : traffic()) {
    text += std::to_string(t.launch) + '\t' + t.kernel + '\t' + t.buffer;
    for (uint64_t number : {t.loaded_bytes, t.stored_bytes, t.loaded_sectors, t.stored_sectors})
      text += '\t' + std::to_string(number);
    text += '\n';
  }
  return text.c_str();
}
void lossguard_emulator_clear_traffic() { clear_traffic(); }
void lossguard_emulator_register_buffer(const char* name, const void* memory, size_t size) {
  register_buffer(name, memory, size);
}
void lossguard_emulator_clear_buffers() { clear_buffers(); }

// ---- what the compiler calls

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define EMULATOR_ACCESS(size) \
  void __tsan_read##size(void* address) { traffic_access(address, size, false); } \
  void __tsan_write##size(void* address) { traffic_access(address, size, true); }
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)
#undef EMULATOR_ACCESS
#define EMULATOR_UNALIGNED_ACCESS(size) \
  void __tsan_unaligned_read##size(void* address) { traffic_access(address, size, false); } \
  void __tsan_unaligned_write##size(void* address) { traffic_access(address, size, true); }
EMULATOR_UNALIGNED_ACCESS(2)
EMULATOR_UNALIGNED_ACCESS(4)
EMULATOR_UNALIGNED_ACCESS(8)
EMULATOR_UNALIGNED_ACCESS(16)
#undef EMULATOR_UNALIGNED_ACCESS
void __tsan_read_range(void* address, size_t size) { traffic_access(address, size, false); }
void __tsan_write_range(void* address, size_t size) { traffic_access(address, size, true); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Atomics of the host's code: no kernel has the compiler's. The orders are a number here, and the strongest will do.
#define EMULATOR_ATOMIC(bits, Word) \
  Word __tsan_atomic##bits##_load(const volatile Word* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
  void __tsan_atomic##bits##_store(volatile Word* p, Word v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); } \
  Word __tsan_atomic##bits##_exchange(volatile Word* p, Word v, int) { \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); \
  } \
  Word __tsan_atomic##bits##_fetch_add(volatile Word* p, Word v, int) { \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); \
  } \
  Word __tsan_atomic##bits##_fetch_sub(volatile Word* p, Word v, int) { \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); \
  } \
  Word __tsan_atomic##bits##_fetch_and(volatile Word* p, Word v, int) { \
    return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); \
  } \
  Word __tsan_atomic##bits##_fetch_or(volatile Word* p, Word v, int) { \
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); \
  } \
  Word __tsan_atomic##bits##_fetch_xor(volatile Word* p, Word v, int) { \
    return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST); \
  } \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile Word* p, Word* expected, Word v, int, int) { \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  } \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile Word* p, Word* expected, Word v, int, int) { \
    return __atomic_compare_exchange_n(p, expected, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
EMULATOR_ATOMIC(8, uint8_t)
EMULATOR_ATOMIC(16, uint16_t)
EMULATOR_ATOMIC(32, uint32_t)
EMULATOR_ATOMIC(64, uint64_t)
#undef EMULATOR_ATOMIC
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"
