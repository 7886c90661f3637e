// Runs a grid: its blocks one after the other, the threads of a block as fibers that yield at barriers and collectives.
// The PTX instructions are at the end.
#include "cuda_on_cpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "checker.h"
#include "fiber.h"

namespace cuda_on_cpu {

alignas(1024) char arena[kArena];
constinit thread_local int running = kNobody;

namespace {

constexpr int kWarp = 32, kMostThreads = 1024;

// An operation that lanes of a warp do together. The last lane to arrive runs it on all operands, which are nullptr for
// lanes outside the mask.
struct Collective {
  const char* name;
  void (*run)(unsigned mask, void* const* operands);
  bool whole_warp = false, orders_memory = false;
};

struct Copy {
  char* to;
  const char* from;
  int bytes;
  unsigned group;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  const char* waits_at = nullptr;  // for messages; nullptr: it does not wait
  bool exited = false;
  std::vector<Copy> copies;                                 // issued and not yet waited for
  unsigned groups = 0;                                      // committed groups of copies
  std::vector<std::pair<GroupProduct, unsigned>> products;  // issued and not yet waited for, each with its group
  unsigned product_groups = 0, multiplied = 0;              // multiplied: products so far
};

// A collective that some lanes have reached. A warp can have several, with disjoint masks.
struct Rendezvous {
  const Collective* what;
  unsigned mask, arrived;
  unsigned number;
};

struct Warp {
  unsigned lanes, exited;
  void* operands[kWarp];
  std::vector<Rendezvous> rendezvous;
  unsigned next_number;
};

struct SharedArray {
  const void* here;
  const char* name;
  size_t offset, bytes;
};

struct Order {
  enum { forward, reverse, random } kind = forward;
  unsigned seed = 1;
};

// One launch at a time.
struct Device {
  std::mutex mutex;
  Order order;
  std::minstd_rand random;
  char* stacks = nullptr;
  Fiber host;
  std::vector<Thread> threads{kMostThreads};
  Warp warps[kMostThreads / kWarp];
  std::vector<int> ready;  // the next thread is the last element

  dim3 grid, block;
  int count;  // threads in a block
  uint3 block_index;
  int64_t block_number;
  void (*kernel)(const void*);
  const void* parameters;

  std::vector<SharedArray> arrays;
  size_t static_bytes, dynamic_bytes, static_end;

