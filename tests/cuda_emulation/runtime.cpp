// Runs a grid of fibers on one thread of the CPU. Tests only; see emulation.h.
//
// Blocks run one after another. Inside a block, one warp runs until all its lanes wait or have ended, then the next; the seed decides the
// order of warps and lanes (0 forwards, 1 backwards, above: shuffled each round). What it reports: deadlock, warp collectives met by
// different lanes at different places, barriers that some threads have left behind, misaligned and out-of-bounds 16-byte accesses, writes
// past the end of shared memory, and cp.async that nobody waited for. Shared memory starts as 0xFF, which is NaN in every float type.
// With EMULATION_TSAN, ThreadSanitizer sees each CUDA thread as its own, ordered by __syncthreads and __syncwarp only.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <vector>
#ifdef EMULATION_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_read_range(void*, unsigned long);
extern "C" void __tsan_write_range(void*, unsigned long);
#define TSAN(...) __VA_ARGS__
#else
#define TSAN(...)
#endif

extern "C" void emulation_switch(void** save_stack, void* load_stack);
#if defined(__x86_64__)
asm(R"(
.text
.globl emulation_switch
.hidden emulation_switch
.type emulation_switch,@function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
#error "the emulation switches stacks in x86-64 assembly"
#endif

namespace {
using namespace emulated;

constexpr size_t STACK_BYTES = 256 * 1024;
constexpr size_t GUARD_BYTES = 1024;  // after shared memory; anything written there is reported

struct Operands { uint64_t in[8], out[4]; };
struct Warp {
  Operands operands[2][32];  // used in turn: with two sets one rendezvous per operation is enough
  unsigned arrived = 0, mask = 0;
  unsigned long phase = 0;
  long site = 0;
  char tag = 0;
};
struct Copy { void* target; const void* source; unsigned bytes; };
struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  dim3 index;
  unsigned lane = 0, parity = 0;
  Warp* warp = nullptr;
  bool has_ended = false;
  const unsigned long* waits_on = nullptr;
  unsigned long waits_while = 0;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open_group;
  TSAN(void* tsan = nullptr;)
};
struct Region { const char* begin; size_t bytes; };

Fiber* current;
void* scheduler_stack;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<Region> regions;
unsigned barrier_arrived, num_live, schedule_seed;
unsigned long barrier_phase;
dim3 grid, block, block_position;
char* shared;
size_t shared_size;
void (*kernel_body)(void*);
void* kernel_context;
char message[512];
TSAN(void* scheduler_tsan; char barrier_tag, launch_tag, exit_tag;)

void yield() {
  Fiber* fiber = current;
  TSAN(__tsan_switch_to_fiber(scheduler_tsan, 1);)
  emulation_switch(&fiber->stack_pointer, scheduler_stack);
}

void wait_while(const unsigned long* counter, unsigned long value) {
  current->waits_on = counter;
  current->waits_while = value;
  while (*counter == value && !message[0]) yield();
  current->waits_on = nullptr;
  if (message[0]) {
    current->has_ended = true;
    for (;;) yield();
  }
}

bool is_shared(const void* p, size_t bytes) {
  auto* c = static_cast<const char*>(p);
  return c >= shared && c + bytes <= shared + shared_size;
}

float as_float(uint32_t word, int half, bool is_bfloat) {
  uint32_t bits = half ? word >> 16 : word & 0xffff;
  if (!is_bfloat) return half_to_float(bits);
  return __uint_as_float(bits << 16);
}

// Lane l of a matrix receives row l/4, elements 2(l%4) and 2(l%4)+1; transposed: rows 2(l%4) and 2(l%4)+1 of column l/4.
void load_matrices(Operands* lanes, int count, bool transposed) {
  for (int lane = 0; lane < 8 * count; lane++) {
    auto* row = reinterpret_cast<const char*>(lanes[lane].in[0]);
    if (reinterpret_cast<uintptr_t>(row) & 15 || !is_shared(row, 16)) return fail("ldmatrix: a row is misaligned or outside shared memory");
    TSAN(__tsan_read_range(const_cast<char*>(row), 16);)
  }
  for (int lane = 0; lane < 32; lane++)
    for (int matrix = 0; matrix < count; matrix++)
      for (int i = 0; i < 2; i++) {
        int row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
        auto* source = reinterpret_cast<const char*>(lanes[matrix * 8 + row].in[0]) + column * 2;
        __builtin_memcpy(reinterpret_cast<char*>(lanes[lane].out) + 4 * matrix + 2 * i, source, 2);
      }
}

// The fragments of m16n8k16, PTX ISA section "Matrix Fragments for mma.m16n8k16 with floating point type".
void multiply(Operands* lanes, bool is_bfloat) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; lane++) {
    uint32_t words[6];
    __builtin_memcpy(words, lanes[lane].in, 24);
    for (int r = 0; r < 4; r++)
      for (int i = 0; i < 2; i++) a[lane / 4 + 8 * (r & 1)][lane % 4 * 2 + i + 8 * (r >> 1)] = as_float(words[r], i, is_bfloat);
    for (int r = 0; r < 2; r++)
      for (int i = 0; i < 2; i++) b[lane % 4 * 2 + i + 8 * r][lane / 4] = as_float(words[4 + r], i, is_bfloat);
  }
  for (int lane = 0; lane < 32; lane++) {
    float c[4];
    __builtin_memcpy(c, reinterpret_cast<char*>(lanes[lane].in) + 24, 16);
    for (int e = 0; e < 4; e++) {
      int m = lane / 4 + 8 * (e >> 1), n = lane % 4 * 2 + (e & 1);
      float sum = 0;
      for (int k = 0; k < 16; k++) sum += a[m][k] * b[k][n];
      c[e] += sum;
    }
    __builtin_memcpy(lanes[lane].out, c, 16);
  }
}

