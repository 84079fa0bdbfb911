// Runs a grid: every CUDA thread on a fiber, one at a time, until it has to wait for others.
#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device.h"
#include "engine.h"
#include "fiber.h"
#include "memory.h"

// Of the way through a collective, which runs millions of times a second: errors stay out of it, all else within.
#define EMULATOR_HOT inline __attribute__((always_inline))
#define EMULATOR_COLD __attribute__((noinline, cold))

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_emulator {
namespace {

constexpr int kWarps = kMaxThreads / kWarpSize;
constexpr int kSyncs = 64;  // of a warp's barriers, in turn

struct Block;
struct Warp;

struct Thread {
  Block* block;
  Warp* warp;
  unsigned index, lane;
  Fiber* fiber;  // null until it starts
};

enum class Collective { barrier, ballot, shuffle };
constexpr const char* kNames[] = {"__syncwarp()", "a vote", "a shuffle"};  // in errors

// Lanes that wait for each other. Several masks can be under way in one warp, one for each lane at most.
struct Rendezvous {
  uint32_t mask, arrived, ballot;
  Collective collective;
  Location where;
  unsigned number;
};

struct Warp {
  uint32_t live, ready;  // lanes
  unsigned rendezvous_count, rendezvous_number;
  Rendezvous rendezvous[kWarpSize];
  uint64_t value[kWarpSize], result[kWarpSize];  // by lane
  uint8_t source[kWarpSize];
};

// Addresses for TSan, which knows each eight bytes apart; on the heap, so that each block has its own: a freed one
// forgets what it knew.
using Address = uint64_t;
struct BlockSyncs {
  Address barrier[2];
  Address warp[kWarps][kSyncs];
  // By scope (block, device). A fence publishes what its thread has done and seen; an atomic hands on what its block
  // has published, and notes what others handed on to the same address; the next fence of the block sees that.
  Address published[2], noted[2];
  Address block_atomics;
  Clock* relays;  // two, for that; null until there is an atomic
};

struct SharedVariable {
  const void* tag;
  char* memory;
};

struct Block {
  unsigned index;
  unsigned live;
  unsigned warp_count;
  uint32_t ready_warps;
  // __syncthreads()
  unsigned arrived, generation;
  int predicates[2];  // by the generation's parity: the next barrier may begin before all have left this one
  Location barrier_at;
  BlockSyncs* syncs = nullptr;
  std::vector<SharedVariable> shared;
  size_t static_shared;
  char* shared_memory = nullptr;  // without sanitizers: where `shared` lies
  size_t shared_used;
  Warp warps[kWarps];
  Thread threads[kMaxThreads];
};

// Of the grid that runs. There is one at a time.
struct State {
  Grid* grid = nullptr;
  Thread* current = nullptr;
  Context host;
  Block* blocks[kMaxResidentBlocks] = {};
  int resident = 0;
  Schedule schedule;
  Random random{1};
  char error[512];  // empty unless something is wrong
} state;

// Shared memory lies in one piece for all blocks, so that traffic.cpp can tell it from global memory.
constexpr size_t kSharedOfBlock = kMaxStaticShared + kMaxDynamicShared + (1 << 10);
char* shared_arena;

uint32_t bit(unsigned i) { return 1u << i; }
uint32_t all_below(unsigned n) { return n >= 32 ? 0xffffffffu : bit(n) - 1; }

// Errors are written without the heap: who fails never returns to free anything.
struct Text {
  char text[96];
};
Text text_of(const Location& where) {
  const char* file = where.file_name();
  const char* slash = strrchr(file, '/');
  Text result;
  snprintf(result.text, sizeof result.text, "%s:%u", slash ? slash + 1 : file, unsigned(where.line()));
  return result;
}

EMULATOR_COLD bool same_line(const Location& a, const Location& b) {
  return a.line() == b.line() && (a.file_name() == b.file_name() || !strcmp(a.file_name(), b.file_name()));
}

void set_error(const Thread& thread, const char* format, va_list arguments) {
  const Unseen unseen;
  const int begin = snprintf(state.error, sizeof state.error, "emulator: block %u thread %u: ", thread.block->index,
                             thread.index);
  vsnprintf(state.error + begin, sizeof state.error - size_t(begin), format, arguments);
}

// The launch ends here: no thread of it runs any more.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  set_error(*state.current, format, arguments);
  va_end(arguments);
  switch_context_for_good(*state.current->fiber, state.host);
}

// Of a thread that waits, said by the host.
__attribute__((format(printf, 2, 3))) void report(const Thread& thread, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  set_error(thread, format, arguments);
  va_end(arguments);
}

// One place may have several descriptions, in the instances of a template.
EMULATOR_HOT bool same_place(const Location& a, const Location& b) {
  return !memcmp(&a, &b, sizeof a) || same_line(a, b);
}

// ---- who is next

// One of the bits that are set, by a random number. Those after a gap are likelier: any order will do.
unsigned any_bit(uint32_t set, uint32_t random) {
  const int turn = int(random % 32);
  return unsigned(std::countr_zero(std::rotr(set, turn)) + turn) % 32;
}

EMULATOR_HOT Thread* next_ready() {
  Block* block = nullptr;
  unsigned warp, lane;
  switch (state.schedule) {
    case Schedule::ascending:
      block = state.blocks[0];
      if (!block->ready_warps) return nullptr;
      warp = unsigned(std::countr_zero(block->ready_warps));
      lane = unsigned(std::countr_zero(block->warps[warp].ready));
      break;
    case Schedule::descending:
      block = state.blocks[0];
      if (!block->ready_warps) return nullptr;
      warp = 31 - unsigned(std::countl_zero(block->ready_warps));
      lane = 31 - unsigned(std::countl_zero(block->warps[warp].ready));
      break;
    default: {
      uint32_t able = 0;
      for (int i = 0; i < state.resident; ++i)
        if (state.blocks[i]->ready_warps) able |= bit(i);
      if (!able) return nullptr;
      const uint32_t random = state.random.next();
      block = state.blocks[any_bit(able, random)];
      warp = any_bit(block->ready_warps, random >> 5);
      lane = any_bit(block->warps[warp].ready, random >> 10);
    }
  }
  return &block->threads[warp * kWarpSize + lane];
}

unsigned warp_index(const Thread& thread) { return thread.index / kWarpSize; }

EMULATOR_HOT void set_waiting(Thread& thread) {
  thread.warp->ready &= ~bit(thread.lane);
  if (!thread.warp->ready) thread.block->ready_warps &= ~bit(warp_index(thread));
}

EMULATOR_HOT void set_ready(Block& block, unsigned warp, uint32_t lanes) {
  block.warps[warp].ready |= lanes;
  block.ready_warps |= bit(warp);
}

// ---- threads come and go

[[noreturn]] void run_threads();

// Where the stream keeps the fiber of this thread; null if it does not.
Fiber** kept_fiber(const Thread& thread) {
  const size_t number = size_t(thread.block->index) * state.grid->threads + thread.index;
  if (!under_tsan() || number >= kKeptFibers) return nullptr;
  const Unseen unseen;
  std::vector<Fiber*>& kept = *state.grid->kept_fibers;
  if (number >= kept.size()) kept.resize(number + 1);
  return &kept[number];
}

EMULATOR_COLD Fiber* new_fiber(const Thread& thread) {
  Fiber** kept = kept_fiber(thread);
  Fiber* fiber = kept ? *kept : nullptr;
  if (fiber)
    fibers.restart(fiber, run_threads);
  else
    fiber = fibers.take(run_threads);
  if (kept) *kept = fiber;
  if (under_tsan()) {
    const Unseen unseen;
    char name[48];
    snprintf(name, sizeof name, "block %u thread %u", thread.block->index, thread.index);
    __tsan_set_fiber_name(fiber->tsan_fiber, name);
  }
  return fiber;
}

EMULATOR_HOT void make_current(Thread& thread) {
  state.current = &thread;
  threadIdx.x = thread.index;
  blockIdx.x = thread.block->index;
}

// Makes `thread` the current one and says where it runs.
EMULATOR_HOT Context& context_of(Thread& thread) {
  if (!thread.fiber) [[unlikely]]
    thread.fiber = new_fiber(thread);
  make_current(thread);
  return *thread.fiber;
}

// The current thread has to wait, or lets others go first.
EMULATOR_HOT void run_others(Thread& self) {
  Thread* next = next_ready();
  if (next == &self) return;
  switch_context(*self.fiber, next ? context_of(*next) : state.host);
}

void perhaps_run_others() {
  if (state.schedule == Schedule::random) run_others(*state.current);
}

void exit_thread() {
  Thread& thread = *state.current;
  Block& block = *thread.block;
  Warp& warp = *thread.warp;
  for (unsigned i = 0; i < warp.rendezvous_count; ++i)
    if (warp.rendezvous[i].mask & bit(thread.lane))
      fail("exits while others wait for it in %s at %s", kNames[int(warp.rendezvous[i].collective)],
           text_of(warp.rendezvous[i].where).text);
  if (block.arrived) fail("exits while others wait in __syncthreads() at %s", text_of(block.barrier_at).text);
  release(&state.grid->finished);
  set_waiting(thread);
  warp.live &= ~bit(thread.lane);
  --block.live;
}

// What a fiber does: one thread after another for as long as each runs to its end and the next one is new.
void run_threads() {
  entered_new_stack();
  for (;;) {
    acquire(&state.grid->started);
    state.grid->bound.call(state.grid->bound.arguments.get());
    exit_thread();
    Fiber* fiber = state.current->fiber;
    Thread* next = state.current->block->live ? next_ready() : nullptr;
    if (next && !next->fiber && !under_tsan()) {
      next->fiber = fiber;
      make_current(*next);
      continue;
    }
    const bool kept = kept_fiber(*state.current);
    Context& to = next ? context_of(*next) : state.host;
    if (!kept) fibers.give_back(fiber);
    switch_context_for_good(*fiber, to);
  }
}

// ---- blocks come and go

char* allocate_shared(Block& block, size_t size) {
  if (under_sanitizer()) return static_cast<char*>(malloc(size));
  char* memory = block.shared_memory + block.shared_used;
  block.shared_used += (size + 127) / 128 * 128;
  return memory;
}

void admit(Block& block, unsigned index) {
  const Unseen unseen;
  const Grid& grid = *state.grid;
  block.index = index;
  block.live = grid.threads;
  block.warp_count = (grid.threads + kWarpSize - 1) / kWarpSize;
  block.ready_warps = all_below(block.warp_count);
  block.arrived = block.generation = 0;
  block.static_shared = block.shared_used = 0;
  if (under_tsan()) block.syncs = new BlockSyncs{};
  for (unsigned w = 0; w < block.warp_count; ++w) {
    Warp& warp = block.warps[w];
    warp.live = warp.ready = all_below(grid.threads - w * kWarpSize);
    warp.rendezvous_count = warp.rendezvous_number = 0;
  }
  for (unsigned t = 0; t < grid.threads; ++t) block.threads[t].fiber = nullptr;
}

void dismiss(Block& block) {
  const Unseen unseen;
  if (under_sanitizer())
    for (SharedVariable& variable : block.shared) free(variable.memory);
  block.shared.clear();
  if (block.syncs) delete[] block.syncs->relays;
  delete block.syncs;
  block.syncs = nullptr;
}

// After an error: what has started will not be finished.
void abandon(Block& block) {
  for (unsigned t = 0; t < state.grid->threads; ++t) {
    const Thread& thread = block.threads[t];
    if (!(thread.warp->live & bit(thread.lane)) || !thread.fiber) continue;
    if (Fiber** kept = kept_fiber(thread)) *kept = nullptr;
    fibers.give_back_unfinished(thread.fiber);
  }
  dismiss(block);
}

Block* new_block(int slot) {
  Block* block = new Block;
  block->shared_memory = shared_arena + size_t(slot) * kSharedOfBlock;
  for (unsigned t = 0; t < kMaxThreads; ++t) {
    Thread& thread = block->threads[t];
    thread.block = block;
    thread.warp = &block->warps[t / kWarpSize];
    thread.index = t;
    thread.lane = t % kWarpSize;
  }
  return block;
}

void report_deadlock(const Thread& thread) {
  for (unsigned i = 0; i < thread.warp->rendezvous_count; ++i) {
    const Rendezvous& r = thread.warp->rendezvous[i];
    if (r.arrived & bit(thread.lane))
      return report(thread, "deadlock: waits in %s at %s for lanes %08x", kNames[int(r.collective)],
                    text_of(r.where).text, r.mask & ~r.arrived);
  }
  report(thread, "deadlock: waits in __syncthreads() at %s for %u threads", text_of(thread.block->barrier_at).text,
         thread.block->live - thread.block->arrived);
}

void report_deadlock() {
  const Block& block = *state.blocks[0];
  for (unsigned t = 0; t < state.grid->threads; ++t)
    if (block.warps[t / kWarpSize].live & bit(t % kWarpSize)) return report_deadlock(block.threads[t]);
}

// The index of the n-th block to run.
unsigned block_at(unsigned n, const std::vector<unsigned>& shuffled) {
  switch (state.schedule) {
    case Schedule::ascending: return n;
    case Schedule::descending: return state.grid->blocks - 1 - n;
    default: return shuffled[n];
  }
}

}  // namespace

