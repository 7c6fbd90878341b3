// The CUDA vocabulary of our kernels for g++: what a kernel sees when it runs on the CPU. Tests only.
//
// The runtime (runtime.cpp) is a separate object that is never instrumented, so that a sanitizer sees the kernel's own accesses alone.
// A thread is a fiber; warp collectives meet in the runtime, where each call site of a collective is its return address: therefore
// every wrapper below is forced inline.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __restrict__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define DEVICE static inline __attribute__((always_inline))
#define SHARED_MEMORY(name) char* name = emulated::shared_memory()

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) int4 { int32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
using std::max;
using std::min;

namespace emulated {
enum Collective { SYNC_WARP = 1, SHUFFLE_XOR, SHUFFLE, BALLOT, LDMATRIX_2, LDMATRIX_4, LDMATRIX_2_T, LDMATRIX_4_T, MMA_BF16, MMA_F16 };
extern "C" {
const dim3* thread_index();
const dim3* block_index();
const dim3* block_extent();
const dim3* grid_extent();
char* shared_memory();
void fail(const char* message);
void check_global(const void* address, unsigned bytes, unsigned alignment);
void sync_threads();
void collective(int operation, unsigned mask, int immediate, const uint64_t* in, int num_in, uint64_t* out, int num_out);
void copy_async(void* target, const void* source, unsigned bytes);
void copy_async_commit();
void copy_async_wait(unsigned pending);
const char* launch(void (*body)(void*), void* context, const unsigned* grid, const unsigned* block, size_t shared_bytes, unsigned seed);
}

// Calls a kernel with the argument convention of cuLaunchKernel: an array of pointers to the arguments.
template <class... A> struct Call { void (*kernel)(A...); void** arguments; };
template <class... A, size_t... I> void unpack(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<A>*>(arguments[I])...);
}
template <class... A> void body(void* context) {
  auto* call = static_cast<Call<A...>*>(context);
  unpack(call->kernel, call->arguments, std::index_sequence_for<A...>{});
}
template <class... A>
const char* run(void (*kernel)(A...), const unsigned* grid, const unsigned* block, size_t shared_bytes, unsigned seed, void** arguments) {
  Call<A...> call{kernel, arguments};
  return launch(&body<A...>, &call, grid, block, shared_bytes, seed);
}
template <class... A> unsigned sizes(void (*)(A...), unsigned* out) {
  unsigned i = 0;
  ((out[i++] = sizeof(std::decay_t<A>)), ...);
  return i;
}
}  // namespace emulated

#define threadIdx (*emulated::thread_index())
#define blockIdx (*emulated::block_index())
#define blockDim (*emulated::block_extent())
#define gridDim (*emulated::grid_extent())

DEVICE void __syncthreads() { emulated::sync_threads(); }
DEVICE void __syncwarp(unsigned mask = 0xffffffffu) { emulated::collective(emulated::SYNC_WARP, mask, 0, nullptr, 0, nullptr, 0); }
template <class T> DEVICE T __shfl_xor_sync(unsigned mask, T value, int bits) {
  static_assert(sizeof(T) <= 8);
  uint64_t in = 0, out;
  memcpy(&in, &value, sizeof(T));
  emulated::collective(emulated::SHUFFLE_XOR, mask, bits, &in, 1, &out, 1);
  memcpy(&value, &out, sizeof(T));
  return value;
}
template <class T> DEVICE T __shfl_sync(unsigned mask, T value, int lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t in[2] = {0, static_cast<uint64_t>(lane & 31)}, out;
  memcpy(in, &value, sizeof(T));
  emulated::collective(emulated::SHUFFLE, mask, 0, in, 2, &out, 1);
  memcpy(&value, &out, sizeof(T));
  return value;
}
DEVICE unsigned __ballot_sync(unsigned mask, int predicate) {
  uint64_t in = predicate != 0, out;
  emulated::collective(emulated::BALLOT, mask, 0, &in, 1, &out, 1);
  return static_cast<unsigned>(out);
}
DEVICE float __uint_as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
DEVICE uint32_t __float_as_uint(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
DEVICE uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) out |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return out;
}
template <class T> DEVICE T __ldg(const T* p) {
  emulated::check_global(p, sizeof(T), alignof(T));
  return *p;
}