void evaluate(int operation, int immediate, unsigned mask, Operands* lanes) {
  uint64_t ballot = 0;
  switch (operation) {
    case SHUFFLE_XOR:
      for (int lane = 0; lane < 32; lane++) lanes[lane].out[0] = lanes[lane ^ immediate].in[0];
      break;
    case SHUFFLE:
      for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) lanes[lane].out[0] = lanes[lanes[lane].in[1]].in[0];
      break;
    case BALLOT:
      for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) ballot |= (lanes[lane].in[0] & 1) << lane;
      for (int lane = 0; lane < 32; lane++) lanes[lane].out[0] = ballot;
      break;
    case LDMATRIX_2: return load_matrices(lanes, 2, false);
    case LDMATRIX_4: return load_matrices(lanes, 4, false);
    case LDMATRIX_2_T: return load_matrices(lanes, 2, true);
    case LDMATRIX_4_T: return load_matrices(lanes, 4, true);
    case MMA_BF16: return multiply(lanes, true);
    case MMA_F16: return multiply(lanes, false);
  }
}

void finish_copies(size_t count) {
  auto& groups = current->groups;
  for (size_t i = 0; i < count; i++)
    for (auto& copy : groups[i]) {
      TSAN(__tsan_write_range(copy.target, 16); if (copy.bytes) __tsan_read_range(const_cast<void*>(copy.source), copy.bytes);)
      __builtin_memset(copy.target, 0, 16);
      __builtin_memcpy(copy.target, copy.source, copy.bytes);
    }
  groups.erase(groups.begin(), groups.begin() + static_cast<long>(count));
}

void fiber_main() {
  TSAN(__tsan_acquire(&launch_tag);)
  kernel_body(kernel_context);
  bool pending = !current->open_group.empty();
  for (auto& group : current->groups) pending |= !group.empty();
  if (pending) fail("a thread ended with cp.async pending");
  current->has_ended = true;
  num_live--;
  TSAN(__tsan_release(&exit_tag);)
  for (;;) yield();
}