  int exited, at_barrier, first_at_barrier;
  const char* barrier_file;
  int barrier_line;
  unsigned barriers;  // so far
  std::string failure;
};
Device device;

int lane() { return running % kWarp; }
Thread& self() { return device.threads[running]; }
Warp& warp() { return device.warps[running / kWarp]; }

// All three numbers, or only the first where the other dimensions are 1.
std::string text(uint3 at, dim3 size = {0, 0, 0}) {
  if (size.y == 1 && size.z == 1) return std::to_string(at.x);
  char words[48];
  snprintf(words, sizeof words, "(%u, %u, %u)", at.x, at.y, at.z);
  return words;
}

uint3 unflatten(int64_t number, dim3 size) {
  return {unsigned(number % size.x), unsigned(number / size.x % size.y), unsigned(number / size.x / size.y)};
}

std::string me() { return thread_name(running, device.block_number); }

// arrive() and leave() tell ThreadSanitizer: what precedes arrive() happens before what follows leave() of its address.
// Successive barriers have different addresses, because a thread may reach the next before another has left this one.
[[maybe_unused]] char launched, ended, at_barriers[2], at_rendezvous[kMostThreads / kWarp][64];

void arrive([[maybe_unused]] char* barrier) {
#ifdef FB_THREAD_SANITIZER
  __tsan_release(barrier);
#endif
}
void leave([[maybe_unused]] char* barrier) {
#ifdef FB_THREAD_SANITIZER
  __tsan_acquire(barrier);
#endif
}

// ---- the scheduler

void make_ready(std::vector<int> numbers) {
  if (device.order.kind != Order::reverse) std::reverse(numbers.begin(), numbers.end());
  device.ready.insert(device.ready.end(), numbers.begin(), numbers.end());
}

void make_all_ready() {
  std::vector<int> numbers(device.count);
  std::iota(numbers.begin(), numbers.end(), 0);
  make_ready(numbers);
}

// Returns when another fiber switches back, which does not happen after an exit or a failure.
void switch_to(int number) {
  const int before = running;
  Fiber& from = before == kNobody ? device.host : self().fiber;
  running = number;
  from.switch_to(number == kNobody ? device.host : self().fiber);
}

[[noreturn]] void give_up() {
  switch_to(kNobody);
  __builtin_unreachable();
}

std::string site(const char* file, int line) {
  const char* const slash = strrchr(file, '/');
  return (slash ? slash + 1 : file) + (":" + std::to_string(line));
}

[[noreturn]] void deadlock() {
  std::string what = "deadlock";
  const char* last = nullptr;
  for (int i = 0; i < device.count; ++i) {
    const Thread& thread = device.threads[i];
    const char* const at = thread.exited ? "its end" : thread.waits_at;
    if (at == last) continue;
    what +=
        (last ? ", " : " of block " + text(device.block_index, device.grid) + ": ") + thread_name(i) + " is at " + at;
    last = at;
  }
  fail(what);
}

// The next thread to run, or kNobody, the host, if all have exited.
int next() {
  if (device.ready.empty()) {
    if (device.exited == device.count) return kNobody;
    if (device.at_barrier && device.at_barrier + device.exited == device.count) {
      const auto exited = std::find_if(device.threads.begin(), device.threads.end(), [](auto& t) { return t.exited; });
      fail("__syncthreads at " + site(device.barrier_file, device.barrier_line) +
           " waits for threads that have exited, such as " +
           thread_name(int(exited - device.threads.begin()), device.block_number));
    }
    deadlock();
  }
  if (device.order.kind == Order::random) {
    std::swap(device.ready[device.random() % device.ready.size()], device.ready.back());
  }
  const int number = device.ready.back();
  device.ready.pop_back();
  return number;
}

void run_others() {
  const int number = next();
  if (number != running) switch_to(number);
}

// The four warps of a warpgroup multiply together, so its threads must all have run as many products at a barrier.
void require_whole_groups() {
  for (int i = 0; i < device.count; ++i) {
    const int first = i / (4 * kWarp) * (4 * kWarp);
    if (device.threads[i].multiplied != device.threads[first].multiplied)
      fail("divergent wgmma: " + thread_name(i) + " has run " + std::to_string(device.threads[i].multiplied) + ", " +
           thread_name(first) + " of its warpgroup " + std::to_string(device.threads[first].multiplied));
  }
}

// Runs a thread from its first instruction to its last.
void thread_main() {
  self().fiber.arrived();
  leave(&launched);
  device.kernel(device.parameters);
  if (!self().copies.empty()) fail(me() + " exits with a cp.async under way");
  if (!self().products.empty()) fail(me() + " exits with a wgmma under way");
  arrive(&ended);
  self().exited = true;
  if (++device.exited == device.count) require_whole_groups();
  warp().exited |= 1u << lane();
  for (const Rendezvous& pending : warp().rendezvous) {
    if (pending.mask >> lane() & 1) fail(me() + " exits while lanes of its warp wait for it at " + pending.what->name);
  }
  switch_to(next());
  __builtin_unreachable();
}

void run_block() {
  device.exited = device.at_barrier = 0;
  device.ready.clear();
  for (int i = 0; i < (device.count + kWarp - 1) / kWarp; ++i) {
    const int lanes = std::min(kWarp, device.count - i * kWarp);
    device.warps[i].lanes = lanes == kWarp ? ~0u : (1u << lanes) - 1;
    device.warps[i].exited = 0;
    device.warps[i].rendezvous.clear();
  }
  for (int i = 0; i < device.count; ++i) {
    Thread& thread = device.threads[i];
    thread.index = unflatten(i, device.block);
    thread.waits_at = nullptr;
    thread.exited = false;
    thread.copies.clear();
    thread.groups = thread.product_groups = thread.multiplied = 0;
    thread.products.clear();
    thread.fiber.start(device.stacks + i * kStackBytes, i, thread_main);
  }
  make_all_ready();
  // Shared memory starts as NaN, in every type.
  for (const SharedArray& array : device.arrays) memset(arena + array.offset, 0xFF, array.bytes);
  memset(arena + kDynamic, 0xFF, device.dynamic_bytes);
  checker::start_block(device.block_number);
  arrive(&launched);
  switch_to(next());
  leave(&ended);
}

int shared_limit = kSharedLimit;  // bytes of shared memory that a block may have
int processors = 3;
int architecture = 9;

std::string bad_configuration(dim3 grid, dim3 block, size_t shared_bytes) {
  const auto words = [](dim3 size) { return text({size.x, size.y, size.z}); };
  if (!grid.x || !grid.y || !grid.z || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) {
    return "bad launch: a grid of " + words(grid) + " blocks";
  }
  if (!block.x || !block.y || !block.z || block.z > 64 || uint64_t(block.x) * block.y * block.z > kMostThreads) {
    return "bad launch: a block of " + words(block) + " threads";
  }
  if (shared_bytes > size_t(shared_limit))
    return "bad launch: " + std::to_string(shared_bytes) + " bytes of shared memory";
  return {};
}

Order parse(const char* words) {
  if (!strcmp(words, "forward")) return {Order::forward};
  if (!strcmp(words, "reverse")) return {Order::reverse};
  unsigned seed;
  if (sscanf(words, "random:%u", &seed) == 1) return {Order::random, seed};
  fprintf(stderr, "FB_THREAD_ORDER is '%s'; it can be forward, reverse or random:SEED\n", words);
  abort();
}

const bool order_is_set = [] {
  if (const char* words = getenv("FB_THREAD_ORDER")) device.order = parse(words);
  return true;
}();

}  // namespace

extern "C" {
[[gnu::visibility("default")]] void cuda_on_cpu_set_order(const char* words) { device.order = parse(words); }
[[gnu::visibility("default")]] void cuda_on_cpu_set_multiprocessors(int count) { processors = count; }
[[gnu::visibility("default")]] void cuda_on_cpu_set_architecture(int major) { architecture = major; }
[[gnu::visibility("default")]] void cuda_on_cpu_set_shared_memory(int bytes) { shared_limit = bytes; }
[[gnu::visibility("default")]] void cuda_on_cpu_allow_overlap(bool allowed) { checker::allow_overlap(allowed); }
}

int multiprocessors() { return processors; }
int major_architecture() { return architecture; }
int shared_memory_limit() { return shared_limit; }

const char* run_grid(dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(const void*), const void* parameters) {
  static thread_local std::string answer;
  const std::lock_guard lock(device.mutex);
  answer = bad_configuration(grid, block, shared_bytes);
  if (!answer.empty()) return answer.c_str();
  if (!device.stacks) device.stacks = new_stacks(kMostThreads);
  device.grid = grid, device.block = block, device.count = int(block.x * block.y * block.z);
  device.kernel = kernel, device.parameters = parameters;
  device.arrays.clear();
  device.static_bytes = device.static_end = 0;
  device.dynamic_bytes = shared_bytes;
  device.failure.clear();
  device.random.seed(device.order.seed);
  device.host.start_here();
  checker::start_launch(device.stacks, kMostThreads * kStackBytes, device.count);
  checker::declare(kDynamic, shared_bytes);

  const int64_t blocks = int64_t(grid.x) * grid.y * grid.z;
  std::vector<int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  if (device.order.kind == Order::reverse) std::reverse(order.begin(), order.end());
  if (device.order.kind == Order::random) std::shuffle(order.begin(), order.end(), device.random);
  for (size_t i = 0; i < order.size() && device.failure.empty(); ++i) {
    device.block_number = order[i];
    device.block_index = unflatten(order[i], grid);
    run_block();
  }
  answer = device.failure;
  return answer.empty() ? nullptr : answer.c_str();
}

// ---- messages

std::string thread_name(int number, int64_t block) {
  const std::string thread = "thread " + text(unflatten(number, device.block), device.block);
  if (block == kSameBlock) return thread;
  return thread + " of block " + text(unflatten(block, device.grid), device.grid);
}

std::string shared_name(size_t offset) {
  if (offset >= kDynamic) {
    const size_t byte = offset - kDynamic;
    return "byte " + std::to_string(byte) + " of the " + std::to_string(device.dynamic_bytes) +
           " bytes of dynamic shared memory";
  }
  const SharedArray* nearest = nullptr;
  for (const SharedArray& array : device.arrays) {
    if (array.offset <= offset && (!nearest || array.offset > nearest->offset)) nearest = &array;
  }
  if (!nearest) return "a byte before all shared arrays";
  return "byte " + std::to_string(offset - nearest->offset) + " of the " + std::to_string(nearest->bytes) +
         " bytes of " + nearest->name;
}

// The source line of a call with this return address, innermost function first: "kernel.cu:7, called at …". Empty
// without binutils.
std::string source_line(const void* where) {
  Dl_info library;
  if (!where || !dladdr(where, &library)) return {};
  const auto offset = static_cast<const char*>(where) - 1 - static_cast<const char*>(library.dli_fbase);
  char command[4096];
  snprintf(command, sizeof command, "addr2line -i -s -e '%s' %#tx 2>/dev/null", library.dli_fname, offset);
  const std::unique_ptr<FILE, int (*)(FILE*)> output(popen(command, "r"), pclose);
  std::string lines;
  char line[512];
  while (output && fgets(line, sizeof line, output.get())) {
    const std::string place(line, strcspn(line, " \n"));
    if (place.find("??") == 0 || place.find("cuda_on_cpu.h") == 0) continue;
    lines += (lines.empty() ? "" : ", called at ") + place;
  }
  return lines;
}

void fail(const std::string& what, const void* where) {
  const std::string line = source_line(where);
  device.failure = what + (line.empty() ? "" : ", at " + line);
  give_up();
}

// ---- what kernels call

uint3 thread_index() { return self().index; }
uint3 block_index() { return device.block_index; }
dim3 block_size() { return device.block; }
dim3 grid_size() { return device.grid; }

void* shared_array(const void* here, const char* name, size_t bytes) {
  for (const SharedArray& array : device.arrays) {
    if (array.here == here) return arena + array.offset;
  }
  device.static_bytes += (bytes + 15) / 16 * 16;
  if (device.static_bytes > kStaticLimit || device.static_bytes + device.dynamic_bytes > size_t(shared_limit)) {
    fail("too much shared memory: " + std::to_string(device.static_bytes) + " bytes of arrays with " + name + ", " +
         std::to_string(device.dynamic_bytes) + " dynamic");
  }
  constexpr size_t kBetween = 128;
  const size_t offset = (device.static_end + kBetween) / 32 * 32 + 16;  // aligned to 16 bytes and no more
  if (offset + bytes + kBetween > kDynamic) fail("too many shared arrays");
  device.arrays.push_back({here, name, offset, bytes});
  device.static_end = offset + bytes;
  checker::declare(offset, bytes);
  memset(arena + offset, 0xFF, bytes);
  return arena + offset;
}

void* dynamic_shared() { return arena + kDynamic; }

void sync_threads(const char* file, int line) {
  if (device.at_barrier == 0) {
    device.barrier_file = file, device.barrier_line = line, device.first_at_barrier = running;
  } else if (strcmp(file, device.barrier_file) || line != device.barrier_line) {
    fail("divergent __syncthreads: " + me() + " is at " + site(file, line) + ", " +
         thread_name(device.first_at_barrier) + " at " + site(device.barrier_file, device.barrier_line));
  }
  char* const barrier = &at_barriers[device.barriers % 2];
  arrive(barrier);
  self().waits_at = "__syncthreads";
  if (++device.at_barrier == device.count) {
    require_whole_groups();
    device.at_barrier = 0;
    ++device.barriers;
    checker::sync_threads();
    make_all_ready();
  }
  run_others();
  self().waits_at = nullptr;
  leave(barrier);
}

namespace {

// Waits until all lanes of the mask have reached the same collective with their operands.
void wait_for_lanes(const Collective& what, unsigned mask, void* mine) {
  Warp& warp = cuda_on_cpu::warp();
  const unsigned me = 1u << lane();
  if (what.whole_warp && (mask != ~0u || warp.lanes != ~0u)) {
    fail(cuda_on_cpu::me() + " runs " + what.name + " in a warp of fewer than 32 threads");
  }
  mask &= warp.lanes;
  if (!(mask & me)) fail(cuda_on_cpu::me() + " calls " + what.name + " with a mask that it is not in");
  if (mask & warp.exited) fail(cuda_on_cpu::me() + " calls " + what.name + " with a lane that has exited");
  const auto same = [&](const Rendezvous& pending) { return pending.what == &what && pending.mask == mask; };
  auto pending = std::find_if(warp.rendezvous.begin(), warp.rendezvous.end(), same);
  if (pending == warp.rendezvous.end()) pending = warp.rendezvous.insert(pending, {&what, mask, 0, warp.next_number++});
  char* const barrier = &at_rendezvous[running / kWarp][pending->number % 64];
  if (what.orders_memory) arrive(barrier);
  warp.operands[lane()] = mine;
  pending->arrived |= me;
  self().waits_at = what.name;
  if (pending->arrived == mask) {
    warp.rendezvous.erase(pending);
    void* operands[kWarp];
    std::vector<int> lanes;
    for (int i = 0; i < kWarp; ++i) {
      operands[i] = mask >> i & 1 ? warp.operands[i] : nullptr;
      if (operands[i]) lanes.push_back(running / kWarp * kWarp + i);
    }
    what.run(mask, operands);
    make_ready(lanes);
  }
  run_others();
  self().waits_at = nullptr;
  if (what.orders_memory) leave(barrier);
}

struct Shuffled {
  uint64_t bits, result;
  int source;
};

void run_shuffle(unsigned, void* const* operands) {
  for (int i = 0; i < kWarp; ++i) {
    if (!operands[i]) continue;
    auto& mine = *static_cast<Shuffled*>(operands[i]);
    const void* const other = operands[mine.source];
    if (!other) {
      fail(thread_name(running / kWarp * kWarp + i, device.block_number) + " shuffles from lane " +
           std::to_string(mine.source) + ", which is not in the mask");
    }
    mine.result = static_cast<const Shuffled*>(other)->bits;
  }
}

void run_vote(unsigned mask, void* const* operands) {
  unsigned votes = 0;
  for (int i = 0; i < kWarp; ++i) {
    if (mask >> i & 1 && *static_cast<unsigned*>(operands[i])) votes |= 1u << i;
  }
  for (int i = 0; i < kWarp; ++i) {
    if (mask >> i & 1) *static_cast<unsigned*>(operands[i]) = votes;
  }
}

void run_sync_warp(unsigned mask, void* const*) { checker::sync_warp(running / kWarp, mask); }

const Collective kShuffle{.name = "a shuffle", .run = run_shuffle};
const Collective kVote{.name = "a vote", .run = run_vote};
const Collective kSyncWarp{.name = "__syncwarp", .run = run_sync_warp, .orders_memory = true};

}  // namespace

uint64_t shuffle(Shuffle how, unsigned mask, uint64_t bits, int lanes, int width) {
  const int first = lane() & ~(width - 1), last = first + width - 1;
  int source = lane();
  switch (how) {
    case Shuffle::from: source = first + (lanes & (width - 1)); break;
    case Shuffle::across: source ^= lanes; break;
    case Shuffle::up: source -= lanes; break;
    case Shuffle::down: source += lanes; break;
  }
  // A lane whose source is outside its segment gets its own value; only __shfl_xor_sync can read earlier segments.
  if (source > last || (source < first && how != Shuffle::across)) source = lane();
  Shuffled mine{bits, 0, source};
  wait_for_lanes(kShuffle, mask, &mine);
  return mine.result;
}

unsigned ballot(unsigned mask, bool predicate) {
  unsigned vote = predicate;
  wait_for_lanes(kVote, mask, &vote);
  return vote;
}

void sync_warp(unsigned mask) {
  char nothing;
  wait_for_lanes(kSyncWarp, mask, &nothing);
}

void thread_fence() { checker::thread_fence(); }

void trap() { fail(me() + " runs a trap", __builtin_return_address(0)); }

void atomic(void* address, size_t bytes) { checker::atomic(address, bytes, __builtin_return_address(0)); }

// ---- PTX

namespace {

void require_aligned(const void* address, size_t bytes, const char* what, const void* where) {
  if (reinterpret_cast<uintptr_t>(address) % bytes) {
    fail(me() + " gives " + what + " an address that is not aligned to " + std::to_string(bytes) + " bytes", where);
  }
}

void require_shared(const void* address, size_t bytes, const char* what, const void* where) {
  const char* const byte = static_cast<const char*>(address);
  if (byte < arena || byte + bytes > arena + kArena) {
    fail(me() + " gives " + what + " an address that is not in shared memory", where);
  }
}

void require_ampere(const char* what, const void* where) {
  if (architecture < 8) fail(me() + " runs " + what + ", which sm_75 does not have", where);
}

}  // namespace

// The copy happens at the wait; until then the target is NaN.
void cp_async16(void* shared, const void* global, int source_bytes) {
  const void* const where = __builtin_return_address(0);
  require_ampere("cp.async", where);
  require_aligned(shared, 16, "cp.async", where);
  require_aligned(global, 16, "cp.async", where);
  require_shared(shared, 16, "cp.async", where);
  if (source_bytes < 0 || source_bytes > 16) fail(me() + " copies more than 16 bytes by cp.async", where);
  checker::copy_issued(shared, 16, where);
  memset(shared, 0xFF, 16);
  self().copies.push_back({static_cast<char*>(shared), static_cast<const char*>(global), source_bytes, self().groups});
}

void cp_async_commit() { ++self().groups; }

void cp_async_wait_for(int pending) {
  const void* const where = __builtin_return_address(0);
  std::vector<Copy>& copies = self().copies;
  const auto has_arrived = [&](const Copy& copy) { return int(self().groups - copy.group) > pending; };
  for (const Copy& copy : copies) {
    if (!has_arrived(copy)) continue;
    checker::read(copy.from, copy.bytes, where);
    checker::copy_arrives(copy.to, 16);
    memcpy(copy.to, copy.from, copy.bytes);
    memset(copy.to + copy.bytes, 0, 16 - copy.bytes);
  }
  copies.erase(std::remove_if(copies.begin(), copies.end(), has_arrived), copies.end());
}

namespace {

struct Row {
  uint16_t element[8];
  uint32_t* fragment;  // [4]
};

const Row& row_of(void* const* operands, int number) { return *static_cast<const Row*>(operands[number]); }

void run_ldmatrix(unsigned, void* const* operands) {
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const uint16_t* const pair = row_of(operands, matrix * 8 + lane / 4).element + lane % 4 * 2;
      row_of(operands, lane).fragment[matrix] = pair[0] | uint32_t(pair[1]) << 16;
    }
  }
}

