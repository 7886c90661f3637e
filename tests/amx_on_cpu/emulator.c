// Emulates AMX's instructions on a processor without them, loaded by LD_PRELOAD. Each instruction raises SIGILL there;
// the handler decodes it, executes it and continues. The library under test is exactly the one that users have.
//
// Linux would refuse the permission to use tiles, so syscall() grants it. Python's faulthandler would take over SIGILL,
// so sigaction() does not let it. An unknown instruction, and tiles that are not configured or whose shapes do not fit,
// end the process with a message. For tests, amx_dots, amx_loads and amx_configurations count instructions, and
// amx_awake counts the threads that have not released their tiles.
//
// The semantics are those of Intel's Software Developer's Manual, volume 2. bf16 products at even and at odd places are
// summed separately, and added to the tile at the end; numbers below 2^-126 are 0.
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { kTiles = 8, kRows = 16, kBytes = 64 };

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Configuration;

typedef union {
  uint8_t bytes[kBytes];
  uint32_t words[kBytes / 4];
  float floats[kBytes / 4];
} Row;

static __thread __attribute__((tls_model("initial-exec"))) Configuration now;
static __thread __attribute__((tls_model("initial-exec"))) Row tiles[kTiles][kRows];

long amx_dots, amx_loads, amx_configurations, amx_awake;

static void fail(const char* what, const uint8_t* at) {
  fprintf(stderr, "amx_on_cpu: %s:", what);
  for (int i = 0; i < 9; ++i) fprintf(stderr, " %02x", at[i]);
  fprintf(stderr, "\n");
  _exit(132);
}

// ---- one instruction

typedef struct {
  int prefix, opcode, reg, rm, third, length;  // prefix: 0 for none, 1 for 66, 2 for F3, 3 for F2
  int in_memory;
  uint8_t* address;  // of the first row
  int64_t apart;     // bytes from row to row
} Instruction;

static int64_t general(const greg_t* registers, int number) {
  static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return registers[order[number]];
}

// Decodes the instruction at `at`. Returns 0 if it is not one of AMX's.
static int read_instruction(const uint8_t* at, const greg_t* registers, Instruction* found) {
  if (at[0] != 0xc4 || (at[1] & 31) != 2 || at[2] & 0x84) return 0;  // VEX.128, map 0F38, W0
  const int high_reg = !(at[1] & 0x80), high_index = !(at[1] & 0x40), high_base = !(at[1] & 0x20);
  const int mod = at[4] >> 6, rm = at[4] & 7;
  *found = (Instruction){.prefix = at[2] & 3, .opcode = at[3], .third = ~(at[2] >> 3) & 15, .length = 5};
  found->reg = at[4] >> 3 & 7, found->rm = rm, found->in_memory = mod != 3;
  if (found->opcode != 0x49 && found->opcode != 0x4b && found->opcode != 0x5c && found->opcode != 0x5e) return 0;
  if (high_reg || (mod == 3 && high_base)) return 0;
  if (mod == 3) return 1;
  int64_t address = 0;
  int base = rm;
  if (rm == 4) {
    const int scale = at[5] >> 6, index = at[5] >> 3 & 7;
    base = at[5] & 7, found->length += 1;
    if (index != 4 || high_index) found->apart = general(registers, index + 8 * high_index) << scale;
  }
  const int wide = mod == 2 || (mod == 0 && base == 5);
  if (wide) {
    int32_t offset;
    memcpy(&offset, at + found->length, 4);
    address += offset, found->length += 4;
  } else if (mod == 1) {
    address += (int8_t)at[found->length], found->length += 1;
  }
  if (mod == 0 && base == 5) {
    if (rm == 5) address += (int64_t)(at + found->length);  // relative to the next instruction
  } else {
    address += general(registers, base + 8 * high_base);
  }
  found->address = (uint8_t*)address;
  return 1;
}

// ---- executing it

static void set_awake(int awake) {
  if (awake != (now.palette != 0)) __atomic_add_fetch(&amx_awake, awake ? 1 : -1, __ATOMIC_RELAXED);
}

static void configure(const uint8_t* from, const uint8_t* at) {
  Configuration next;
  memcpy(&next, from, sizeof next);
  if (next.palette > 1 || next.start_row) fail("a configuration that there is not", at);
  for (int i = 0; i < 14; ++i)
    if (next.reserved[i]) fail("reserved bytes", at);
  for (int i = 0; i < 16; ++i)
    if (next.rows[i] > kRows || next.row_bytes[i] > kBytes || next.row_bytes[i] % 4 || (i >= kTiles && (next.rows[i] || next.row_bytes[i])))
      fail("a tile that there cannot be", at);
  set_awake(next.palette != 0);
  now = next;
  memset(tiles, 0, sizeof tiles);
  __atomic_add_fetch(&amx_configurations, 1, __ATOMIC_RELAXED);
}

static void release(void) {
  set_awake(0);
  memset(&now, 0, sizeof now), memset(tiles, 0, sizeof tiles);
}

