// Paged attention on tensor cores (mma.sync m16n8k16), float16 and bfloat16, compute capability 8.0: decode, ragged and chunked prefill.
//
// A thread block computes one item for one kv head; grid (items, kv heads). A warp owns 16 rows; in `decode` the warps share one tile of rows
// and divide the keys of each stage, in `prefill` each has its own 16 rows and all keys. Keys and values go through a ring of STAGES stages
// of KEYS keys, filled by cp.async STAGES - 1 stages ahead: three, or two where a block may have only 99 KB. A row in shared memory is an odd number of 16-byte chunks long, so that the eight rows
// which one ldmatrix reads lie in different banks. Shared memory (launch.py computes the same):
//   keys   [STAGES][KEYS][ROW_CHUNKS] chunks | values, the same | scales [STAGES][2][KEYS] float if quantised | queries unless they stay in registers
// and at the end, over it, values [warps][16][D] and state [warps][16][2] float, where warps that divided the keys meet.
// Assumes 16-byte aligned rows, and that an item begins at a multiple of 8 keys.
//
// Elements of 8 bits become pairs of 16 bits after ldmatrix, which sees two elements as one: a lane receives four neighbours of a key, or two
// neighbours of two values. The order of a sum does not matter, so the queries are loaded in the order that the keys arrive in, and the two
// output tiles of a chunk hold its even and its odd columns. A key's scale multiplies its scores, a value's its weights. Weights times
// scales are bfloat16 whatever the model's type: float16 would lose small ones.
#include "attention.cuh"

constexpr int KEYS = D > 128 ? 32 : 64;
constexpr int ROW_CHUNKS = CHUNKS | 1;
constexpr int DECODE_WARPS = D > 128 ? 2 : 4;
constexpr int Q_CHUNKS = D / 8, Q_ROW_CHUNKS = Q_CHUNKS | 1;
constexpr int RING = STAGES * KEYS * ROW_CHUNKS;  // chunks
static_assert(Q_TYPE != F32 && (IS_QUANTISED || KV_TYPE == Q_TYPE), "16-bit queries over the same type or 8 bits");

DEVICE void mma_scores(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  if constexpr (Q_TYPE == BF16) mma_bf16(c, a, b0, b1);
  else mma_f16(c, a, b0, b1);
}
DEVICE void mma_values(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  if constexpr (IS_QUANTISED || Q_TYPE == BF16) mma_bf16(c, a, b0, b1);
  else mma_f16(c, a, b0, b1);
}
DEVICE uint32_t pack_weights(float low, float high) { return IS_QUANTISED ? pack_bf16(low, high) : pack_q(low, high); }

// Four 8-bit elements as two pairs of bfloat16 or float16, all exact. `SECOND` 1: pairs of neighbours; 2: of elements 0 and 2, 1 and 3.
template <int SECOND, bool TO_BF16> DEVICE void widen(uint32_t* pairs, uint32_t word) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t low = SECOND == 1 ? 2 * i : i, high = low + SECOND;
    if constexpr (KV_TYPE == INT8 && TO_BF16) {
      // 0x43xx is 128 + the seven low bits; the sign bit alone turns 128 into 256: x = (128 + low) - (128 or 256).
      uint32_t bytes = __byte_perm(word, 0, low | 4 << 4 | high << 8 | 4 << 12);
      pairs[i] = fma_bf16x2(0x43004300u | (bytes & 0x007f007fu), 0x3f803f80u, (0x43004300u | (bytes & 0x00800080u)) ^ 0x80008000u);
    } else if constexpr (KV_TYPE == INT8) {
      // 0x64xx is 1024 + the byte; with the sign bit flipped the byte is x + 128.
      uint32_t biased = __byte_perm(word ^ 0x80808080u, 0x64646464u, low | 4 << 4 | high << 8 | 4 << 12);
      pairs[i] = fma_f16x2(biased, 0x3c003c00u, 0xe480e480u);  // - 1152
    } else {
      // e4m3 bits moved into place are the value times 2^-120 (bfloat16) or 2^-8 (float16).
      uint32_t bytes = __byte_perm(word, 0, 4 | low << 4 | 4 << 8 | high << 12);
      if constexpr (TO_BF16) pairs[i] = fma_bf16x2((bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 4, 0x7b807b80u, 0x80008000u);
      else pairs[i] = fma_f16x2((bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 1, 0x5c005c00u, 0x80008000u);
    }
  }
}