void run_ldmatrix_trans(unsigned, void* const* operands) {
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const int row = matrix * 8 + lane % 4 * 2, column = lane / 4;
      const uint32_t low = row_of(operands, row).element[column], high = row_of(operands, row + 1).element[column];
      row_of(operands, lane).fragment[matrix] = low | high << 16;
    }
  }
}

const Collective kLdmatrix{.name = "ldmatrix", .run = run_ldmatrix, .whole_warp = true};
const Collective kLdmatrixTrans{.name = "ldmatrix.trans", .run = run_ldmatrix_trans, .whole_warp = true};

void ldmatrix(const Collective& which, uint32_t* fragment, const void* row, const void* where) {
  require_aligned(row, 16, which.name, where);
  require_shared(row, 16, which.name, where);
  Row mine;
  checker::read(row, 16, where);
  memcpy(mine.element, row, 16);
  mine.fragment = fragment;
  wait_for_lanes(which, ~0u, &mine);
}

float from_bf16(uint16_t bits) { return cuda_bits<float>(uint32_t(bits) << 16); }

float from_f16(uint16_t bits) {
  const uint32_t magnitude = (bits & 0x7FFFu) << 13, sign = (bits & 0x8000u) << 16;
  const uint32_t infinite = magnitude >= 0x7C00u << 13 ? 0x7F800000u : 0;  // and NaN, which keeps its mantissa
  const float value = cuda_bits<float>(magnitude) * 0x1p112f;  // converts the exponent's bias, for denormals too
  return cuda_bits<float>(cuda_bits<uint32_t>(value) | infinite | sign);
}