// The primitives of prim.cuh.
namespace emulated {
DEVICE float half_to_float(uint32_t bits) { _Float16 h; uint16_t b = static_cast<uint16_t>(bits); memcpy(&h, &b, 2); return static_cast<float>(h); }
DEVICE uint32_t float_to_half(float value) { _Float16 h = static_cast<_Float16>(value); uint16_t b; memcpy(&b, &h, 2); return b; }
DEVICE uint32_t float_to_bfloat(float value) {
  uint32_t u = __float_as_uint(value);
  return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
DEVICE void mma(int operation, float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  uint32_t words[10] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(words + 6, c, 16);
  uint64_t in[5], out[2];
  memcpy(in, words, 40);
  collective(operation, 0xffffffffu, 0, in, 5, out, 2);
  memcpy(c, out, 16);
}
DEVICE void matrices(int operation, uint32_t* r, const void* row, int words) {
  uint64_t in = reinterpret_cast<uintptr_t>(row), out[2];
  collective(operation, 0xffffffffu, 0, &in, 1, out, words / 2);
  memcpy(r, out, static_cast<size_t>(words) * 4);
}
}  // namespace emulated

DEVICE uint4 load16(const void* p) { emulated::check_global(p, 16, 16); uint4 v; memcpy(&v, p, 16); return v; }
DEVICE uint32_t pack_bf16(float low, float high) { return emulated::float_to_bfloat(low) | emulated::float_to_bfloat(high) << 16; }
DEVICE uint32_t pack_f16(float low, float high) { return emulated::float_to_half(low) | emulated::float_to_half(high) << 16; }
DEVICE float f16_low(uint32_t pair) { return emulated::half_to_float(pair & 0xffff); }
DEVICE float f16_high(uint32_t pair) { return emulated::half_to_float(pair >> 16); }
DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  return pack_f16(f16_low(a) * f16_low(b) + f16_low(c), f16_high(a) * f16_high(b) + f16_high(c));
}
DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  auto low = [](uint32_t u) { return __uint_as_float(u << 16); };
  auto high = [](uint32_t u) { return __uint_as_float(u & 0xffff0000u); };
  return pack_bf16(low(a) * low(b) + low(c), high(a) * high(b) + high(c));
}
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float log2_fast(float x) { return log2f(x); }
DEVICE float reciprocal_fast(float x) { return 1.0f / x; }
DEVICE void copy16_async(void* target, const void* source, int bytes) { emulated::copy_async(target, source, static_cast<unsigned>(bytes)); }
DEVICE void copy_commit() { emulated::copy_async_commit(); }
template <int PENDING> DEVICE void copy_wait() { emulated::copy_async_wait(PENDING); }
DEVICE void ldmatrix_2(uint32_t* r, const void* row) { emulated::matrices(emulated::LDMATRIX_2, r, row, 2); }
DEVICE void ldmatrix_4(uint32_t* r, const void* row) { emulated::matrices(emulated::LDMATRIX_4, r, row, 4); }
DEVICE void ldmatrix_2_transposed(uint32_t* r, const void* row) { emulated::matrices(emulated::LDMATRIX_2_T, r, row, 2); }
DEVICE void ldmatrix_4_transposed(uint32_t* r, const void* row) { emulated::matrices(emulated::LDMATRIX_4_T, r, row, 4); }
DEVICE void mma_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) { emulated::mma(emulated::MMA_BF16, c, a, b0, b1); }
DEVICE void mma_f16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) { emulated::mma(emulated::MMA_F16, c, a, b0, b1); }
