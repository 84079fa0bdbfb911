// The engine's view of ThreadSanitizer and AddressSanitizer.
//
// The engine itself is never instrumented, so that they see the kernels' accesses and not the engine's. It finds out
// at link time which of them is there: their functions are weak references.
#pragma once
#include <cstddef>
#include <mutex>

#if defined(__SANITIZE_THREAD__)
#error "Compile the emulator's own sources without -fsanitize=thread; link with it."
#endif

extern "C" {
#define EMULATOR_WEAK __attribute__((weak))
void* __tsan_create_fiber(unsigned flags) EMULATOR_WEAK;
void __tsan_destroy_fiber(void* fiber) EMULATOR_WEAK;
void __tsan_switch_to_fiber(void* fiber, unsigned flags) EMULATOR_WEAK;
void* __tsan_get_current_fiber() EMULATOR_WEAK;
void __tsan_set_fiber_name(void* fiber, const char* name) EMULATOR_WEAK;
void __tsan_acquire(void* address) EMULATOR_WEAK;
void __tsan_release(void* address) EMULATOR_WEAK;
void AnnotateIgnoreReadsBegin(const char* file, int line) EMULATOR_WEAK;
void AnnotateIgnoreReadsEnd(const char* file, int line) EMULATOR_WEAK;
void AnnotateIgnoreWritesBegin(const char* file, int line) EMULATOR_WEAK;
void AnnotateIgnoreWritesEnd(const char* file, int line) EMULATOR_WEAK;
void AnnotateIgnoreSyncBegin(const char* file, int line) EMULATOR_WEAK;
void AnnotateIgnoreSyncEnd(const char* file, int line) EMULATOR_WEAK;
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size) EMULATOR_WEAK;
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_size) EMULATOR_WEAK;
void __asan_unpoison_memory_region(const volatile void* address, size_t size) EMULATOR_WEAK;
#undef EMULATOR_WEAK
}

namespace cuda_emulator {

inline bool under_tsan() { return __tsan_create_fiber != nullptr; }
inline bool under_asan() { return __sanitizer_start_switch_fiber != nullptr; }
inline bool under_sanitizer() { return under_tsan() || under_asan(); }

// Happens-before: what came before release(x) comes before what follows acquire(x).
inline void acquire(const void* address) {
  if (under_tsan()) __tsan_acquire(const_cast<void*>(address));
}
inline void release(const void* address) {
  if (under_tsan()) __tsan_release(const_cast<void*>(address));
}

// Hides malloc, memset and the like, which TSan intercepts even in code that is not instrumented.
class Unseen {
 public:
  Unseen() {
    if (!under_tsan()) return;
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    if (!under_tsan()) return;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  Unseen(const Unseen&) = delete;
};

// A lock that orders nothing in TSan's eyes: the engine's must not hide that the host's own are missing.
class QuietLock {
 public:
  explicit QuietLock(std::mutex& mutex) : mutex_(mutex) {
    quietly([this] { mutex_.lock(); });
  }
  ~QuietLock() {
    quietly([this] { mutex_.unlock(); });
  }
  QuietLock(const QuietLock&) = delete;

 private:
  template <class F>
  static void quietly(const F& f) {
    const Unseen unseen;
    if (under_tsan()) AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    f();
    if (under_tsan()) AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }

  std::mutex& mutex_;
};

// Makes a fiber of TSan's, which comes after nothing. (One comes after all that whoever makes it has seen: here that is
// the first to be made.)
inline void* new_tsan_fiber() {
  static void* const origin = __tsan_create_fiber(0);
  void* self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(origin, 1);
  void* fiber = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(self, 1);
  return fiber;
}

// A clock of TSan's that no code runs under: it carries happens-before from one address to another, or stands for
// whatever has none of its own, such as a stream.
class Clock {
 public:
  Clock() : fiber_(under_tsan() ? new_tsan_fiber() : nullptr) {}
  ~Clock() {
    if (fiber_) __tsan_destroy_fiber(fiber_);
  }
  Clock(const Clock&) = delete;
  template <class F>
  void act(const F& f) {
    if (!fiber_) return f();
    void* self = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber_, 1);
    f();
    __tsan_switch_to_fiber(self, 1);
  }

 private:
  void* fiber_;
};

}  // namespace cuda_emulator