struct Fragments {
  float* d;           // [4]
  const uint32_t* a;  // [4], or [2] for a product half as deep
  uint32_t b[2];
};

// The layout of the fragments is in csrc/cuda/mma.cuh. Products are exact, sums are rounded in fp32.
template <float (*kToFloat)(uint16_t), int kDepth>
void run_mma(unsigned, void* const* operands) {
  float a[16][kDepth], b[kDepth][8];
  const auto fragments = [&](int lane) -> Fragments& { return *static_cast<Fragments*>(operands[lane]); };
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int half = 0; half < 2; ++half) {
      const int group = lane / 4, column = lane % 4 * 2 + half, shift = half * 16;
      const Fragments& from = fragments(lane);
      for (int r = 0; r < kDepth / 4; ++r)
        a[group + r % 2 * 8][column + r / 2 * 8] = kToFloat(uint16_t(from.a[r] >> shift));
      for (int r = 0; r < kDepth / 8; ++r) b[column + r * 8][group] = kToFloat(uint16_t(from.b[r] >> shift));
    }
  }
  float product[16][8] = {};
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < 8; ++column) product[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int r = 0; r < 4; ++r) fragments(lane).d[r] += product[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2];
  }
}

const Collective kMmaBf16{.name = "mma", .run = run_mma<from_bf16, 16>, .whole_warp = true};
const Collective kMmaF16{.name = "mma", .run = run_mma<from_f16, 16>, .whole_warp = true};
const Collective kMmaOfEight{.name = "mma", .run = run_mma<from_f16, 8>, .whole_warp = true};

}  // namespace

