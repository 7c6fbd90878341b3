// Writes keys and values into their slots of the paged cache, quantised if its elements are 8 bits. One module for all types.
#include "prim.cuh"

constexpr int PER_LANE = 8;  // elements of a row that a lane holds: heads of up to 256

// The byte of x / scale, as backends.kv_cache.quantise defines it: ties to even, NaN is 0 for int8.
template <int KV> DEVICE uint32_t quantised(float x) {
  if constexpr (KV == INT8) return x == x ? static_cast<uint32_t>(static_cast<int>(rintf(fminf(fmaxf(x, -127.0f), 127.0f)))) & 0xff : 0;
  uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7f;
  float size = fminf(__uint_as_float(magnitude), 448.0f);
  if (size < 0x1p-6f) return sign | static_cast<uint32_t>(rintf(size * 512.0f));  // subnormals are multiples of 2^-9
  uint32_t rounded = __float_as_uint(size) + 0x7ffff + (__float_as_uint(size) >> 20 & 1);
  return sign | ((rounded >> 20) - (120 << 3));  // the exponent's bias is 7, not 127
}

struct Rows {
  const char *k, *v;     // [T, Hkv, D] with any strides of tokens and heads that keep rows 16-byte aligned
  const int64_t* slots;  // [T]
  char* cache;           // [num_blocks, 2, Hkv, B, D]
  float* scales;         // [num_blocks, 2, Hkv, B] if quantised
  int64_t k_token, k_head, v_token, v_head, block_stride, scale_stride;  // in elements
  int num_kv_heads, head_size, block_shift;
};

// Grid (tokens, groups of 4 (side, kv head) pairs), 4 warps: a warp writes one row of D elements, 16-byte loads, 8-byte stores or wider.
template <int Q, int KV> DEVICE void store(const Rows& a) {
  constexpr int Q_BYTES = Q == F32 ? 4 : 2, KV_BYTES = KV == INT8 || KV == FP8 ? 1 : Q_BYTES;
  const int lane = threadIdx.x % WARP, row = blockIdx.y * 4 + threadIdx.x / WARP;
  if (row >= 2 * a.num_kv_heads) return;
  const int side = row / a.num_kv_heads, head = row % a.num_kv_heads, block_size = 1 << a.block_shift;
  const int64_t token = blockIdx.x, slot = __ldg(a.slots + token), block = slot >> a.block_shift;
  const char* source = side ? a.v + (token * a.v_token + head * a.v_head) * Q_BYTES : a.k + (token * a.k_token + head * a.k_head) * Q_BYTES;
  const int64_t place = (static_cast<int64_t>(side) * a.num_kv_heads + head) * block_size + (slot & (block_size - 1));
  char* target = a.cache + (block * a.block_stride + place * a.head_size) * KV_BYTES;
  const bool is_inside = lane * PER_LANE < a.head_size;

  constexpr int LOADS = PER_LANE * Q_BYTES / 16;
  uint4 raw[LOADS] = {};
  if (is_inside) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) raw[i] = load16(source + lane * PER_LANE * Q_BYTES + i * 16);
  }
  if constexpr (KV == Q) {
    if (is_inside) {
#pragma unroll
      for (int i = 0; i < LOADS; i++) reinterpret_cast<uint4*>(target + lane * PER_LANE * KV_BYTES)[i] = raw[i];
    }
  } else {
    float x[PER_LANE];
    const uint32_t* words = reinterpret_cast<const uint32_t*>(raw);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      if constexpr (Q == F32) x[i] = __uint_as_float(words[i]);
      if constexpr (Q == F16) x[i] = i & 1 ? f16_high(words[i / 2]) : f16_low(words[i / 2]);
      if constexpr (Q == BF16) x[i] = i & 1 ? bf16_high(words[i / 2]) : bf16_low(words[i / 2]);
    }
    // As integers, magnitudes are in the order of floats, and NaN is above them all: it must show in the scale.
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (int bits = 16; bits > 0; bits >>= 1) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, bits));
    const float scale = __uint_as_float(largest) / (KV == INT8 ? 127.0f : 448.0f), divisor = scale == 0.0f ? 1.0f : scale;
    if (is_inside) {
      uint2 bytes = {0, 0};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        bytes.x |= quantised<KV>(x[i] / divisor) << (8 * i);
        bytes.y |= quantised<KV>(x[i + 4] / divisor) << (8 * i);
      }
      *reinterpret_cast<uint2*>(target + lane * PER_LANE) = bytes;
    }
    if (lane == 0) a.scales[block * a.scale_stride + place] = scale;
  }
}

#define ROWS_PARAMETERS                                                                                                             \
  const char *k, const char *v, const int64_t *slots, char *cache, float *scales, int64_t k_token, int64_t k_head, int64_t v_token, \
      int64_t v_head, int64_t block_stride, int64_t scale_stride, int num_kv_heads, int head_size, int block_shift
#define ROWS_ARGUMENTS \
  Rows { k, v, slots, cache, scales, k_token, k_head, v_token, v_head, block_stride, scale_stride, num_kv_heads, head_size, block_shift }

extern "C" __global__ void __launch_bounds__(128)
store_f32_f32(ROWS_PARAMETERS) { store<F32, F32>(ROWS_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
store_f16_f16(ROWS_PARAMETERS) { store<F16, F16>(ROWS_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
store_f16_int8(ROWS_PARAMETERS) { store<F16, INT8>(ROWS_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
store_f16_fp8(ROWS_PARAMETERS) { store<F16, FP8>(ROWS_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
store_bf16_bf16(ROWS_PARAMETERS) { store<BF16, BF16>(ROWS_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
store_bf16_int8(ROWS_PARAMETERS) { store<BF16, INT8>(ROWS_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
store_bf16_fp8(ROWS_PARAMETERS) { store<BF16, FP8>(ROWS_ARGUMENTS); }
