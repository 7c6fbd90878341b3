// Paged attention without tensor cores: float32 models, and float16 on compute capability 7.5. Decode and ragged prefill alike.
//
// A thread block computes one item of up to ROWS rows (1 for decode without groups, else 4) for one kv head; grid (items, kv heads),
// 4 warps. LANES lanes share a key, 16 bytes each, so a warp takes WARP / LANES keys at a time, UNROLL deep to keep loads in flight; each
// group of lanes has its own online softmax. They meet by shuffles, the warps in shared memory: 16 ROWS (D + 2) bytes.
// Assumes 16-byte aligned blocks and rows.
#include "attention.cuh"

constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : CHUNKS > 1 ? 2 : 1;
constexpr int STEPS = (CHUNKS + LANES - 1) / LANES;  // chunks of a key that one lane reads
constexpr int PER_LANE_D = STEPS * PER_CHUNK;
constexpr int KEYS_AT_ONCE = WARP / LANES;
constexpr int UNROLL = 2;
constexpr int WARPS = 4;
static_assert(KV_TYPE == Q_TYPE && Q_TYPE != BF16, "float32 or float16, the cache in the model's type");

// The elements of a 16-byte chunk as float.
DEVICE void widen_chunk(float* out, uint4 chunk) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if constexpr (KV_TYPE == F32) out[w] = __uint_as_float(words[w]);
    else out[2 * w] = f16_low(words[w]), out[2 * w + 1] = f16_high(words[w]);
  }
}

// Element i of a row in the model's type.
DEVICE float load_q(const void* row, int i) {
  if constexpr (Q_TYPE == F32) return static_cast<const float*>(row)[i];
  else return f16_low(static_cast<const uint16_t*>(row)[i]);
}

template <int ROWS> DEVICE void attend(const Attention& a) {
  SHARED_MEMORY(memory);
  const Item item = load_item(a, blockIdx.x);
  if (item.num_rows == 0) return;
  const int kv_head = blockIdx.y, num_kv_heads = gridDim.y, num_heads = num_kv_heads * a.group;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, team = lane / LANES, member = lane % LANES;
  const int block_size = 1 << a.block_shift;

  float q[ROWS][PER_LANE_D], values[ROWS][PER_LANE_D], largest[ROWS], sum[ROWS];
  int position[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int row = item.first_row + (r < item.num_rows ? r : 0), token = row / a.group, h = kv_head * a.group + row % a.group;
    position[r] = item.past + token;
    const char* source = a.q + ((item.first_token + token) * a.q_stride + h * D) * Q_BYTES;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < PER_CHUNK; i++) {
        int d = (s * LANES + member) * PER_CHUNK + i;
        q[r][s * PER_CHUNK + i] = d < D ? load_q(source, d) : 0.0f;
        values[r][s * PER_CHUNK + i] = 0.0f;
      }
    largest[r] = NONE;
    sum[r] = 0.0f;
  }

  for (int base = item.begin + warp * KEYS_AT_ONCE * UNROLL; base < item.end; base += WARPS * KEYS_AT_ONCE * UNROLL) {
    uint4 k[UNROLL][STEPS], v[UNROLL][STEPS];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      int key = min(base + u * KEYS_AT_ONCE + team, item.end - 1);
      int64_t block = __ldg(item.table + (key >> a.block_shift)), slot = key & (block_size - 1);
      const char* source = a.cache + (block * a.block_stride + (static_cast<int64_t>(kv_head) * block_size + slot) * D) * KV_BYTES;
      const int64_t to_value = static_cast<int64_t>(num_kv_heads) * block_size * D * KV_BYTES;
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        int chunk = s * LANES + member;
        k[u][s] = v[u][s] = uint4{0, 0, 0, 0};
        if (CHUNKS % LANES == 0 || chunk < CHUNKS) {
          k[u][s] = load16(source + chunk * 16);
          v[u][s] = load16(source + to_value + chunk * 16);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int key = base + u * KEYS_AT_ONCE + team;
      float wide[PER_LANE_D], weight[ROWS];
#pragma unroll
      for (int s = 0; s < STEPS; s++) widen_chunk(wide + s * PER_CHUNK, k[u][s]);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float product = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE_D; i++) product += q[r][i] * wide[i];
#pragma unroll
        for (int bits = LANES / 2; bits > 0; bits >>= 1) product += __shfl_xor_sync(ALL_LANES, product, bits);
        bool is_visible = key < item.end && key <= position[r] && (a.window == 0 || key > position[r] - a.window);
        float x = is_visible ? score(product, a) : NONE;
        float raised = fmaxf(largest[r], x), decay = exp2_fast(largest[r] - raised);
        weight[r] = is_visible ? exp2_fast(x - raised) : 0.0f;
        sum[r] = sum[r] * decay + weight[r];
        largest[r] = raised;
#pragma unroll
        for (int i = 0; i < PER_LANE_D; i++) values[r][i] *= decay;
      }