void ldmatrix_x4(uint32_t (&r)[4], const void* row) { ldmatrix(kLdmatrix, r, row, __builtin_return_address(0)); }
void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  ldmatrix(kLdmatrixTrans, r, row, __builtin_return_address(0));
}

void mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, bool is_bf16) {
  require_ampere("mma.m16n8k16", __builtin_return_address(0));
  Fragments mine{d, a, {b0, b1}};
  wait_for_lanes(is_bf16 ? kMmaBf16 : kMmaF16, ~0u, &mine);
}

void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  const uint32_t a[2] = {a0, a1};
  Fragments mine{d, a, {b0, 0}};
  wait_for_lanes(kMmaOfEight, ~0u, &mine);
}

// ---- products of warpgroups

namespace {

// Where tensor cores look for the element that would be at `at` without swizzling.
const char* swizzled(const char* at) {
  const char* const base = static_cast<const char*>(dynamic_shared());
  const size_t offset = at - base;
  return base + (offset ^ (offset >> 7 & 7) << 4);
}

uint16_t element(uint64_t descriptor, int row, int column, const void* where) {
  const char* const at = swizzled(reinterpret_cast<const char*>(descriptor) + 128 * row + 2 * column);
  require_shared(at, 2, "wgmma", where);
  checker::read(at, 2, where);
  uint16_t bits;
  memcpy(&bits, at, 2);
  return bits;
}

// A register of a fragment: the element at (row, column) and the next one, of the next row if along_rows.
uint32_t pair_of(uint64_t descriptor, int row, int column, bool along_rows, const void* where) {
  const uint32_t low = element(descriptor, row, column, where);
  return low | uint32_t(element(descriptor, row + along_rows, column + !along_rows, where)) << 16;
}

void multiply(const GroupProduct& p, const void* where) {
  const int group = lane() / 4, pair = lane() % 4 * 2, first = running / kWarp % 4 * 16;
  uint32_t a[4];
  for (int r = 0; r < 4; ++r)
    a[r] = p.a ? p.a[r] : pair_of(p.shared_a, first + group + r % 2 * 8, pair + r / 2 * 8, false, where);
  for (int j = 0; j < 8; ++j) {
    uint32_t b[2];
    for (int r = 0; r < 2; ++r) {
      const int inner = pair + 8 * r, column = 8 * j + group;
      b[r] = p.by_row ? pair_of(p.b, inner, column, true, where) : pair_of(p.b, column, inner, false, where);
    }
    if (!p.adds) memset(p.d[j], 0, sizeof p.d[j]);
    mma(p.d[j], a, b[0], b[1], p.is_bf16);
  }
}

void require_matrix(uint64_t descriptor, const void* where) {
  const size_t offset = reinterpret_cast<const char*>(descriptor) - static_cast<const char*>(dynamic_shared());
  if (offset / 128 % 8 || offset % 16) fail(me() + " gives wgmma a matrix that is not aligned to 1024 bytes", where);
}

}  // namespace

void wgmma(const GroupProduct& product) {
  const void* const where = __builtin_return_address(0);
  if (architecture != 9) fail(me() + " runs wgmma, which only sm_90 has", where);
  if (!product.a) require_matrix(product.shared_a, where);
  require_matrix(product.b, where);
  self().products.emplace_back(product, self().product_groups);
  ++self().multiplied;
}

void wgmma_commit() { ++self().product_groups; }

void wgmma_wait_for(int pending) {
  const void* const where = __builtin_return_address(0);
  std::vector<std::pair<GroupProduct, unsigned>> issued;
  issued.swap(self().products);
  for (const auto& [product, group] : issued) {
    if (int(self().product_groups - group) > pending) {
      multiply(product, where);
    } else {
      self().products.emplace_back(product, group);
    }
  }
}

}  // namespace cuda_on_cpu
