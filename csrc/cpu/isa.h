// The files of cpu/loops/ are compiled once per instruction set (ISA), each time into the namespace
// fastbert::cpu::<isa>; at run time the best one that the processor has is called. CMakeLists.txt gives each copy its
// flags and FB_ISA.
#pragma once

#include <stdlib.h>
#include <string.h>

namespace fastbert::cpu {

enum class Isa { none, generic, avx2, avx512, avx512_bf16 };

#ifdef __x86_64__

#define FB_FOR_EACH_ISA(...) \
  namespace avx2 {           \
  __VA_ARGS__                \
  }                          \
  namespace avx512 {         \
  __VA_ARGS__                \
  }                          \
  namespace avx512_bf16 {    \
  __VA_ARGS__                \
  }

// f of the best instruction set, or nullptr on a processor without AVX2.
#define FB_BEST_ISA(f)                                                                           \
  (fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx512_bf16 ? &fastbert::cpu::avx512_bf16::f \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx512    ? &fastbert::cpu::avx512::f      \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx2      ? &fastbert::cpu::avx2::f        \
                                                                : nullptr)

// No better than ATEN_CPU_CAPABILITY allows: torch's own kernels obey it too.
inline Isa best_isa() {
  static const Isa isa = [] {
    const char* const wish = getenv("ATEN_CPU_CAPABILITY");
    if (wish && !strcmp(wish, "default")) return Isa::none;
    // F16C is older than AVX2: every processor with AVX2 has it, and not every compiler can ask for it.
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::none;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx512 || (wish && !strcmp(wish, "avx2"))) return Isa::avx2;
    const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    return bf16 ? Isa::avx512_bf16 : Isa::avx512;
  }();
  return isa;
}

#else

#define FB_FOR_EACH_ISA(...) \
  namespace generic {        \
  __VA_ARGS__                \
  }
#define FB_BEST_ISA(f) (&fastbert::cpu::generic::f)

inline Isa best_isa() { return Isa::generic; }

#endif

}  // namespace fastbert::cpu