static float widened(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static void dot_bf16(const Row* left, const Row* right, Row* sums, int rows, int steps, int columns) {
  for (int row = 0; row < rows; ++row) {
    float even[16] = {0}, odd[16] = {0};
    for (int k = 0; k < steps; ++k) {
      const float first = widened(left[row].words[k] << 16), second = widened(left[row].words[k] & 0xffff0000u);
      for (int n = 0; n < columns; ++n) {
        even[n] = __builtin_fmaf(first, widened(right[k].words[n] << 16), even[n]);
        odd[n] = __builtin_fmaf(second, widened(right[k].words[n] & 0xffff0000u), odd[n]);
      }
    }
    for (int n = 0; n < columns; ++n) sums[row].floats[n] += even[n] + odd[n];
  }
}

// The bytes are unsigned, or signed where a bit of has_sign is set: 1 for the left, 2 for the right factor.
static void dot_int8(const Row* left, const Row* right, Row* sums, int rows, int steps, int columns, int has_sign) {
  for (int row = 0; row < rows; ++row)
    for (int k = 0; k < steps; ++k)
      for (int n = 0; n < columns; ++n)
        for (int i = 4 * k, j = 4 * n; i < 4 * k + 4; ++i, ++j) {
          const int a = has_sign & 1 ? (int8_t)left[row].bytes[i] : left[row].bytes[i];
          const int b = has_sign & 2 ? (int8_t)right[k].bytes[j] : right[k].bytes[j];
          sums[row].words[n] += (uint32_t)(a * b);
        }
}

static void dot(const Instruction* i, const uint8_t* at) {
  const int left = i->rm, right = i->third, rows = now.rows[i->reg], steps = now.row_bytes[left] / 4,
            columns = now.row_bytes[i->reg] / 4;
  if (right >= kTiles || i->reg == left || i->reg == right || left == right) fail("tiles that must not be", at);
  if (now.rows[left] != rows || now.rows[right] != steps || now.row_bytes[right] / 4 != columns)
    fail("shapes that do not fit", at);
  __atomic_add_fetch(&amx_dots, 1, __ATOMIC_RELAXED);
  if (i->opcode == 0x5e) {
    static const int has_sign[4] = {0, 2, 1, 3};  // for no prefix, 66, F3, F2: uu, us, su, ss
    return dot_int8(tiles[left], tiles[right], tiles[i->reg], rows, steps, columns, has_sign[i->prefix]);
  }
  if (i->prefix != 2) fail("no product of bf16", at);
  dot_bf16(tiles[left], tiles[right], tiles[i->reg], rows, steps, columns);
}

static void move(const Instruction* i, const uint8_t* at) {
  if (i->prefix == 0 || !i->in_memory || i->rm != 4) fail("no load or store", at);
  if (i->prefix != 2) __atomic_add_fetch(&amx_loads, 1, __ATOMIC_RELAXED);
  for (int row = 0; row < kRows; ++row) {
    Row* const there = &tiles[i->reg][row];
    uint8_t* const here = i->address + row * i->apart;
    if (i->prefix == 2 && row < now.rows[i->reg]) memcpy(here, there, now.row_bytes[i->reg]);
    if (i->prefix == 2) continue;
    memset(there, 0, sizeof *there);
    if (row < now.rows[i->reg]) memcpy(there, here, now.row_bytes[i->reg]);
  }
}

static void carry_out(const Instruction* i, const uint8_t* at) {
  if (i->opcode == 0x49 && i->in_memory && i->prefix == 0) return configure(i->address, at);
  if (i->opcode == 0x49 && i->in_memory && i->prefix == 1) return (void)memcpy(i->address, &now, sizeof now);
  if (i->opcode == 0x49 && !i->in_memory && i->prefix == 0) return release();
  if (!now.palette) fail("tiles are not configured", at);
  if (i->opcode < 0x5c && (i->third || !now.rows[i->reg])) fail("no such tile, or bits that must not be", at);
  if (i->opcode == 0x49 && !i->in_memory && i->prefix == 3) return (void)memset(tiles[i->reg], 0, sizeof tiles[0]);
  if (i->opcode == 0x4b) return move(i, at);
  if (i->opcode != 0x49 && !i->in_memory) return dot(i, at);
  fail("unknown", at);
}

static void on_illegal_instruction(int signal, siginfo_t* information, void* context) {
  (void)signal, (void)information;
  greg_t* const registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  Instruction found;
  const uint8_t* at = (const uint8_t*)registers[REG_RIP];
  if (!read_instruction(at, registers, &found)) fail("not an instruction of AMX", at);
  _mm_setcsr(0x9fc0);  // round to nearest, no denormals; the interrupted code's MXCSR is restored with its registers
  do {  // also AMX's instructions right after it: a signal takes longer than they do
    carry_out(&found, at);
    at += found.length;
  } while (read_instruction(at, registers, &found));
  registers[REG_RIP] = (greg_t)at;
}

// ---- functions that replace the C library's

static int (*real_sigaction)(int, const struct sigaction*, struct sigaction*);

int sigaction(int number, const struct sigaction* action, struct sigaction* before) {
  if (!real_sigaction) *(void**)&real_sigaction = dlsym(RTLD_NEXT, "sigaction");
  if (number == SIGILL && action) {
    if (before) memset(before, 0, sizeof *before);
    return 0;
  }
  return real_sigaction(number, action, before);
}

long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_arch_prctl && a[0] == 0x1023 && a[1] == 18) return 0;
  register long fourth __asm__("r10") = a[3], fifth __asm__("r8") = a[4], sixth __asm__("r9") = a[5];
  long result;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "0"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(fourth), "r"(fifth), "r"(sixth)
                   : "rcx", "r11", "memory");
  if (result >= 0 || result < -4095) return result;
  errno = (int)-result;
  return -1;
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
  *(void**)&real_sigaction = dlsym(RTLD_NEXT, "sigaction");
  if (real_sigaction(SIGILL, &action, NULL)) abort();
}
