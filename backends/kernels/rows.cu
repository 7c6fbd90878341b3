// The operations of a decoder on rows that are neither attention nor products of matrices: norms, rotation, activation. One module for all types.
//
// Each replaces 4 to 20 kernels of plain torch, of which a decode step would launch some 1,500 in a model of 32 layers: at batch 1 they would
// take as long as reading the weights. Sums are float32; a thread adds in a fixed order, so a row's bits depend on that row alone.
// Assumes widths that are multiples of 8 and rows that begin at multiples of 16 bytes, but for the rotation. Compute capability 8.0.
#include "prim.cuh"

constexpr int MAX_CHUNKS = 4;  // of 8 numbers that a thread holds: rows of up to 32,768 with 1,024 threads
constexpr float LOG2E = 1.4426950408889634f;

template <int Q> constexpr int BYTES = Q == F32 ? 4 : 2;

template <int Q> DEVICE float load_one(const char* row, int i) {
  if constexpr (Q == F32) return reinterpret_cast<const float*>(row)[i];
  const uint32_t bits = reinterpret_cast<const uint16_t*>(row)[i];
  return Q == F16 ? f16_low(bits) : bf16_low(bits);
}
template <int Q> DEVICE uint32_t pack(float low, float high) {
  if constexpr (Q == F16) return pack_f16(low, high);
  else return pack_bf16(low, high);
}
template <int Q> DEVICE void store_one(char* row, int i, float x) {
  if constexpr (Q == F32) reinterpret_cast<float*>(row)[i] = x;
  else reinterpret_cast<uint16_t*>(row)[i] = static_cast<uint16_t>(pack<Q>(x, 0.0f));
}
template <int Q> DEVICE void load_eight(float* x, const char* from) {
  const uint4 first = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {first.x, first.y, first.z, first.w};
  if constexpr (Q == F32) {
    const uint4 second = *reinterpret_cast<const uint4*>(from + 16);
    const uint32_t more[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __uint_as_float(words[i]), x[4 + i] = __uint_as_float(more[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = Q == F16 ? f16_low(words[i]) : bf16_low(words[i]);
      x[2 * i + 1] = Q == F16 ? f16_high(words[i]) : bf16_high(words[i]);
    }
  }
}
// Store eight numbers and leave in x what was stored.
template <int Q> DEVICE void store_eight(char* to, float* x) {
  if constexpr (Q == F32) {
#pragma unroll
    for (int i = 0; i < 2; i++) reinterpret_cast<float4*>(to)[i] = float4{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      words[i] = pack<Q>(x[2 * i], x[2 * i + 1]);
      x[2 * i] = Q == F16 ? f16_low(words[i]) : bf16_low(words[i]);
      x[2 * i + 1] = Q == F16 ? f16_high(words[i]) : bf16_high(words[i]);
    }
    *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
  }
}
template <int Q> DEVICE void load_weights(float* w, const char* weight, int is_float32, int first) {
  if (is_float32) load_eight<F32>(w, weight + first * 4);
  else load_eight<Q>(w, weight + first * BYTES<Q>);
}
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int bits = 16; bits > 0; bits >>= 1) x += __shfl_xor_sync(ALL_LANES, x, bits);
  return x;
}

