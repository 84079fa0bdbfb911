#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "engine.h"
#include "sanitizers.h"

#if !defined(__x86_64__)
#error "The emulator switches stacks in x86-64 assembly."
#endif

// Saves what the ABI lets a function rely on across a call, changes the stack, restores. All callers are
// alike, so that the processor, which takes every `ret` for one to the last `call`, is right about this one.
asm(R"(
  .pushsection .text
  .hidden cuda_emulator_switch
  .globl cuda_emulator_switch
  .type cuda_emulator_switch, @function
cuda_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size cuda_emulator_switch, .-cuda_emulator_switch
  .popsection
)");

namespace cuda_emulator {

FiberPool fibers;

namespace {

constexpr size_t kStackSize = 64 << 10, kSanitizedStackSize = 256 << 10;
constexpr int kSavedRegisters = 6;

const Context* switched_from;  // until the other side has told ASan

void leave(Context& from, Context& to, bool for_good) {
  switched_from = &from;
  if (under_asan())
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.stack_bottom, to.stack_size);
  if (under_tsan()) __tsan_switch_to_fiber(to.tsan_fiber, 1);
  cuda_emulator_switch(&from.stack_pointer, to.stack_pointer);
}

void arrive(void* fake_stack) {
  if (!under_asan()) return;
  Context& from = const_cast<Context&>(*switched_from);
  __sanitizer_finish_switch_fiber(fake_stack, &from.stack_bottom, &from.stack_size);
}

}  // namespace

void switch_context_sanitized(Context& from, Context& to) {
  leave(from, to, false);
  arrive(from.fake_stack);
}

void switch_context_for_good(Context& from, Context& to) {
  leave(from, to, true);
  abort();
}

void entered_new_stack() { arrive(nullptr); }

Fiber* FiberPool::create() {
  const Unseen unseen;
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const size_t slots = kMaxResidentBlocks * kMaxThreads + 1;
  if (!arena_) {
    stack_size_ = under_sanitizer() ? kSanitizedStackSize : kStackSize;
    arena_size_ = slots * stack_size_;
    void* memory = mmap(nullptr, arena_size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      perror("emulator: cannot reserve stacks");
      abort();
    }
    arena_ = static_cast<char*>(memory);
  }
  if (size_t(created_) == slots) {
    fprintf(stderr, "emulator: out of stacks: too many streams\n");
    abort();
  }
  // The lowest page stays out of bounds: a stack that overflows faults.
  char* slot = arena_ + size_t(created_++) * stack_size_;
  if (mprotect(slot + page, stack_size_ - page, PROT_READ | PROT_WRITE) != 0) {
    perror("emulator: cannot allocate a stack");
    abort();
  }
  Fiber* fiber = new Fiber;
  fiber->stack_bottom = slot + page;
  fiber->stack_size = stack_size_ - page;
  return fiber;
}

// For another CUDA thread, which must be another one to TSan too: with a clock of its own, on a stack with no past.
void FiberPool::renew(Fiber* fiber) {
  const Unseen unseen;
  if (fiber->tsan_fiber) __tsan_destroy_fiber(fiber->tsan_fiber);
  fiber->tsan_fiber = new_tsan_fiber();
  void* bottom = const_cast<void*>(fiber->stack_bottom);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(bottom, fiber->stack_size, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
    perror("emulator: cannot renew a stack");
    abort();
  }
}

Fiber* FiberPool::take(void (*entry)()) {
  Fiber* fiber = free_;
  if (fiber)
    free_ = fiber->next_free;
  else
    fiber = create();
  if (under_tsan()) renew(fiber);
  restart(fiber, entry);
  return fiber;
}

void FiberPool::restart(Fiber* fiber, void (*entry)()) {
  // Stacks begin at different offsets in their pages: at the same one, all would compete for a few cache lines.
  char* bottom = static_cast<char*>(const_cast<void*>(fiber->stack_bottom));
  const size_t colour = size_t(bottom - arena_) / stack_size_ % 32 * 128;
  void** top = reinterpret_cast<void**>(bottom + fiber->stack_size - colour - 64);
  *--top = nullptr;  // where `entry` would return to
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  fiber->stack_pointer = top;
}

void FiberPool::give_back(Fiber* fiber) {
  fiber->next_free = free_;
  free_ = fiber;
}

void FiberPool::give_back_unfinished(Fiber* fiber) {
  if (under_asan()) __asan_unpoison_memory_region(fiber->stack_bottom, fiber->stack_size);
  give_back(fiber);
}

}  // namespace cuda_emulator
