// Checks every memory access of a kernel. In shared memory: races, reads of bytes that were never written, accesses
// outside of arrays. In global memory: two threads that write to one address. In both: vectors that are not aligned.
//
// The functions that GCC calls are at the end. They have the names of ThreadSanitizer's, whose library is not linked.
#include "checker.h"

#include <string.h>

#include <algorithm>

namespace cuda_on_cpu::checker {

namespace {

constexpr int kWarp = 32, kWarps = 32;
constexpr int kNoThread = 0xFFFF;

// A return address in 32 bits, relative to the arena.
uint32_t pack(const void* where) { return uint32_t(static_cast<const char*>(where) - arena); }
const void* unpack(uint32_t where) { return arena + int32_t(where); }

// The last accesses to a byte of shared memory. Time has two parts: the epoch, which changes at every __syncthreads and
// with every block, and, within an epoch, each lane's clock, which __syncwarp advances.
struct Cell {
  uint32_t write_epoch, read_epoch;
  uint32_t write_where, read_where;
  uint16_t writer, write_clock;
  uint16_t read_clock, other_reader;  // other_reader: in a warp other than read_warp
  uint32_t read_lanes;                // those of read_warp that read
  uint8_t read_warp, declared, in_flight, is_atomic;
};
static_assert(sizeof(Cell) == 32);

// known[j][i]: lane j knows that everything up to this time of lane i has happened (a vector clock).
struct Clocks {
  uint32_t epoch;
  uint16_t known[kWarp][kWarp];
};

// The writers of the bytes of an aligned word of global memory.
struct Word {
  uintptr_t number;
  uint32_t launch, where;
  uint32_t writer[4];  // 0: none
};
constexpr size_t kWords = 1 << 19;  // a direct-mapped table: of the words that share a place it keeps the latest

Cell cells[kArena];
Clocks clocks[kWarps];
Word words[kWords];

const char* stacks;
size_t stacks_bytes;
int threads;
int64_t block;
uint32_t launch, epoch = 1, first_epoch;  // first_epoch: the block's first
bool fenced, overlap_allowed;
size_t declared_end[2];  // ends of static and of dynamic memory in this launch

Clocks& clocks_of(int warp) {
  Clocks& it = clocks[warp];
  if (it.epoch != epoch) {
    memset(it.known, 0, sizeof it.known);
    for (int lane = 0; lane < kWarp; ++lane) it.known[lane][lane] = 1;
    it.epoch = epoch;
  }
  return it;
}

uint16_t clock() { return clocks_of(running / kWarp).known[running % kWarp][running % kWarp]; }

// Whether what another thread did in this epoch, at `time` of its clock, happened before what the running thread does.
bool has_happened(int other, uint16_t time) {
  return other / kWarp == running / kWarp && clocks_of(running / kWarp).known[running % kWarp][other % kWarp] >= time;
}

// ---- shared memory

std::string me() { return thread_name(running, block); }

[[noreturn]] void race(const char* does, size_t offset, int other, const char* did, uint32_t there, const void* where) {
  const std::string line = source_line(unpack(there));
  fail("race: " + me() + " " + does + " " + shared_name(offset) + ", which " + thread_name(other) + " " + did +
           (line.empty() ? "" : " at " + line) + ", without a barrier between",
       where);
}

void check_access(const Cell& cell, size_t offset, const char* does, const void* where) {
  if (!cell.declared) fail("out of bounds: " + me() + " " + does + " " + shared_name(offset), where);
  if (cell.in_flight) {
    const std::string line = source_line(unpack(cell.write_where));
    fail(me() + " " + does + " " + shared_name(offset) + " before " + thread_name(cell.writer) +
             " has waited for the cp.async to it" + (line.empty() ? "" : " at " + line),
         where);
  }
}

void read_cell(Cell& cell, size_t offset, const void* where) {
  check_access(cell, offset, "reads", where);
  if (cell.write_epoch < first_epoch) fail(me() + " reads " + shared_name(offset) + ", which nothing wrote", where);
  if (cell.write_epoch == epoch && cell.writer != running && !has_happened(cell.writer, cell.write_clock)) {
    race("reads", offset, cell.writer, "wrote", cell.write_where, where);
  }
  const int warp = running / kWarp;
  const uint16_t now = clock();
  cell.read_where = pack(where);
  if (cell.read_epoch != epoch) {
    cell.read_epoch = epoch;
    cell.read_warp = uint8_t(warp);
    cell.read_lanes = 0;
    cell.other_reader = kNoThread;
  }
  if (cell.read_warp != warp) {
    cell.other_reader = uint16_t(running);
    return;
  }
  // Forget earlier reads that happened before this one: a write ordered after this one is ordered after them too.
  if (cell.read_lanes && cell.read_clock != now) {
    for (int i = 0; i < kWarp; ++i) {
      if (cell.read_lanes >> i & 1 && has_happened(warp * kWarp + i, cell.read_clock)) cell.read_lanes &= ~(1u << i);
    }
  }
  cell.read_clock = cell.read_lanes ? std::max(cell.read_clock, now) : now;
  cell.read_lanes |= 1u << running % kWarp;
}

void check_write(const Cell& cell, size_t offset, const void* where, bool is_atomic) {
  check_access(cell, offset, "writes", where);
  if (cell.write_epoch == epoch && cell.writer != running && !(is_atomic && cell.is_atomic) &&
      !has_happened(cell.writer, cell.write_clock)) {
    race("writes", offset, cell.writer, "wrote", cell.write_where, where);
  }
  if (cell.read_epoch != epoch) return;
  const int warp = running / kWarp;
  if (cell.other_reader != kNoThread && cell.other_reader / kWarp != warp) {
    race("writes", offset, cell.other_reader, "read", cell.read_where, where);
  }
  for (int i = 0; i < kWarp; ++i) {
    const int reader = cell.read_warp * kWarp + i;
    if (cell.read_lanes >> i & 1 && reader != running && !has_happened(reader, cell.read_clock)) {
      race("writes", offset, reader, "read", cell.read_where, where);
    }
  }
}

void write_cell(Cell& cell, size_t offset, const void* where, bool is_atomic = false) {
  check_write(cell, offset, where, is_atomic);
  cell.write_epoch = epoch;
  cell.write_where = pack(where);
  cell.writer = uint16_t(running);
  cell.write_clock = clock();
  cell.read_epoch = 0;
  cell.is_atomic = is_atomic;
}

// Calls f on the cells of an access. Most often they are equal: then it calls f on one and copies that to the others.
template <class F>
void for_cells(size_t offset, size_t bytes, const F& f) {
  Cell* const first = cells + offset;
  const bool equal = offset + bytes <= kArena && !memcmp(first, first + 1, (bytes - 1) * sizeof(Cell));
  f(*first, offset);
  for (size_t i = 1; i < bytes; ++i) {
    if (equal) {
      first[i] = *first;
    } else {
      f(cells[offset + i], offset + i);
    }
  }
}

// ---- global memory

uint32_t global_number() { return uint32_t(block * threads + running + 1); }

template <class F>
void for_words(uintptr_t address, size_t bytes, const F& f) {
  for (const uintptr_t end = address + bytes; address < end;) {
    const uintptr_t number = address / 4, next = std::min(end, (number + 1) * 4);
    Word& word = words[number % kWords];
    f(word, number, word.number == number && word.launch == launch, int(address % 4), int(next - number * 4));
    address = next;
  }
}

[[noreturn]] void conflict(const char* does, uint32_t other, const Word& word, const void* where) {
  const std::string line = source_line(unpack(word.where));
  fail("race: " + me() + " " + does + " an address of global memory that " +
           thread_name(int((other - 1) % threads), (other - 1) / threads) + " writes in the same launch" +
           (line.empty() ? "" : " at " + line),
       where);
}

void read_global(uintptr_t address, size_t bytes, const void* where) {
  const uint32_t first = uint32_t(block * threads + 1);  // this block's first number
  for_words(address, bytes, [&](const Word& word, uintptr_t, bool known, int begin, int end) {
    if (!known || fenced) return;
    for (int i = begin; i < end; ++i) {
      if (word.writer[i] && word.writer[i] - first >= uint32_t(threads)) conflict("reads", word.writer[i], word, where);
    }
  });
}

void write_global(uintptr_t address, size_t bytes, const void* where) {
  const uint32_t mine = global_number();
  for_words(address, bytes, [&](Word& word, uintptr_t number, bool known, int begin, int end) {
    if (!known) word = {number, launch, 0, {}};
    for (int i = begin; i < end; ++i) {
      if (word.writer[i] && word.writer[i] != mine) conflict("writes", word.writer[i], word, where);
      word.writer[i] = mine;
    }
    word.where = pack(where);
  });
}

// ---- both

inline size_t shared_offset(const void* address) { return size_t(static_cast<const char*>(address) - arena); }
inline bool is_stack(const void* address) { return size_t(static_cast<const char*>(address) - stacks) < stacks_bytes; }

inline void on_read(const void* address, size_t bytes, const void* where) {
  if (running == kNobody || is_stack(address) || bytes == 0) return;
  const size_t offset = shared_offset(address);
  if (offset >= kArena)
    return overlap_allowed ? void() : read_global(reinterpret_cast<uintptr_t>(address), bytes, where);
  for_cells(offset, bytes, [&](Cell& cell, size_t at) { read_cell(cell, at, where); });
}

inline void on_write(const void* address, size_t bytes, const void* where) {
  if (running == kNobody || is_stack(address) || bytes == 0) return;
  const size_t offset = shared_offset(address);
  if (offset >= kArena)
    return overlap_allowed ? void() : write_global(reinterpret_cast<uintptr_t>(address), bytes, where);
  for_cells(offset, bytes, [&](Cell& cell, size_t at) { write_cell(cell, at, where); });
}

}  // namespace

void allow_overlap(bool allowed) { overlap_allowed = allowed; }

void start_launch(const void* first_stack, size_t bytes, int threads_of_block) {
  stacks = static_cast<const char*>(first_stack), stacks_bytes = bytes;
  threads = threads_of_block;
  ++launch;
  memset(cells, 0, declared_end[0] * sizeof(Cell));
  memset(cells + kDynamic, 0, declared_end[1] * sizeof(Cell));
  declared_end[0] = declared_end[1] = 0;
}

void start_block(int64_t number) {
  block = number;
  first_epoch = ++epoch;
  fenced = false;
}

void declare(size_t offset, size_t bytes) {
  const bool dynamic = offset >= kDynamic;
  declared_end[dynamic] = std::max(declared_end[dynamic], offset + bytes - dynamic * kDynamic);
  for (size_t i = 0; i < bytes; ++i) cells[offset + i].declared = true;
}

void sync_threads() { ++epoch; }

void sync_warp(int warp, unsigned mask) {
  Clocks& it = clocks_of(warp);
  uint16_t merged[kWarp] = {};
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    for (int i = 0; i < kWarp; ++i) merged[i] = std::max(merged[i], it.known[lane][i]);
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    memcpy(it.known[lane], merged, sizeof merged);
    if (++it.known[lane][lane] == UINT16_MAX) fail("more __syncwarp between two barriers than the checker counts");
  }
}