// Grid (rows), whole warps, up to 1,024 threads; shared memory: a float a warp. `residual` may be null; else it becomes residual + x, and
// the norm is that of the (rounded) sum. Strides in elements; out [T, width] has no gaps.
template <int Q>
DEVICE void norm(const char* x, char* residual, const char* weight, char* out, int64_t x_stride, int64_t residual_stride, int width,
                 int is_float32, float eps) {
  SHARED_MEMORY(memory);
  float* sums = reinterpret_cast<float*>(memory);
  const int64_t row = blockIdx.x;
  float v[MAX_CHUNKS][8], sum = 0.0f;
#pragma unroll
  for (int k = 0; k < MAX_CHUNKS; k++) {
    const int first = (k * blockDim.x + threadIdx.x) * 8;
    if (first >= width) break;
    load_eight<Q>(v[k], x + (row * x_stride + first) * BYTES<Q>);
    if (residual) {
      char* place = residual + (row * residual_stride + first) * BYTES<Q>;
      float old[8];
      load_eight<Q>(old, place);
#pragma unroll
      for (int i = 0; i < 8; i++) v[k][i] += old[i];
      store_eight<Q>(place, v[k]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum += v[k][i] * v[k][i];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < static_cast<int>(blockDim.x) / WARP; w++) total += sums[w];
  const float scale = 1.0f / sqrtf(total / width + eps);
#pragma unroll
  for (int k = 0; k < MAX_CHUNKS; k++) {
    const int first = (k * blockDim.x + threadIdx.x) * 8;
    if (first >= width) break;
    float w[8];
    load_weights<Q>(w, weight, is_float32, first);
#pragma unroll
    for (int i = 0; i < 8; i++) v[k][i] *= scale * w[i];
    store_eight<Q>(out + (row * width + first) * BYTES<Q>, v[k]);
  }
}

// Grid (tokens, groups of 4 heads), 4 warps: a warp normalises one head of up to 256 numbers, in place.
template <int Q>
DEVICE void norm_heads(char* x, const char* weight, int64_t token_stride, int64_t head_stride, int num_heads, int head_size, int is_float32,
                       float eps) {
  const int lane = threadIdx.x % WARP, head = blockIdx.y * 4 + threadIdx.x / WARP, first = lane * 8;
  if (head >= num_heads) return;
  char* place = x + (static_cast<int64_t>(blockIdx.x) * token_stride + head * head_stride + first) * BYTES<Q>;
  float v[8] = {}, sum = 0.0f;
  if (first < head_size) load_eight<Q>(v, place);
#pragma unroll
  for (int i = 0; i < 8; i++) sum += v[i] * v[i];
  const float scale = 1.0f / sqrtf(warp_sum(sum) / head_size + eps);
  if (first >= head_size) return;
  float w[8];
  load_weights<Q>(w, weight, is_float32, first);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= scale * w[i];
  store_eight<Q>(place, v);
}

// Grid (tokens), 128 threads: turns the pairs (i, i + half) of every head of q and k in place. cos, sin [T, half].
template <int Q>
DEVICE void rotate(char* q, char* k, const float* cos, const float* sin, int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head,
                   int num_heads, int num_kv_heads, int half) {
  const int64_t token = blockIdx.x;
  for (int i = threadIdx.x; i < (num_heads + num_kv_heads) * half; i += blockDim.x) {
    const int head = i / half, pair = i % half;
    char* row = head < num_heads ? q + (token * q_token + head * q_head) * BYTES<Q>
                                 : k + (token * k_token + (head - num_heads) * k_head) * BYTES<Q>;
    const float c = cos[token * half + pair], s = sin[token * half + pair];
    const float low = load_one<Q>(row, pair), high = load_one<Q>(row, pair + half);
    store_one<Q>(row, pair, low * c - high * s);
    store_one<Q>(row, pair + half, high * c + low * s);
  }
}

DEVICE float activated(float x, int activation) {
  if (activation == 0) return x * reciprocal_fast(1.0f + exp2_fast(-x * LOG2E));
  if (activation == 1) return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
}

// Grid (pieces of 2,048 columns, tokens), 256 threads. gate_up [T, 2 width], the gate first; out [T, width] has no gaps.
// Activations: 0 SiLU, 1 GELU by tanh, 2 GELU.
template <int Q> DEVICE void gate(const char* gate_up, char* out, int64_t stride, int width, int activation) {
  const int64_t row = blockIdx.y;
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (first >= width) return;
  const char* from = gate_up + (row * stride + first) * BYTES<Q>;
  float x[8], up[8];
  load_eight<Q>(x, from);
  load_eight<Q>(up, from + static_cast<int64_t>(width) * BYTES<Q>);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = activated(x[i], activation) * up[i];
  store_eight<Q>(out + (row * width + first) * BYTES<Q>, x);
}

#define NORM_PARAMETERS                                                                                                    \
  const char *x, char *residual, const char *weight, char *out, int64_t x_stride, int64_t residual_stride, int width, \
      int is_float32, float eps
#define NORM_ARGUMENTS x, residual, weight, out, x_stride, residual_stride, width, is_float32, eps
#define HEADS_PARAMETERS \
  char *x, const char *weight, int64_t token_stride, int64_t head_stride, int num_heads, int head_size, int is_float32, float eps
#define HEADS_ARGUMENTS x, weight, token_stride, head_stride, num_heads, head_size, is_float32, eps
#define ROTATE_PARAMETERS                                                                                                      \
  char *q, char *k, const float *cos, const float *sin, int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head, \
      int num_heads, int num_kv_heads, int half
#define ROTATE_ARGUMENTS q, k, cos, sin, q_token, q_head, k_token, k_head, num_heads, num_kv_heads, half
#define GATE_PARAMETERS const char *gate_up, char *out, int64_t stride, int width, int activation
#define GATE_ARGUMENTS gate_up, out, stride, width, activation

extern "C" __global__ void __launch_bounds__(1024)
norm_f32(NORM_PARAMETERS) { norm<F32>(NORM_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
norm_heads_f32(HEADS_PARAMETERS) { norm_heads<F32>(HEADS_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
rotate_f32(ROTATE_PARAMETERS) { rotate<F32>(ROTATE_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(256)
gate_f32(GATE_PARAMETERS) { gate<F32>(GATE_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(1024)
norm_f16(NORM_PARAMETERS) { norm<F16>(NORM_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
norm_heads_f16(HEADS_PARAMETERS) { norm_heads<F16>(HEADS_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
rotate_f16(ROTATE_PARAMETERS) { rotate<F16>(ROTATE_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(256)
gate_f16(GATE_PARAMETERS) { gate<F16>(GATE_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(1024)
norm_bf16(NORM_PARAMETERS) { norm<BF16>(NORM_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
norm_heads_bf16(HEADS_PARAMETERS) { norm_heads<BF16>(HEADS_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128)
rotate_bf16(ROTATE_PARAMETERS) { rotate<BF16>(ROTATE_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(256)
gate_bf16(GATE_PARAMETERS) { gate<BF16>(GATE_ARGUMENTS); }