std::string run(Grid& grid) {
  const Unseen unseen;
  if (!shared_arena) shared_arena = static_cast<char*>(map_pages(kMaxResidentBlocks * kSharedOfBlock));
  state.grid = &grid;
  gridDim.x = grid.blocks;
  blockDim.x = grid.threads;
  state.schedule = settings.schedule;
  state.random = Random(settings.seed);
  state.error[0] = 0;
  state.host.tsan_fiber = under_tsan() ? __tsan_get_current_fiber() : nullptr;

  std::vector<unsigned> shuffled;
  int at_once = 1;
  if (state.schedule == Schedule::random) {
    at_once = std::clamp(settings.resident_blocks, 1, kMaxResidentBlocks);
    shuffled.resize(grid.blocks);
    for (unsigned i = 0; i < grid.blocks; ++i) {
      const unsigned j = state.random.below(i + 1);
      shuffled[i] = shuffled[j];
      shuffled[j] = i;
    }
  }
  // Blocks that are resident come first in state.blocks.
  state.resident = 0;
  unsigned admitted = 0;
  while (!state.error[0]) {
    for (int i = 0; i < state.resident;) {
      if (state.blocks[i]->live) {
        ++i;
        continue;
      }
      dismiss(*state.blocks[i]);
      std::swap(state.blocks[i], state.blocks[--state.resident]);
    }
    for (; state.resident < at_once && admitted < grid.blocks; ++admitted) {
      Block*& block = state.blocks[state.resident];
      if (!block) block = new_block(state.resident);
      admit(*block, block_at(admitted, shuffled));
      ++state.resident;
    }
    if (!state.resident) break;
    if (Thread* next = next_ready())
      switch_context(state.host, context_of(*next));
    else
      report_deadlock();
  }
  for (int i = 0; i < state.resident; ++i) abandon(*state.blocks[i]);  // there are some after an error alone
  state.resident = 0;
  state.current = nullptr;
  state.grid = nullptr;
  return state.error;
}

