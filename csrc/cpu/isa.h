// The files of cpu/loops/ are compiled once per instruction set (ISA), each time into the namespace
// fastbert::cpu::<isa>; at run time the best one that the processor has is called. CMakeLists.txt gives each copy its
// flags and FB_ISA.
#pragma once

#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastbert::cpu {

enum class Isa { none, generic, avx2, avx512, avx512_bf16, amx };

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

// Of loops with products that tiles (AMX) can take: a copy more. With tiles, what has none of its own is avx512_bf16's.
#define FB_FOR_EACH_ISA_AND_TILES(...) \
  FB_FOR_EACH_ISA(__VA_ARGS__)         \
  namespace amx {                      \
  __VA_ARGS__                          \
  }
namespace avx512_bf16 {}
namespace amx {
using namespace avx512_bf16;
}

// f of the best instruction set, or nullptr on a processor without AVX2.
#define FB_BEST_ISA(f)                                                                             \
  (fastbert::cpu::best_isa() == fastbert::cpu::Isa::amx           ? &fastbert::cpu::amx::f         \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx512_bf16 ? &fastbert::cpu::avx512_bf16::f \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx512      ? &fastbert::cpu::avx512::f      \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx2        ? &fastbert::cpu::avx2::f        \
                                                                  : nullptr)

// Whether the kernel lets this process, and those it forks, use tiles, which it has to be asked for; it has none to
// give on a processor without them. Every processor with tiles so far multiplies bf16 and int8 in them.
inline bool has_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// No better than ATEN_CPU_CAPABILITY allows: torch's own kernels obey it too. "avx512" is without tiles.
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
    if (!bf16) return Isa::avx512;
    return !(wish && !strcmp(wish, "avx512")) && has_tiles() ? Isa::amx : Isa::avx512_bf16;
  }();
  return isa;
}

#else

#define FB_FOR_EACH_ISA(...) \
  namespace generic {        \
  __VA_ARGS__                \
  }
#define FB_FOR_EACH_ISA_AND_TILES FB_FOR_EACH_ISA
#define FB_BEST_ISA(f) (&fastbert::cpu::generic::f)

inline Isa best_isa() { return Isa::generic; }

#endif

}  // namespace fastbert::cpu
