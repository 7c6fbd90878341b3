// What the attention kernels share: their arguments, work items, the soft cap, and the kernel that joins split ranges.
//
// A sequence's rows are its (query token, head of the group) pairs, row = token * group + head of the group. An item (work.py) is a tile of
// rows times a range of keys; a thread block computes one item for one kv head. Scores are kept in base 2; NONE stands for -inf, because
// NONE - NONE is 0 and not NaN.
#pragma once
#include "prim.cuh"

constexpr bool IS_QUANTISED = KV_TYPE == INT8 || KV_TYPE == FP8;
constexpr int Q_BYTES = Q_TYPE == F32 ? 4 : 2;
constexpr int KV_BYTES = IS_QUANTISED ? 1 : KV_TYPE == F32 ? 4 : 2;
constexpr int D = HEAD_SIZE;
constexpr float NONE = -1e30f;
constexpr float LN2 = 0.6931471805599453f;
constexpr int CHUNKS = D * KV_BYTES / 16;       // 16-byte pieces of a key
constexpr int PER_CHUNK = 16 / KV_BYTES;
static_assert(D % 16 == 0, "a key of 8-bit elements must be whole 16-byte chunks");

// A pair of elements in the model's type.
DEVICE uint32_t pack_q(float low, float high) {
#if Q_TYPE == BF16
  return pack_bf16(low, high);
#else
  return pack_f16(low, high);
#endif
}
DEVICE void store_q(void* row, int i, float value) {
  if constexpr (Q_TYPE == F32) static_cast<float*>(row)[i] = value;
  else static_cast<uint16_t*>(row)[i] = static_cast<uint16_t>(pack_q(value, 0.0f));
}

struct Attention {
  const char* q;             // [T, H, D], rows of a token contiguous
  const char* cache;         // [num_blocks, 2, Hkv, B, D]
  const float* scales;       // [num_blocks, 2, Hkv, B] if quantised
  const int* block_tables;   // [S, ...]
  const int* seq_lens;       // [S]
  const int* query_start;    // [S + 1]
  const int4* items;         // [n, 2]
  char* out;                 // [T, H, D]
  float* lse;                // [T, H] natural logarithm, or null
  float* part_out;           // [parts, Hkv, D]
  float* part_lse;           // [parts, Hkv] base 2
  int64_t table_stride, block_stride, scale_stride, q_stride, out_stride;  // in elements
  int group, block_shift, window;  // window 0: all keys
  float score_scale, cap;          // cap 0: none
};

#define ATTENTION_PARAMETERS                                                                                                     \
  const char *q, const char *cache, const float *scales, const int *block_tables, const int *seq_lens, const int *query_start, \
      const int4 *items, char *out, float *lse, float *part_out, float *part_lse, int64_t table_stride, int64_t block_stride,  \
      int64_t scale_stride, int64_t q_stride, int64_t out_stride, int group, int block_shift, int window, float score_scale,   \
      float cap
#define ATTENTION_ARGUMENTS                                                                                                       \
  Attention {                                                                                                                     \
    q, cache, scales, block_tables, seq_lens, query_start, items, out, lse, part_out, part_lse, table_stride, block_stride,      \
        scale_stride, q_stride, out_stride, group, block_shift, window, score_scale, cap                                         \
  }

struct Item {
  int sequence, first_row, num_rows, begin, end;
  bool is_partial;
  int part;
  int past;         // position of the sequence's first query
  int first_token;  // row of q where the sequence begins
  const int* table;
};

DEVICE Item load_item(const Attention& a, int index) {
  int4 head = __ldg(a.items + 2 * index), tail = __ldg(a.items + 2 * index + 1);
  Item item{head.x, head.y, head.z, head.w, tail.x, tail.y != 0, tail.z, 0, 0, nullptr};
  if (item.num_rows == 0) return item;  // idle: nothing else of it is defined
  item.first_token = __ldg(a.query_start + item.sequence);
  int num_queries = __ldg(a.query_start + item.sequence + 1) - item.first_token;
  item.past = __ldg(a.seq_lens + item.sequence) - num_queries;
  item.table = a.block_tables + item.sequence * a.table_stride;
  return item;
}

// A score in base 2 from q . k. With a cap c, c tanh(x) = c (1 - 2 / (1 + e^2x)); launch.py prepares both factors. tanh.approx would be off
// by 2^-11, which is more than a log-sum-exp may be.
DEVICE float score(float product, const Attention& a) {
  float x = product * a.score_scale;
  if (a.cap > 0.0f) x = a.cap * (1.0f - 2.0f * reciprocal_fast(1.0f + exp2_fast(x)));
  return x;
}

// Grid (merges, kv heads, row groups), 4 warps, a warp per row: the parts of a row, weighted by their sums.
extern "C" __global__ void __launch_bounds__(128)
merge_parts(const int4* merges, const int* query_start, const float* part_out, const float* part_lse, char* out, float* lse,
            int64_t out_stride, int group) {
  const int lane = threadIdx.x % WARP, local = blockIdx.z * 4 + threadIdx.x / WARP;
  int4 head = __ldg(merges + 2 * blockIdx.x), tail = __ldg(merges + 2 * blockIdx.x + 1);
  const int sequence = head.x, row = head.y + local, num_rows = head.z, first_part = head.w, num_parts = tail.x, step = tail.y;
  if (local >= num_rows) return;
  const int64_t heads = gridDim.y, first = (first_part + local) * heads + blockIdx.y, stride = step * heads;

  float largest = NONE;
  for (int part = lane; part < num_parts; part += WARP) largest = fmaxf(largest, part_lse[first + part * stride]);
#pragma unroll
  for (int bits = 16; bits > 0; bits >>= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, bits));

  constexpr int PER_LANE = (D + WARP - 1) / WARP;
  float sum = 0.0f, values[PER_LANE] = {};
  for (int part = 0; part < num_parts; part++) {
    float part_sum = part_lse[first + part * stride], weight = part_sum <= NONE ? 0.0f : exp2_fast(part_sum - largest);
    sum += weight;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (i * WARP + lane < D) values[i] += weight * part_out[(first + part * stride) * D + i * WARP + lane];
  }
  const int64_t token = __ldg(query_start + sequence) + row / group, h = blockIdx.y * group + row % group;
  char* target = out + (token * out_stride + h * D) * Q_BYTES;
  float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (i * WARP + lane < D) store_q(target, i * WARP + lane, values[i] * factor);
  if (lane == 0 && lse) lse[token * heads * group + h] = sum > 0.0f ? (largest + log2_fast(sum)) * LN2 : -__uint_as_float(0x7f800000u);
}
