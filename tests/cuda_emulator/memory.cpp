#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

namespace cuda_emulator {
namespace {

using Word = uint32_t;
constexpr size_t kAlignment = 256;
constexpr size_t kChunk = 64;  // words compared at once

struct Allocation {
  size_t words;
  Word* host;
  Word* device;
  Word* sealed;  // the device's as of the last seal
  Word* agreed;  // what both sides last had in common
};
struct Write {
  Word* host;
  Word* agreed;
  Word value;
};

// Never destroyed: threads may outlive the statics.
std::vector<Allocation>& allocations = *new std::vector<Allocation>;
std::deque<Write>& pending = *new std::deque<Write>;
uint64_t published;  // writes, ever

Word* allocate_words(size_t words) {
  const size_t size = (words * sizeof(Word) + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, size);
  if (memory) std::memset(memory, 0, size);
  return static_cast<Word*>(memory);
}

void release(const Allocation& a) {
  for (Word* words : {a.host, a.device, a.sealed, a.agreed}) std::free(words);
}

// f(i) for the words that differ.
template <class F>
void for_differences(const Word* a, const Word* b, size_t words, const F& f) {
  for (size_t begin = 0; begin < words; begin += kChunk) {
    const size_t end = begin + kChunk < words ? begin + kChunk : words;
    if (!std::memcmp(a + begin, b + begin, (end - begin) * sizeof(Word))) continue;
    for (size_t i = begin; i < end; ++i)
      if (a[i] != b[i]) f(i);
  }
}

const Allocation* allocation_of(const void* host) {
  for (const Allocation& a : allocations)
    if (host >= a.host && host < a.host + a.words) return &a;
  return nullptr;
}

}  // namespace

void* map_pages(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    perror("emulator: out of memory");
    abort();
  }
  return memory;
}

void* allocate_mapped(size_t size) {
  Allocation a;
  a.words = (size + sizeof(Word) - 1) / sizeof(Word);
  for (Word** words : {&a.host, &a.device, &a.sealed, &a.agreed}) *words = allocate_words(a.words ? a.words : 1);
  if (!a.host || !a.device || !a.sealed || !a.agreed) {
    release(a);
    return nullptr;
  }
  allocations.push_back(a);
  return a.host;
}

bool free_mapped(void* host) {
  for (size_t i = 0; i < allocations.size(); ++i) {
    if (allocations[i].host != host) continue;
    publish_mapped_memory(pending_writes());  // none is left that points here
    release(allocations[i]);
    allocations.erase(allocations.begin() + i);
    return true;
  }
  return false;
}

void* device_pointer(void* host) {
  const Allocation* a = allocation_of(host);
  return a ? reinterpret_cast<char*>(a->device) + (static_cast<char*>(host) - reinterpret_cast<char*>(a->host))
           : nullptr;
}

bool is_mapped(const void* host) { return allocation_of(host); }

void seal_mapped_memory() {
  for (const Allocation& a : allocations)
    for_differences(a.device, a.sealed, a.words, [&](size_t i) {
      a.sealed[i] = a.device[i];
      pending.push_back({a.host + i, a.agreed + i, a.device[i]});
    });
}

uint64_t pending_writes() { return published + pending.size(); }

uint64_t published_writes() { return published; }

void publish_mapped_memory(uint64_t up_to) {
  for (; published < up_to; ++published) {
    const Write& write = pending.front();
    *write.agreed = write.value;
    // Host threads may be polling.
    __atomic_store_n(write.host, write.value, __ATOMIC_RELEASE);
    pending.pop_front();
  }
}

void update_device_from_host() {
  for (const Allocation& a : allocations)
    for_differences(a.host, a.agreed, a.words, [&](size_t i) {
      if (a.device[i] != a.agreed[i]) return;  // a device write to it is pending, and wins
      a.device[i] = a.sealed[i] = a.agreed[i] = __atomic_load_n(a.host + i, __ATOMIC_RELAXED);
    });
}

}  // namespace cuda_emulator
