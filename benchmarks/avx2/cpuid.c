// For LD_PRELOAD: answers the ud2 that __main__.py has put in the place of each cpuid, as a processor without AVX-512,
// VNNI, AMX and what came with them would.

#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#define BIT(n) (1u << (n))

// Leaf 7 (Intel's manual, volume 2A, CPUID): foundation, DQ, IFMA, CD, BW, VL; VBMI, VBMI2, GFNI, VNNI, BITALG,
// VPOPCNTDQ; 4VNNIW, 4FMAPS, VP2INTERSECT, AMX-BF16, FP16, AMX-TILE, AMX-INT8.
static const unsigned kEbx = BIT(16) | BIT(17) | BIT(21) | BIT(28) | BIT(30) | BIT(31);
static const unsigned kEcx = BIT(1) | BIT(6) | BIT(8) | BIT(11) | BIT(12) | BIT(14);
static const unsigned kEdx = BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25);

static void answer(int number, siginfo_t* info, void* context) {
  greg_t* const registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  if (memcmp((const void*)registers[REG_RIP], "\x0f\x0b", 2)) {
    signal(number, SIG_DFL);  // the same instruction again, and the end
    return;
  }
  const unsigned leaf = registers[REG_RAX], part = registers[REG_RCX];
  unsigned eax, ebx, ecx, edx;
  __cpuid_count(leaf, part, eax, ebx, ecx, edx);
  if (leaf == 7 && part == 0) ebx &= ~kEbx, ecx &= ~kEcx, edx &= ~kEdx;
  if (leaf == 7 && part == 1)
    eax &= ~(BIT(4) | BIT(5) | BIT(23)), edx = 0;  // AVX-VNNI, BF16, AVX-IFMA; AVX10, VNNI of more types
  registers[REG_RAX] = eax, registers[REG_RBX] = ebx, registers[REG_RCX] = ecx, registers[REG_RDX] = edx;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void install(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, NULL);
}
