// Fibers: stacks to switch between, and what sanitizers must be told about switches. Only the scheduler includes this.
//
// On x86-64 a switch is a dozen instructions; elsewhere it is ucontext's, with two system calls.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef FB_THREAD_SANITIZER  // for the kernels: the scheduler itself is not instrumented
#include <sanitizer/tsan_interface.h>
#endif

#ifdef __x86_64__
// Saves the callee-saved registers on this stack and the stack pointer in *from, and continues on the stack `to`.
asm(R"(
.text
.p2align 4
fb_swap_stacks:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
extern "C" [[gnu::visibility("hidden")]] void fb_swap_stacks(void** from, void* to);
#else
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

constexpr size_t kStackBytes = 256 << 10, kPage = 4096;

// A stack for each of `count` fibers, with a guard page below. Memory is used only where a stack is touched.
inline char* new_stacks(size_t count) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const stacks = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (stacks == MAP_FAILED) throw std::bad_alloc();
  for (size_t i = 0; i < count; ++i) mprotect(static_cast<char*>(stacks) + i * kStackBytes, kPage, PROT_NONE);
  return static_cast<char*>(stacks);
}

class Fiber {
 public:
  // The next switch to this fiber calls entry, which never returns. Whatever ran in it before is abandoned.
  void start(char* stack, size_t number, void (*entry)()) {
    bottom_ = stack, size_ = kStackBytes;
    // With all tops at the same offset, stacks would compete for the same sets of the cache.
    char* const top = stack + kStackBytes - number % 32 * 128;
#ifdef __x86_64__
    void** words = reinterpret_cast<void**>(top);
    *--words = nullptr;  // at entry the stack is 8 bytes off a multiple of 16
    *--words = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--words = nullptr;
    stack_pointer_ = words;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = size_t(top - stack);
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack + kPage, kStackBytes - kPage);
    fake_stack_ = nullptr;
#endif
#ifdef FB_THREAD_SANITIZER
    if (!tsan_) tsan_ = __tsan_create_fiber(0);
#endif
  }

  // Makes this fiber stand for the host thread that calls it.
  void start_here() {
#ifdef FB_THREAD_SANITIZER
    tsan_ = __tsan_get_current_fiber();
#endif
  }

  void switch_to(Fiber& other) {
    left_ = this;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&fake_stack_, other.bottom_, other.size_);
#endif
#ifdef FB_THREAD_SANITIZER
    __tsan_switch_to_fiber(other.tsan_, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef __x86_64__
    fb_swap_stacks(&stack_pointer_, other.stack_pointer_);
#else
    swapcontext(&context_, &other.context_);
#endif
    arrived();
  }

  // entry must call this first.
  void arrived() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack_, &left_->bottom_, &left_->size_);
#endif
  }

 private:
#ifdef __x86_64__
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] void* tsan_ = nullptr;
  static inline Fiber* left_ = nullptr;
};

}  // namespace cuda_on_cpu
