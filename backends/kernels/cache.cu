// Writes to the paged cache: keys and values into their slots, quantised if KV_TYPE is 8 bits, and copies of whole blocks.
#include "prim.cuh"

constexpr int PER_LANE = 8;  // elements of a row that a lane holds: heads of up to 256

// The byte of x / scale, as backends.kv_cache.quantise defines it: ties to even, NaN is 0 for int8.
DEVICE uint32_t quantised(float x) {
  if constexpr (KV_TYPE == INT8) return x == x ? static_cast<uint32_t>(static_cast<int>(rintf(fminf(fmaxf(x, -127.0f), 127.0f)))) & 0xff : 0;
  uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7f;
  float size = fminf(__uint_as_float(magnitude), 448.0f);
  if (size < 0x1p-6f) return sign | static_cast<uint32_t>(rintf(size * 512.0f));  // subnormals are multiples of 2^-9
  uint32_t rounded = __float_as_uint(size) + 0x7ffff + (__float_as_uint(size) >> 20 & 1);
  return sign | ((rounded >> 20) - (120 << 3));  // the exponent's bias is 7, not 127
}

// Grid (tokens, groups of 4 (side, kv head) pairs), 4 warps: a warp writes one row of D elements, 16-byte loads, 8-byte stores or wider.
// k, v [T, Hkv, D] with any strides of tokens and heads that keep rows 16-byte aligned.
extern "C" __global__ void __launch_bounds__(128)
store_kv(const char* k, const char* v, const int64_t* slots, char* cache, float* scales, int64_t k_token, int64_t k_head, int64_t v_token,
         int64_t v_head, int64_t block_stride, int64_t scale_stride, int num_kv_heads, int head_size, int block_shift) {
  const int lane = threadIdx.x % WARP, row = blockIdx.y * 4 + threadIdx.x / WARP;
  if (row >= 2 * num_kv_heads) return;
  const int side = row / num_kv_heads, head = row % num_kv_heads, block_size = 1 << block_shift;
  const int64_t token = blockIdx.x, slot = __ldg(slots + token), block = slot >> block_shift;
  const char* source = side ? v + (token * v_token + head * v_head) * Q_BYTES : k + (token * k_token + head * k_head) * Q_BYTES;
  const int64_t place = (static_cast<int64_t>(side) * num_kv_heads + head) * block_size + (slot & (block_size - 1));
  char* target = cache + (block * block_stride + place * head_size) * KV_BYTES;
  const bool is_inside = lane * PER_LANE < head_size;

  constexpr int LOADS = PER_LANE * Q_BYTES / 16;
  uint4 raw[LOADS] = {};
  if (is_inside) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) raw[i] = load16(source + lane * PER_LANE * Q_BYTES + i * 16);
  }
  if constexpr (!IS_QUANTISED) {
    if (is_inside) {
#pragma unroll
      for (int i = 0; i < LOADS; i++) reinterpret_cast<uint4*>(target + lane * PER_LANE * KV_BYTES)[i] = raw[i];
    }
  } else {
    float x[PER_LANE];
    const uint32_t* words = reinterpret_cast<const uint32_t*>(raw);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      if constexpr (Q_TYPE == F32) x[i] = __uint_as_float(words[i]);
      if constexpr (Q_TYPE == F16) x[i] = i & 1 ? f16_high(words[i / 2]) : f16_low(words[i / 2]);
      if constexpr (Q_TYPE == BF16) x[i] = i & 1 ? bf16_high(words[i / 2]) : bf16_low(words[i / 2]);
    }
    // As integers, magnitudes are in the order of floats, and NaN is above them all: it must show in the scale.
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (int bits = 16; bits > 0; bits >>= 1) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, bits));
    const float scale = __uint_as_float(largest) / (KV_TYPE == INT8 ? 127.0f : 448.0f), divisor = scale == 0.0f ? 1.0f : scale;
    if (is_inside) {
      uint2 bytes = {0, 0};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        bytes.x |= quantised(x[i] / divisor) << (8 * i);
        bytes.y |= quantised(x[i + 4] / divisor) << (8 * i);
      }
      *reinterpret_cast<uint2*>(target + lane * PER_LANE) = bytes;
    }
    if (lane == 0) scales[block * scale_stride + place] = scale;
  }
}

// Grid (pairs, layers), 256 threads: one block of one layer, `block_bytes` in one run. Strides are bytes.
extern "C" __global__ void __launch_bounds__(256)
copy_blocks(char* pool, const int64_t* pairs, int64_t layer_stride, int64_t block_stride, int64_t block_bytes) {
  const int64_t from = __ldg(pairs + 2 * blockIdx.x), to = __ldg(pairs + 2 * blockIdx.x + 1);
  const char* source = pool + blockIdx.y * layer_stride + from * block_stride;
  char* target = pool + blockIdx.y * layer_stride + to * block_stride;
  for (int64_t at = threadIdx.x * 16; at < block_bytes; at += 256 * 16) *reinterpret_cast<uint4*>(target + at) = load16(source + at);
}