bool is_shared_memory(const void* address) {
  return address >= shared_arena && address < shared_arena + kMaxResidentBlocks * kSharedOfBlock;
}

bool is_built_in_variable(const void* address) {
  for (const void* variable : {static_cast<const void*>(&threadIdx), static_cast<const void*>(&blockIdx),
                               static_cast<const void*>(&blockDim), static_cast<const void*>(&gridDim)})
    if (address == variable) return true;
  return false;
}

// ---- what kernels call

namespace {

[[noreturn]] EMULATOR_COLD void fail_at_barrier(const Block& block, Location where) {
  if (block.live != state.grid->threads)
    fail("__syncthreads() at %s after other threads of the block have exited", text_of(where).text);
  fail("__syncthreads() at %s while others wait at %s", text_of(where).text, text_of(block.barrier_at).text);
}

}  // namespace

int block_barrier(bool predicate, Location where) {
  Thread& self = *state.current;
  Block& block = *self.block;
  if (block.arrived == 0) {
    block.barrier_at = where;
    block.predicates[block.generation % 2] = 0;
  }
  if (block.live != state.grid->threads || !same_place(where, block.barrier_at)) [[unlikely]]
    fail_at_barrier(block, where);
  const unsigned parity = block.generation % 2;
  block.predicates[parity] += predicate;
  if (block.syncs) release(&block.syncs->barrier[parity]);
  if (++block.arrived == block.live) {
    block.arrived = 0;
    ++block.generation;
    for (unsigned w = 0; w < block.warp_count; ++w) set_ready(block, w, block.warps[w].live);
  } else {
    set_waiting(self);
  }
  run_others(self);
  if (block.syncs) acquire(&block.syncs->barrier[parity]);
  return block.predicates[parity];
}