// A block may read what other blocks have written if an atomic tells it that they have, and a fence comes before the
// reads. The checker requires only the fence.
void thread_fence() { fenced = true; }

void read(const void* address, size_t bytes, const void* where) { on_read(address, bytes, where); }

void atomic(void* address, size_t bytes, const void* where) {
  const size_t offset = shared_offset(address);
  if (reinterpret_cast<uintptr_t>(address) % bytes) fail("misaligned: an atomic of " + me(), where);
  if (offset >= kArena) return;
  for_cells(offset, bytes, [&](Cell& cell, size_t at) {
    check_access(cell, at, "updates", where);
    if (cell.write_epoch < first_epoch) fail(me() + " reads " + shared_name(at) + ", which nothing wrote", where);
    write_cell(cell, at, where, true);
  });
}

void copy_issued(void* shared, size_t bytes, const void* where) {
  for_cells(shared_offset(shared), bytes, [&](Cell& cell, size_t at) {
    write_cell(cell, at, where);
    cell.in_flight = true;
  });
}

void copy_arrives(void* shared, size_t bytes) {
  for_cells(shared_offset(shared), bytes, [](Cell& cell, size_t) {
    cell.in_flight = false;
    cell.write_epoch = epoch;
    cell.write_clock = clock();
  });
}

}  // namespace cuda_on_cpu::checker