void prepare(Fiber& fiber) {
  fiber.has_ended = false;
  fiber.waits_on = nullptr;
  fiber.parity = 0;
  fiber.groups.clear();
  fiber.open_group.clear();
  auto** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(fiber.stack) + STACK_BYTES) & ~uintptr_t{63});
  *--top = nullptr;  // the return address of fiber_main, which never returns
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; i++) *--top = nullptr;  // the registers that emulation_switch pops
  fiber.stack_pointer = top;
  TSAN(if (fiber.tsan) __tsan_destroy_fiber(fiber.tsan); fiber.tsan = __tsan_create_fiber(0);)
}

bool run_warp(unsigned warp) {
  unsigned first = warp * 32, count = std::min<unsigned>(32, static_cast<unsigned>(fibers.size()) - first);
  bool progressed = false;
  for (bool again = true; again;) {
    again = false;
    for (unsigned k = 0; k < count; k++) {
      Fiber& fiber = fibers[first + (schedule_seed & 1 ? count - 1 - k : k)];
      if (fiber.has_ended || (fiber.waits_on && *fiber.waits_on == fiber.waits_while)) continue;
      current = &fiber;
      again = progressed = true;
      TSAN(__tsan_switch_to_fiber(fiber.tsan, 1);)
      emulation_switch(&scheduler_stack, fiber.stack_pointer);
      if (message[0]) return true;
    }
  }
  return progressed;
}

void run_block() {
  barrier_arrived = 0;
  num_live = static_cast<unsigned>(fibers.size());
  for (auto& warp : warps) warp.arrived = 0;
  __builtin_memset(shared, 0xFF, shared_size + GUARD_BYTES);
  for (auto& fiber : fibers) prepare(fiber);
  TSAN(__tsan_release(&launch_tag);)
  std::vector<unsigned> order(warps.size());
  for (unsigned i = 0; i < order.size(); i++) order[i] = schedule_seed == 1 ? static_cast<unsigned>(order.size()) - 1 - i : i;
  unsigned random = schedule_seed * 2654435761u + 12345u;
  while (num_live) {
    for (size_t i = order.size(); schedule_seed > 1 && i > 1; i--) {
      random = random * 1664525u + 1013904223u;
      std::swap(order[i - 1], order[(random >> 8) % i]);
    }
    bool progressed = false;
    for (unsigned warp : order) {
      progressed |= run_warp(warp);
      if (message[0]) return;
    }
    if (!progressed) return fail("deadlock: a barrier or warp collective is not reached by all threads");
  }
  for (size_t i = 0; i < GUARD_BYTES; i++)
    if (static_cast<unsigned char>(shared[shared_size + i]) != 0xFF) return fail("a write past the end of shared memory");
}
}  // namespace

