// The files of cpu/loops/ are compiled once per instruction set (ISA), each time into the namespace
// fastbert::cpu::<isa>; at run time, the copy for the best set that the processor has is called. CMakeLists.txt gives
// each copy its flags and FB_ISA.
#pragma once

#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastbert::cpu {

// From the worst to the best.
enum class Isa { none, generic, avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx };

constexpr const char* kIsaNames[] = {nullptr,  "generic",     "avx2",        "avx2_vnni",
                                     "avx512", "avx512_vnni", "avx512_bf16", "amx"};
constexpr const char* name_of(Isa isa) { return kIsaNames[int(isa)]; }

#ifdef __x86_64__

#define FB_IN_ISA(isa, ...) \
  namespace isa {           \
  __VA_ARGS__               \
  }

#define FB_FOR_EACH_ISA(...)     \
  FB_IN_ISA(avx2, __VA_ARGS__)   \
  FB_IN_ISA(avx512, __VA_ARGS__) \
  FB_IN_ISA(avx512_bf16, __VA_ARGS__)

// Loops with products that tiles (AMX) can compute have one more copy; those with int8 products two more, for VNNI.
#define FB_FOR_EACH_ISA_AND_TILES(...) \
  FB_FOR_EACH_ISA(__VA_ARGS__)         \
  FB_IN_ISA(amx, __VA_ARGS__)
#define FB_FOR_EACH_ISA_TILES_AND_VNNI(...) \
  FB_FOR_EACH_ISA_AND_TILES(__VA_ARGS__)    \
  FB_IN_ISA(avx2_vnni, __VA_ARGS__)         \
  FB_IN_ISA(avx512_vnni, __VA_ARGS__)

// Where a set has no copy of a function, that of the set which it extends is used.
FB_FOR_EACH_ISA()
FB_IN_ISA(avx2_vnni, using namespace avx2;)
FB_IN_ISA(avx512_vnni, using namespace avx512;)
FB_IN_ISA(amx, using namespace avx512_bf16;)

// f of the best instruction set, or nullptr on a processor without AVX2.
#define FB_BEST_ISA(f)                                                                             \
  (fastbert::cpu::best_isa() == fastbert::cpu::Isa::amx           ? &fastbert::cpu::amx::f         \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx512_bf16 ? &fastbert::cpu::avx512_bf16::f \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx512_vnni ? &fastbert::cpu::avx512_vnni::f \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx512      ? &fastbert::cpu::avx512::f      \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx2_vnni   ? &fastbert::cpu::avx2_vnni::f   \
   : fastbert::cpu::best_isa() == fastbert::cpu::Isa::avx2        ? &fastbert::cpu::avx2::f        \
                                                                  : nullptr)

// Asks the Linux kernel to let this process, and those that it forks, use tiles, and returns whether it does. It
// refuses on a processor without tiles. So far, every processor with tiles multiplies both bf16 and int8 in them.
inline bool has_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// By cpuid, as not every compiler knows the name of AVX-VNNI. (F16C needs no check: every processor with AVX2 has it.)
inline bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 4 & 1;
}

inline bool processor_has(Isa isa) {
#ifdef FB_AVX512_ON_CPU  // compiled for AVX2, for tests
  if (isa >= Isa::avx512 && isa <= Isa::avx512_bf16) return true;
#endif
  switch (isa) {
    case Isa::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::avx2_vnni: return processor_has(Isa::avx2) && has_avx_vnni();
    case Isa::avx512:
      return processor_has(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::avx512_vnni: return processor_has(Isa::avx512) && __builtin_cpu_supports("avx512vnni");
    case Isa::avx512_bf16: return processor_has(Isa::avx512_vnni) && __builtin_cpu_supports("avx512bf16");
    case Isa::amx: return processor_has(Isa::avx512_bf16) && has_tiles();
    default: return false;
  }
}

// The best set that ATEN_CPU_CAPABILITY allows, which torch's own kernels obey too: "avx512" means no tiles, "avx2" no
// more than vectors of 32 bytes, "default" no set at all. If FASTBERT_CPU_SET names a set, only that one may be used.
inline Isa best_isa() {
  static const Isa isa = [] {
    const auto is = [](const char* value, const char* word) { return value && !strcmp(value, word); };
    const char *const limit = getenv("ATEN_CPU_CAPABILITY"), *const named = getenv("FASTBERT_CPU_SET");
    const Isa last = is(limit, "default")  ? Isa::none
                     : is(limit, "avx2")   ? Isa::avx2_vnni
                     : is(limit, "avx512") ? Isa::avx512_bf16
                                           : Isa::amx;
    const bool any = !named || !*named;
    Isa best = Isa::none;
    for (int set = int(Isa::avx2); set <= int(last); ++set)
      if ((any || is(named, kIsaNames[set])) && processor_has(Isa(set))) best = Isa(set);
    return best;
  }();
  return isa;
}

#else

#define FB_FOR_EACH_ISA(...) \
  namespace generic {        \
  __VA_ARGS__                \
  }
#define FB_FOR_EACH_ISA_AND_TILES FB_FOR_EACH_ISA
#define FB_FOR_EACH_ISA_TILES_AND_VNNI FB_FOR_EACH_ISA
#define FB_BEST_ISA(f) (&fastbert::cpu::generic::f)

inline Isa best_isa() { return Isa::generic; }

#endif

}  // namespace fastbert::cpu