// ---- what the compiler calls

using cuda_on_cpu::checker::on_read;
using cuda_on_cpu::checker::on_write;

extern "C" {

#define FB_ACCESS(bytes)                                                                           \
  void __tsan_read##bytes(void* address) { on_read(address, bytes, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void* address) { on_write(address, bytes, __builtin_return_address(0)); }
FB_ACCESS(1)
FB_ACCESS(2)
FB_ACCESS(4)
FB_ACCESS(8)
FB_ACCESS(16)

void __tsan_read_range(void* address, size_t bytes) { on_read(address, bytes, __builtin_return_address(0)); }
void __tsan_write_range(void* address, size_t bytes) { on_write(address, bytes, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// Called because of -fsanitize=alignment: the compiler knows which alignment an access needs.
struct Mismatch {
  struct {
    const char* file;
    uint32_t line, column;
  } at;
  const struct {
    uint16_t kind, information;
    char name[1];
  }* type;
  unsigned char log_alignment, check;
};

void __ubsan_handle_type_mismatch_v1(Mismatch* what, uintptr_t) {
  using namespace cuda_on_cpu;
  if (running == kNobody) return;
  fail("misaligned: an access of " + thread_name(running, checker::block) + " to " + what->type->name +
       ", which has to be aligned to " + std::to_string(1 << what->log_alignment) + " bytes, at " + what->at.file +
       ":" + std::to_string(what->at.line));
}

}  // extern "C"