#pragma unroll
      for (int s = 0; s < STEPS; s++) widen_chunk(wide + s * PER_CHUNK, v[u][s]);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < PER_LANE_D; i++) values[r][i] += weight[r] * wide[i];
    }
  }

  // Teams of the warp meet by shuffles.
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int bits = LANES; bits < WARP; bits <<= 1) {
      float other_largest = __shfl_xor_sync(ALL_LANES, largest[r], bits), other_sum = __shfl_xor_sync(ALL_LANES, sum[r], bits);
      float raised = fmaxf(largest[r], other_largest), own = exp2_fast(largest[r] - raised), other = exp2_fast(other_largest - raised);
      sum[r] = sum[r] * own + other_sum * other;
      largest[r] = raised;
#pragma unroll
      for (int i = 0; i < PER_LANE_D; i++) values[r][i] = values[r][i] * own + __shfl_xor_sync(ALL_LANES, values[r][i], bits) * other;
    }

  // Warps meet in shared memory: values [WARPS][ROWS][D], then largest and sum [WARPS][ROWS][2].
  float* shared_values = reinterpret_cast<float*>(memory);
  float* shared_state = shared_values + WARPS * ROWS * D;
  if (team == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int i = 0; i < PER_LANE_D; i++) {
        int d = (i / PER_CHUNK * LANES + member) * PER_CHUNK + i % PER_CHUNK;
        if (d < D) shared_values[(warp * ROWS + r) * D + d] = values[r][i];
      }
      if (member == 0) {
        shared_state[(warp * ROWS + r) * 2] = largest[r];
        shared_state[(warp * ROWS + r) * 2 + 1] = sum[r];
      }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < item.num_rows * D; e += WARPS * WARP) {
    int r = e / D, d = e % D;
    float top = NONE, total = 0.0f, value = 0.0f;
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, shared_state[(w * ROWS + r) * 2]);
    for (int w = 0; w < WARPS; w++) {
      float weight = exp2_fast(shared_state[(w * ROWS + r) * 2] - top);
      value += weight * shared_values[(w * ROWS + r) * D + d];
      total += weight * shared_state[(w * ROWS + r) * 2 + 1];
    }
    value = total > 0.0f ? value / total : 0.0f;
    if (item.is_partial) {
      int64_t part = static_cast<int64_t>(item.part + r) * num_kv_heads + kv_head;
      a.part_out[part * D + d] = value;
      if (d == 0) a.part_lse[part] = total > 0.0f ? top + log2_fast(total) : NONE;
    } else {
      int row = item.first_row + r;
      int64_t token = item.first_token + row / a.group, h = kv_head * a.group + row % a.group;
      store_q(a.out + (token * a.out_stride + h * D) * Q_BYTES, d, value);
      if (d == 0 && a.lse) a.lse[token * num_heads + h] = total > 0.0f ? (top + log2_fast(total)) * LN2 : -__uint_as_float(0x7f800000u);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
attention_simt_1(ATTENTION_PARAMETERS) { attend<1>(ATTENTION_ARGUMENTS); }

extern "C" __global__ void __launch_bounds__(128)
attention_simt_4(ATTENTION_PARAMETERS) { attend<4>(ATTENTION_ARGUMENTS); }