namespace emulated {
extern "C" {
const dim3* thread_index() { return &current->index; }
const dim3* block_index() { return &block_position; }
const dim3* block_extent() { return &block; }
const dim3* grid_extent() { return &grid; }
char* shared_memory() { return shared; }

void fail(const char* text) {
  if (!message[0])
    snprintf(message, sizeof message, "%s (block %u,%u,%u thread %u)", text, block_position.x, block_position.y, block_position.z,
             current ? current->index.x : 0);
}

void allow_region(const void* begin, size_t bytes) { regions.push_back({static_cast<const char*>(begin), bytes}); }
void forget_regions() { regions.clear(); }

void check_global(const void* address, unsigned bytes, unsigned alignment) {
  auto* c = static_cast<const char*>(address);
  if (reinterpret_cast<uintptr_t>(address) & (alignment - 1)) fail("a misaligned global load");
  bool inside = regions.empty();
  for (auto& region : regions) inside |= c >= region.begin && c + bytes <= region.begin + region.bytes;
  if (!inside) fail("a global load outside every tensor");
  if (message[0]) {
    current->has_ended = true;  // the access itself must not happen
    for (;;) yield();
  }
}

void sync_threads() {
  unsigned long phase = barrier_phase;
  TSAN(__tsan_release(&barrier_tag);)
  if (num_live != fibers.size()) fail("__syncthreads after some threads ended");
  if (++barrier_arrived == num_live) {
    barrier_arrived = 0;
    barrier_phase++;
  } else {
    wait_while(&barrier_phase, phase);
  }
  TSAN(__tsan_acquire(&barrier_tag);)
}

__attribute__((noinline)) void collective(int operation, unsigned mask, int immediate, const uint64_t* in, int num_in, uint64_t* out, int num_out) {
  Warp* warp = current->warp;
  Operands* lanes = warp->operands[current->parity];
  current->parity ^= 1;
  Operands& own = lanes[current->lane];
  for (int i = 0; i < num_in; i++) own.in[i] = in[i];
  unsigned long phase = warp->phase;
  long site = reinterpret_cast<long>(__builtin_return_address(0));
  if (!warp->arrived) {
    warp->mask = mask;
    warp->site = site;
  } else if (warp->site != site || warp->mask != mask) {
    fail("divergent warp collective: lanes meet at different calls or with different masks");
  }
  if (!(mask >> current->lane & 1)) fail("a lane is not in its own mask");
  warp->arrived++;
  TSAN(if (operation == SYNC_WARP) __tsan_release(&warp->tag);)
  if (warp->arrived == static_cast<unsigned>(__builtin_popcount(mask))) {
    evaluate(operation, immediate, mask, lanes);
    warp->arrived = 0;
    warp->phase++;
  } else {
    wait_while(&warp->phase, phase);
  }
  TSAN(if (operation == SYNC_WARP) __tsan_acquire(&warp->tag);)
  for (int i = 0; i < num_out; i++) out[i] = own.out[i];
}

void copy_async(void* target, const void* source, unsigned bytes) {
  if (reinterpret_cast<uintptr_t>(target) & 15) fail("cp.async: a misaligned target");
  if (!is_shared(target, 16)) return fail("cp.async outside shared memory");
  if (bytes) check_global(source, bytes, 16);
  current->open_group.push_back({target, source, bytes});
}

void copy_async_commit() {
  current->groups.push_back(std::move(current->open_group));
  current->open_group.clear();
}

void copy_async_wait(unsigned pending) {
  size_t count = current->groups.size();
  finish_copies(count > pending ? count - pending : 0);
}

const char* launch(void (*body)(void*), void* context, const unsigned* grid_shape, const unsigned* block_shape, size_t shared_bytes, unsigned seed) {
  grid = {grid_shape[0], grid_shape[1], grid_shape[2]};
  block = {block_shape[0], block_shape[1], block_shape[2]};
  message[0] = 0;
  schedule_seed = seed;
  kernel_body = body;
  kernel_context = context;
  current = nullptr;
  shared_size = (shared_bytes + 15) / 16 * 16;
  shared = static_cast<char*>(aligned_alloc(1024, (shared_size + GUARD_BYTES + 1023) / 1024 * 1024));
  size_t threads = static_cast<size_t>(block.x) * block.y * block.z;
  fibers.assign(threads, Fiber());
  warps.assign((threads + 31) / 32, Warp());
  TSAN(scheduler_tsan = __tsan_get_current_fiber();)
  for (size_t i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.stack = static_cast<char*>(aligned_alloc(64, STACK_BYTES));
    fiber.index = {unsigned(i % block.x), unsigned(i / block.x % block.y), unsigned(i / block.x / block.y)};
    fiber.lane = i % 32;
    fiber.warp = &warps[i / 32];
  }
  for (unsigned z = 0; z < grid.z && !message[0]; z++)
    for (unsigned y = 0; y < grid.y && !message[0]; y++)
      for (unsigned x = 0; x < grid.x && !message[0]; x++) {
        block_position = {x, y, z};
        run_block();
        TSAN(__tsan_acquire(&exit_tag);)
      }
  for (auto& fiber : fibers) {
    free(fiber.stack);
    TSAN(if (fiber.tsan) __tsan_destroy_fiber(fiber.tsan);)
  }
  free(shared);
  return message[0] ? message : nullptr;
}
}
}  // namespace emulated