namespace {

[[noreturn]] EMULATOR_COLD void fail_to_meet(Collective collective, uint32_t mask, unsigned source, Location where) {
  const Thread& thread = *state.current;
  const char* name = kNames[int(collective)];
  const Text at = text_of(where);
  if (!(mask & bit(thread.lane))) fail("%s at %s: the mask %08x lacks the calling lane", name, at.text, mask);
  if (mask & ~thread.warp->live)
    fail("%s at %s: lanes %08x of the mask have exited or do not exist", name, at.text, mask & ~thread.warp->live);
  fail("%s at %s reads lane %u, which is not in the mask %08x", name, at.text, source, mask);
}

[[noreturn]] EMULATOR_COLD void fail_to_meet(Collective collective, Location where, const Rendezvous& r) {
  fail("%s at %s while other lanes wait in %s at %s", kNames[int(collective)], text_of(where).text,
       kNames[int(r.collective)], text_of(r.where).text);
}

Rendezvous& new_rendezvous(Warp& warp, uint32_t mask, Collective collective, Location where) {
  Rendezvous& r = warp.rendezvous[warp.rendezvous_count++];
  r.mask = mask;
  r.arrived = r.ballot = 0;
  r.collective = collective;
  r.where = where;
  r.number = warp.rendezvous_number++;
  return r;
}

// Waits for all lanes in `mask`; the last to come works out everybody's result. Returns the rendezvous' number.
template <Collective kCollective>
EMULATOR_HOT unsigned meet(Thread& thread, uint32_t mask, uint64_t value, unsigned source, Location where) {
  Warp& warp = *thread.warp;
  const uint32_t self = bit(thread.lane);
  if (!(mask & self) || (mask & ~warp.live) || !(mask & bit(source))) [[unlikely]]
    fail_to_meet(kCollective, mask, source, where);

  unsigned i = 0;
  while (i < warp.rendezvous_count && warp.rendezvous[i].mask != mask) ++i;
  Rendezvous& r = i < warp.rendezvous_count ? warp.rendezvous[i] : new_rendezvous(warp, mask, kCollective, where);
  if (r.collective != kCollective || !same_place(where, r.where)) [[unlikely]]
    fail_to_meet(kCollective, where, r);
  const unsigned number = r.number;
  r.arrived |= self;
  if (kCollective == Collective::ballot) r.ballot |= uint32_t(value) << thread.lane;
  if (kCollective == Collective::shuffle) {
    warp.value[thread.lane] = value;
    warp.source[thread.lane] = uint8_t(source);
  }
  if (kCollective == Collective::barrier && thread.block->syncs)
    release(&thread.block->syncs->warp[warp_index(thread)][number % kSyncs]);
  if (r.arrived != mask) {
    set_waiting(thread);
  } else {
    if (kCollective != Collective::barrier)
      for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        const int lane = std::countr_zero(lanes);
        warp.result[lane] = kCollective == Collective::ballot ? r.ballot : warp.value[warp.source[lane]];
      }
    if (&r != &warp.rendezvous[--warp.rendezvous_count]) r = warp.rendezvous[warp.rendezvous_count];
    set_ready(*thread.block, warp_index(thread), mask);
  }
  run_others(thread);
  return number;
}

}  // namespace

