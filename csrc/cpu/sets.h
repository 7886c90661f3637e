// The loops of cpu/ are compiled once per instruction set, each in the namespace fastbert::cpu::<set>, and the best set
// that the processor has is chosen when the library is loaded. CMakeLists.txt gives each copy its flags and FB_SET.
#pragma once

#include <stdlib.h>
#include <string.h>

namespace fastbert::cpu {

enum class Set { none, generic, avx2, avx512, avx512_bf16 };

#ifdef __x86_64__

#define FB_FOR_EACH_SET(...) \
  namespace avx2 {           \
  __VA_ARGS__                \
  }                          \
  namespace avx512 {         \
  __VA_ARGS__                \
  }                          \
  namespace avx512_bf16 {    \
  __VA_ARGS__                \
  }

// f of the chosen set, or nullptr where the processor has none of them.
#define FB_BEST_SET(f)                                                                           \
  (fastbert::cpu::best_set() == fastbert::cpu::Set::avx512_bf16 ? &fastbert::cpu::avx512_bf16::f \
   : fastbert::cpu::best_set() == fastbert::cpu::Set::avx512    ? &fastbert::cpu::avx512::f      \
   : fastbert::cpu::best_set() == fastbert::cpu::Set::avx2      ? &fastbert::cpu::avx2::f        \
                                                                : nullptr)

// At most what ATEN_CPU_CAPABILITY says, as for torch's own kernels.
inline Set best_set() {
  static const Set set = [] {
    const char* const wish = getenv("ATEN_CPU_CAPABILITY");
    if (wish && !strcmp(wish, "default")) return Set::none;
    // F16C is older than AVX2: every processor with AVX2 has it, and not every compiler can ask for it.
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Set::none;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx512 || (wish && !strcmp(wish, "avx2"))) return Set::avx2;
    return __builtin_cpu_supports("avx512bf16") ? Set::avx512_bf16 : Set::avx512;
  }();
  return set;
}

#else

#define FB_FOR_EACH_SET(...) \
  namespace generic {        \
  __VA_ARGS__                \
  }
#define FB_BEST_SET(f) (&fastbert::cpu::generic::f)

inline Set best_set() { return Set::generic; }

#endif

}  // namespace fastbert::cpu
