// The checker of the kernels' memory accesses, and the shared memory that it checks.
//
// Kernels are compiled with -fsanitize=thread, so that the compiler calls a function before every load and store. In
// ordinary tests checker.cpp defines these functions. ThreadSanitizer has its own; other sanitizers call none.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#ifdef FB_THREAD_SANITIZER
extern "C" {
void __tsan_read_range(void* address, size_t bytes);
void __tsan_write_range(void* address, size_t bytes);
}
#endif

namespace cuda_on_cpu {

// Static arrays of shared memory are at the start of the arena, with gaps between them; dynamic shared memory is at
// kDynamic. A kernel may touch nothing else in it.
constexpr size_t kStaticLimit = 48 << 10, kSharedLimit = 227 << 10;
constexpr size_t kDynamic = 128 << 10, kArena = kDynamic + kSharedLimit + 1024;
extern char arena[kArena];

constexpr int kNobody = -1;
extern constinit thread_local int running [[gnu::tls_model("initial-exec")]];  // running thread's number in its block

// ---- functions of the scheduler that the checker calls

[[noreturn]] void fail(const std::string& what, const void* where = nullptr);  // where: a return address
constexpr int64_t kSameBlock = -1;  // the message has already named the block
std::string thread_name(int number, int64_t block = kSameBlock);
std::string shared_name(size_t offset);
std::string source_line(const void* where);

// Functions of the checker that the scheduler calls. `where`: the return address of what the kernel called.
namespace checker {

#ifdef FB_CHECKER

void allow_overlap(bool allowed);
void start_launch(const void* stacks, size_t stacks_bytes, int threads);
void start_block(int64_t number);
void declare(size_t offset, size_t bytes);
void sync_threads();
void sync_warp(int warp, unsigned mask);
void thread_fence();
void read(const void* address, size_t bytes, const void* where);
void atomic(void* address, size_t bytes, const void* where);
void copy_issued(void* shared, size_t bytes, const void* where);  // no access is allowed before it arrives
void copy_arrives(void* shared, size_t bytes);

#else

inline void allow_overlap(bool) {}
inline void declare([[maybe_unused]] size_t offset, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(arena + offset, bytes);
#endif
}
inline void start_launch(const void*, size_t, int) {
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(arena, kArena);
#endif
}
inline void start_block(int64_t) {}
inline void sync_threads() {}
inline void sync_warp(int, unsigned) {}
inline void thread_fence() {}
inline void atomic(void*, size_t, const void*) {}

inline void read([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes, const void*) {
#ifdef FB_THREAD_SANITIZER
  __tsan_read_range(const_cast<void*>(address), bytes);
#endif
}
inline void write([[maybe_unused]] void* address, [[maybe_unused]] size_t bytes) {
#ifdef FB_THREAD_SANITIZER
  __tsan_write_range(address, bytes);
#endif
}
inline void copy_issued(void* shared, size_t bytes, const void*) { write(shared, bytes); }
inline void copy_arrives(void* shared, size_t bytes) { write(shared, bytes); }

#endif

}  // namespace checker

}  // namespace cuda_on_cpu