void warp_barrier(uint32_t mask, Location where) {
  Thread& self = *state.current;
  const unsigned number = meet<Collective::barrier>(self, mask, 0, self.lane, where);
  if (self.block->syncs) acquire(&self.block->syncs->warp[warp_index(self)][number % kSyncs]);
}

uint32_t warp_ballot(uint32_t mask, bool predicate, Location where) {
  Thread& self = *state.current;
  meet<Collective::ballot>(self, mask, predicate, self.lane, where);
  return uint32_t(self.warp->result[self.lane]);
}

uint64_t warp_shuffle(uint32_t mask, uint64_t value, unsigned source_lane, Location where) {
  Thread& self = *state.current;
  meet<Collective::shuffle>(self, mask, value, source_lane, where);
  return self.warp->result[self.lane];
}

void fence(Scope scope) {
  if (scope == Scope::system) {
    const Unseen unseen;
    seal_mapped_memory();
  }
  if (BlockSyncs* syncs = state.current->block->syncs) {
    for (int s = 0; s <= (scope == Scope::block ? 0 : 1); ++s) {
      acquire(&syncs->noted[s]);
      release(&syncs->published[s]);
    }
  }
  perhaps_run_others();
}

namespace {

// Relaxed, as CUDA's are: alone it orders nothing.
void order_atomic(const void* address) {
  BlockSyncs* syncs = state.current->block->syncs;
  if (!syncs) return;
  if (!syncs->relays) {
    const Unseen unseen;
    syncs->relays = new Clock[2];
  }
  const void* places[2] = {&syncs->block_atomics, address};
  for (int scope = 0; scope < 2; ++scope)
    syncs->relays[scope].act([&] {
      acquire(places[scope]);
      release(&syncs->noted[scope]);
      acquire(&syncs->published[scope]);
      release(places[scope]);
    });
}

template <class T>
T apply(Atomic operation, T old, T operand, T compare) {
  switch (operation) {
    case Atomic::add: return old + operand;
    case Atomic::exchange: return operand;
    case Atomic::minimum: return std::min(old, operand);
    case Atomic::maximum: return std::max(old, operand);
    case Atomic::bit_and: return old & operand;
    case Atomic::bit_or: return old | operand;
    default: return old == compare ? operand : old;
  }
}

}  // namespace