template <int ROW_WARPS, int KEY_WARPS> struct Tile {
  static constexpr int THREADS = WARP * ROW_WARPS * KEY_WARPS;
  static constexpr int WARP_KEYS = KEYS / KEY_WARPS;
  // Queries in registers as long as those last: widening 8-bit elements needs some as well.
  static constexpr bool Q_IS_SHARED = D > 128 || (IS_QUANTISED && ROW_WARPS > 1 && D == 128);
  static constexpr int COPIES = (KEYS * CHUNKS + THREADS - 1) / THREADS;  // 16-byte pieces of keys that one thread copies per stage
};

template <int ROW_WARPS, int KEY_WARPS> DEVICE void attend(const Attention& a) {
  using T = Tile<ROW_WARPS, KEY_WARPS>;
  constexpr bool Q_IS_SHARED = T::Q_IS_SHARED;
  SHARED_MEMORY(memory);
  const Item item = load_item(a, blockIdx.x);
  if (item.num_rows == 0) return;
  const int kv_head = blockIdx.y, num_kv_heads = gridDim.y, num_heads = num_kv_heads * a.group;
  const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, row_warp = warp / KEY_WARPS, key_warp = warp % KEY_WARPS;
  const int block_size = 1 << a.block_shift, num_tiles = (item.end - item.begin + KEYS - 1) / KEYS;
  uint4* keys = reinterpret_cast<uint4*>(memory);
  uint4* values = keys + RING;
  float* scales = reinterpret_cast<float*>(values + RING);
  uint4* queries = reinterpret_cast<uint4*>(scales + (IS_QUANTISED ? STAGES * 2 * KEYS : 0));

  // The block of each key that this thread copies is looked up a tile ahead: the copies need not wait for the table.
  int blocks[T::COPIES];
  auto look_up = [&](int tile) {
#pragma unroll
    for (int i = 0; i < T::COPIES; i++) {
      int key = item.begin + tile * KEYS + (i * T::THREADS + thread) / CHUNKS;
      blocks[i] = tile < num_tiles ? __ldg(item.table + (min(key, item.end - 1) >> a.block_shift)) : 0;
    }
  };
  auto fetch = [&](int tile) {
    const int stage = tile % STAGES;
#pragma unroll
    for (int i = 0; i < T::COPIES; i++) {
      int piece = i * T::THREADS + thread, row = piece / CHUNKS, chunk = piece % CHUNKS;
      if (KEYS * CHUNKS % T::THREADS != 0 && row >= KEYS) break;
      int key = item.begin + tile * KEYS + row, slot = min(key, item.end - 1) & (block_size - 1), bytes = key < item.end ? 16 : 0;
      const char* source = a.cache + (blocks[i] * a.block_stride + (static_cast<int64_t>(kv_head) * block_size + slot) * D) * KV_BYTES + chunk * 16;
      const int target = (stage * KEYS + row) * ROW_CHUNKS + chunk;
      copy16_async(keys + target, source, bytes);
      copy16_async(values + target, source + static_cast<int64_t>(num_kv_heads) * block_size * D * KV_BYTES, bytes);
    }
    if constexpr (IS_QUANTISED) {
      if (thread < KEYS / 2) {  // four scales each
        int side = thread / (KEYS / 4), first = thread % (KEYS / 4) * 4, key = item.begin + tile * KEYS + first;
        int bytes = max(min(4 * (item.end - key), 16), 0);
        int64_t block = bytes ? __ldg(item.table + (key >> a.block_shift)) : 0;
        const float* source = a.scales + (bytes ? block * a.scale_stride + (side * num_kv_heads + kv_head) * block_size + (key & (block_size - 1)) : 0);
        copy16_async(scales + (stage * 2 + side) * KEYS + first, source, bytes);
      }
    }
  };
  look_up(0);
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; tile++) {
    if (tile < num_tiles) fetch(tile);
    look_up(tile + 1);
    copy_commit();
  }

  // This lane's two rows, lane / 4 and lane / 4 + 8 of the warp's 16. Rows past the item's stand in for its first and are never written.
  int position[2], local[2];
  uint32_t q[Q_IS_SHARED ? 1 : D / 16][4];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    local[r] = row_warp * 16 + lane / 4 + r * 8;
    int row = item.first_row + (local[r] < item.num_rows ? local[r] : 0), token = row / a.group;
    position[r] = item.past + token;
    if constexpr (!Q_IS_SHARED) {
      const char* source = a.q + ((item.first_token + token) * a.q_stride + (kv_head * a.group + row % a.group) * D) * Q_BYTES;
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        if constexpr (IS_QUANTISED) {
          uint2 four = *reinterpret_cast<const uint2*>(source + k * 32 + lane % 4 * 8);
          q[k][r] = four.x;
          q[k][r + 2] = four.y;
        } else {
          q[k][r] = *reinterpret_cast<const uint32_t*>(source + k * 32 + lane % 4 * 4);
          q[k][r + 2] = *reinterpret_cast<const uint32_t*>(source + k * 32 + 16 + lane % 4 * 4);
        }
      }
    }
  }
  if constexpr (Q_IS_SHARED) {
    for (int piece = thread; piece < 16 * ROW_WARPS * Q_CHUNKS; piece += T::THREADS) {
      int own = piece / Q_CHUNKS, chunk = piece % Q_CHUNKS, row = item.first_row + (own < item.num_rows ? own : 0);
      const char* source = a.q + ((item.first_token + row / a.group) * a.q_stride + (kv_head * a.group + row % a.group) * D) * Q_BYTES;
      queries[own * Q_ROW_CHUNKS + chunk] = load16(source + chunk * 16);
    }
  }
  const int first_position = item.past + item.first_row / a.group;
  const int last_position = item.past + (item.first_row + item.num_rows - 1) / a.group;

  float out[D / 8][4], largest[2] = {NONE, NONE}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < D / 8; i++) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.0f;

  for (int tile = 0; tile < num_tiles; tile++) {
    copy_wait<STAGES - 2>();
    __syncthreads();  // this tile has arrived for all, and nobody reads the stage that is filled next
    if (tile + STAGES - 1 < num_tiles) fetch(tile + STAGES - 1);
    look_up(tile + STAGES);
    copy_commit();
    const int stage = tile % STAGES;
    const uint4* k = keys + (stage * KEYS + key_warp * T::WARP_KEYS) * ROW_CHUNKS;
    const uint4* v = values + (stage * KEYS + key_warp * T::WARP_KEYS) * ROW_CHUNKS;

    float s[T::WARP_KEYS / 8][4];
#pragma unroll
    for (int n = 0; n < T::WARP_KEYS / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll (Q_IS_SHARED ? 2 : D / 16)
    for (int d = 0; d < D / 16; d++) {
      uint32_t loaded[4];
      const uint32_t* fragment = q[Q_IS_SHARED ? 0 : d];
      if constexpr (Q_IS_SHARED) {
        fragment = loaded;
        if constexpr (IS_QUANTISED) {
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const char* row = reinterpret_cast<const char*>(queries + (row_warp * 16 + lane / 4 + r * 8) * Q_ROW_CHUNKS);
            uint2 four = *reinterpret_cast<const uint2*>(row + d * 32 + lane % 4 * 8);
            loaded[r] = four.x;
            loaded[r + 2] = four.y;
          }
        } else {
          ldmatrix_4(loaded, queries + (row_warp * 16 + lane % 16) * Q_ROW_CHUNKS + 2 * d + lane / 16);
        }
      }
#pragma unroll
      for (int n = 0; n < T::WARP_KEYS / 16; n++) {
        uint32_t b[4];
        if constexpr (IS_QUANTISED) {
          uint32_t raw[2];
          ldmatrix_2(raw, k + (n * 16 + lane % 16) * ROW_CHUNKS + d);
          widen<1, Q_TYPE == BF16>(b, raw[0]);
          widen<1, Q_TYPE == BF16>(b + 2, raw[1]);
        } else {
          ldmatrix_4(b, k + (n * 16 + lane / 16 * 8 + lane % 8) * ROW_CHUNKS + 2 * d + lane / 8 % 2);
        }
        mma_scores(s[2 * n], fragment, b[0], b[1]);
        mma_scores(s[2 * n + 1], fragment, b[2], b[3]);
      }
    }

    // Columns 2(lane % 4) and the next of every 8 keys. Only tiles at an edge of what is visible compare positions.
    const int tile_begin = item.begin + tile * KEYS, first_key = tile_begin + key_warp * T::WARP_KEYS + lane % 4 * 2;
    const bool is_edge = tile_begin + KEYS > min(item.end, first_position + 1) || (a.window && tile_begin <= last_position - a.window);
    const float* k_scale = scales + stage * 2 * KEYS + key_warp * T::WARP_KEYS + lane % 4 * 2;
    float raised[2] = {largest[0], largest[1]};
#pragma unroll
    for (int n = 0; n < T::WARP_KEYS / 8; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float x = s[n][e];
        if constexpr (IS_QUANTISED) x *= k_scale[n * 8 + (e & 1)];
        s[n][e] = score(x, a);
        if (is_edge) {
          int key = first_key + n * 8 + (e & 1), at = position[e >> 1];
          if (key >= item.end || key > at || (a.window && key <= at - a.window)) s[n][e] = NONE;
        }
        raised[e >> 1] = fmaxf(raised[e >> 1], s[n][e]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      raised[r] = fmaxf(raised[r], __shfl_xor_sync(ALL_LANES, raised[r], 1));
      raised[r] = fmaxf(raised[r], __shfl_xor_sync(ALL_LANES, raised[r], 2));
      float decay = exp2_fast(largest[r] - raised[r]);
      largest[r] = raised[r];
      sum[r] *= decay;
#pragma unroll
      for (int i = 0; i < D / 8; i++) {
        out[i][2 * r] *= decay;
        out[i][2 * r + 1] *= decay;
      }
    }
#pragma unroll
    for (int n = 0; n < T::WARP_KEYS / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        bool is_hidden = is_edge && s[n][e] <= NONE;
        float weight = is_hidden ? 0.0f : exp2_fast(s[n][e] - largest[e >> 1]);
        sum[e >> 1] += weight;
        s[n][e] = IS_QUANTISED && !is_hidden ? weight * k_scale[KEYS + n * 8 + (e & 1)] : weight;
      }
#pragma unroll
    for (int n = 0; n < T::WARP_KEYS / 16; n++) {
      const uint32_t weights[4] = {pack_weights(s[2 * n][0], s[2 * n][1]), pack_weights(s[2 * n][2], s[2 * n][3]),
                                   pack_weights(s[2 * n + 1][0], s[2 * n + 1][1]), pack_weights(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
      for (int d = 0; d < D / 16; d++) {
        uint32_t b[4];
        if constexpr (IS_QUANTISED) {
          uint32_t raw[2], early[2], late[2];
          ldmatrix_2_transposed(raw, v + (n * 16 + lane % 16) * ROW_CHUNKS + d);
          widen<2, true>(early, raw[0]);
          widen<2, true>(late, raw[1]);
          b[0] = early[0], b[1] = late[0], b[2] = early[1], b[3] = late[1];
        } else {
          ldmatrix_4_transposed(b, v + (n * 16 + lane % 16) * ROW_CHUNKS + 2 * d + lane / 16);
        }
        mma_values(out[2 * d], weights, b[0], b[1]);
        mma_values(out[2 * d + 1], weights, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 1);
    sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 2);
  }

  // Pair p of a row's D / 8 pairs that this lane holds: its first column and its two sums.
  auto column = [&](int p) { return IS_QUANTISED ? p / 2 * 16 + lane % 4 * 4 + p % 2 * 2 : p * 8 + lane % 4 * 2; };
  auto low = [&](int r, int p) -> float& { return IS_QUANTISED ? out[p / 2 * 2][2 * r + p % 2] : out[p][2 * r]; };
  auto high = [&](int r, int p) -> float& { return IS_QUANTISED ? out[p / 2 * 2 + 1][2 * r + p % 2] : out[p][2 * r + 1]; };

  if constexpr (KEY_WARPS > 1) {
    float* met = reinterpret_cast<float*>(memory);
    float* state = met + ROW_WARPS * KEY_WARPS * 16 * D;
    __syncthreads();  // the ring is read no more
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = warp * 16 + lane / 4 + r * 8;
#pragma unroll
      for (int p = 0; p < D / 8; p++) *reinterpret_cast<float2*>(met + row * D + column(p)) = float2{low(r, p), high(r, p)};
      if (lane % 4 == 0) {
        state[row * 2] = largest[r];
        state[row * 2 + 1] = sum[r];
      }
    }
    __syncthreads();
    if (key_warp != 0) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = warp * 16 + lane / 4 + r * 8;
      float top = largest[r];
      for (int w = 1; w < KEY_WARPS; w++) top = fmaxf(top, state[(row + w * 16) * 2]);
      float own = exp2_fast(largest[r] - top);
      sum[r] *= own;
#pragma unroll
      for (int p = 0; p < D / 8; p++) low(r, p) *= own, high(r, p) *= own;
      for (int w = 1; w < KEY_WARPS; w++) {
        float weight = exp2_fast(state[(row + w * 16) * 2] - top);
        sum[r] += weight * state[(row + w * 16) * 2 + 1];
#pragma unroll
        for (int p = 0; p < D / 8; p++) {
          float2 other = *reinterpret_cast<const float2*>(met + (row + w * 16) * D + column(p));
          low(r, p) += weight * other.x;
          high(r, p) += weight * other.y;
        }
      }
      largest[r] = top;
    }
  }

#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (local[r] >= item.num_rows) continue;
    const float factor = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
    if (item.is_partial) {
      const int64_t part = static_cast<int64_t>(item.part + local[r]) * num_kv_heads + kv_head;
#pragma unroll
      for (int p = 0; p < D / 8; p++) *reinterpret_cast<float2*>(a.part_out + part * D + column(p)) = float2{low(r, p) * factor, high(r, p) * factor};
      if (lane % 4 == 0) a.part_lse[part] = sum[r] > 0.0f ? largest[r] + log2_fast(sum[r]) : NONE;
    } else {
      const int row = item.first_row + local[r], head = kv_head * a.group + row % a.group;
      const int64_t token = item.first_token + row / a.group;
      char* target = a.out + (token * a.out_stride + head * D) * Q_BYTES;
#pragma unroll
      for (int p = 0; p < D / 8; p++) *reinterpret_cast<uint32_t*>(target + column(p) * 2) = pack_q(low(r, p) * factor, high(r, p) * factor);
      if (lane % 4 == 0 && a.lse)
        a.lse[token * num_heads + head] = sum[r] > 0.0f ? (largest[r] + log2_fast(sum[r])) * LN2 : -__uint_as_float(0x7f800000u);
    }
  }
}

// 16 rows; four warps divide the keys of a stage (two for D = 256).
extern "C" __global__ void __launch_bounds__(WARP * DECODE_WARPS)
attention_mma_decode(ATTENTION_PARAMETERS) { attend<1, DECODE_WARPS>(ATTENTION_ARGUMENTS); }

// 64 rows; four warps of 16.
extern "C" __global__ void __launch_bounds__(128)
attention_mma_prefill(ATTENTION_PARAMETERS) { attend<4, 1>(ATTENTION_ARGUMENTS); }
