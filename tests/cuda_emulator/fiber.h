// Stacks, and the switch from one to another.
#pragma once
#include <cstddef>

#include "sanitizers.h"

extern "C" void cuda_emulator_switch(void** save_stack_pointer, void* load_stack_pointer);

namespace cuda_emulator {

// Something that runs: the host thread that launches, or a fiber.
struct Context {
  void* stack_pointer = nullptr;  // while it does not run
  // For the sanitizers.
  const void* stack_bottom = nullptr;
  size_t stack_size = 0;
  void* fake_stack = nullptr;
  void* tsan_fiber = nullptr;
};

void switch_context_sanitized(Context& from, Context& to);
// Returns when something switches back.
inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
  if (under_sanitizer()) [[unlikely]]
    switch_context_sanitized(from, to);
  else
    cuda_emulator_switch(&from.stack_pointer, to.stack_pointer);
}
[[noreturn]] void switch_context_for_good(Context& from, Context& to);
// The first thing to be done on a new stack.
void entered_new_stack();

struct Fiber : Context {
  Fiber* next_free = nullptr;
};

// Fibers that will call `entry`, which must not return. Stacks are kept and used again, the last one first: it is in
// the cache.
class FiberPool {
 public:
  Fiber* take(void (*entry)());
  void restart(Fiber* fiber, void (*entry)());  // it has switched for good
  void give_back(Fiber* fiber);                 // it has switched, or is about to switch, for good
  void give_back_unfinished(Fiber* fiber);      // it will not be switched to again
  bool is_on_a_stack(const void* address) const {
    return address >= arena_ && address < arena_ + arena_size_;
  }

 private:
  Fiber* create();
  void renew(Fiber* fiber);

  char* arena_ = nullptr;
  size_t arena_size_ = 0, stack_size_ = 0;
  int created_ = 0;
  Fiber* free_ = nullptr;
};

extern FiberPool fibers;

}  // namespace cuda_emulator