template <class T>
T atomic(T* address, Atomic operation, T operand, T compare) {
  perhaps_run_others();
  if (traffic_access) {
    traffic_access(address, sizeof(T), false);
    traffic_access(address, sizeof(T), true);
  }
  order_atomic(address);
  const T old = *address;
  *address = apply(operation, old, operand, compare);
  return old;
}
void store_system(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }

template int atomic(int*, Atomic, int, int);
template unsigned atomic(unsigned*, Atomic, unsigned, unsigned);
template unsigned long long atomic(unsigned long long*, Atomic, unsigned long long, unsigned long long);

void* shared_variable(const void* tag, size_t size) {
  Block& block = *state.current->block;
  for (const SharedVariable& variable : block.shared)
    if (variable.tag == tag) return variable.memory;
  if (tag) {
    block.static_shared += size;
    if (block.static_shared > kMaxStaticShared)
      fail("%zu bytes of static shared memory, at most %zu", block.static_shared, kMaxStaticShared);
  }
  const Unseen unseen;
  char* memory = allocate_shared(block, size);
  memset(memory, 0xff, size);  // NaN, or -1
  block.shared.push_back({tag, memory});
  return memory;
}

void* dynamic_shared_memory() { return shared_variable(nullptr, state.grid->dynamic_shared); }

}  // namespace cuda_emulator
