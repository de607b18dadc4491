// Attention of prompts: causal, over a paged cache.
//
// Constants of the host, beside those of hopper_attention.cu: QUERY_HEADS of a kv head, BLOCK_SIZE, WIDENERS. A tile is
// TOKENS tokens with all query heads of one kv head: row = token * QUERY_HEADS + head, up to ROWS.

struct Prompts {
  static constexpr int GROUP = QUERY_HEADS, HEAD_DIM = DIMS, TOKENS = ROWS / GROUP, CHUNK = 64;

  const int4 *tiles;  // sequence, first row of the queries, tokens left from there, place in the context
  int num_tiles, num_heads;  // kv heads
  const int *tables;
  int stride_table;
  float value_scale;

  struct Item {
    int head, sequence, first_row, num_tokens, first_position, end;
    __device__ Item(const Prompts &params, int index) {
      const int4 tile = params.tiles[index % params.num_tiles];
      head = index / params.num_tiles;
      sequence = tile.x;
      first_row = tile.y;
      num_tokens = min(tile.z, TOKENS);
      first_position = tile.w;
      end = first_position + num_tokens;
    }
    // The last column that a row sees, and the number of tiles of columns that all rows see.
    __device__ int position(int row) const { return first_position + row / GROUP; }
    __device__ int whole() const { return (first_position + 1) / COLUMNS; }
  };

  // Block numbers of 32 chunks of a context, one in each lane.
  struct Source {
    const int *table;
    int head, num_chunks, first = -1, held = 0;
    __device__ Source(const Prompts &params, const Item &item)
        : table(params.tables + (long long)item.sequence * params.stride_table), head(item.head),
          num_chunks((item.end + CHUNK - 1) / CHUNK) {}
    __device__ int block_of(int chunk) {
      if (chunk / 32 != first) {
        first = chunk / 32;
        const int mine = first * 32 + threadIdx.x % 32;
        held = mine < num_chunks ? table[mine * CHUNK / BLOCK_SIZE] : 0;
      }
      return __shfl_sync(~0u, held, chunk % 32);
    }
    // Loads the chunks of tile `n` that lie in the context.
    __device__ void load_tile(u32 to, const TensorMap &map, u32 barrier, int n) {
      const int begin = n * (COLUMNS / CHUNK), count = min(COLUMNS / CHUNK, num_chunks - begin);
      if (threadIdx.x == 0) expect_bytes(barrier, count * CHUNK * PARTS * SPAN);
      for (int i = 0; i < count; ++i) {
        const int block = block_of(begin + i), token = (begin + i) * CHUNK % BLOCK_SIZE;
        if (threadIdx.x == 0)
          for (int part = 0; part < PARTS; ++part)
            tma_load(to + i * CHUNK * SPAN + part * TILE_PART, map, barrier, part * SPAN / 2, head, token, block);
      }
    }
  };
};

// `scales` are those of keys and values in the cache, or null. `count`, unless it is null, is the number of tiles, at
// most `num_tiles`: a captured launch has room for more of them than its step has.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_prompts(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
               const __grid_constant__ TensorMap v_map,
               const int4 *tiles, int num_tiles, int num_heads, unsigned short *out, u32 *counters, float factor,
               const int *tables, int stride_table, const float *scales, const int *count) {
  attend(q_map, k_map, v_map,
         Prompts{tiles, count ? *count : num_tiles, num_heads, tables, stride_table, scales ? scales[1] : 1}, out,
         counters, scales ? factor * scales[0] : factor);
}

__device__ __forceinline__ float low_half(u32 pair) {
  float x;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(x) : "r"(pair));
  return x;
}
// Two e4m3 numbers, the low bits of `bytes`, in 16 bits; both types hold them exactly.
__device__ __forceinline__ u32 widen(u32 bytes) {
  u32 pair;
  asm("{\n.reg .b16 two, rest;\nmov.b32 {two, rest}, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}" : "=r"(pair) : "r"(bytes));
  return IS_BFLOAT16 ? pack(low_half(pair), low_half(pair >> 16)) : pair;
}

// Converts blocks of e4m3 caches to 16 bits: block `numbers[i]` becomes block i. WIDENERS programs convert one block.
extern "C" __global__ void __launch_bounds__(256)
widen_blocks(const uint4 *k_cache, const uint4 *v_cache, uint4 *keys, uint4 *values, const int *numbers,
             int pieces_a_block) {
  const long long from = (long long)numbers[blockIdx.x / WIDENERS] * pieces_a_block;
  const long long to = (long long)(blockIdx.x / WIDENERS) * pieces_a_block;
#pragma unroll 2
  for (int i = blockIdx.x % WIDENERS * 256 + threadIdx.x; i < pieces_a_block; i += WIDENERS * 256)
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const uint4 piece = (which ? v_cache : k_cache)[from + i];
      uint4 *wide = (which ? values : keys) + 2 * (to + i);
      wide[0] = make_uint4(widen(piece.x), widen(piece.x >> 16), widen(piece.y), widen(piece.y >> 16));
      wide[1] = make_uint4(widen(piece.z), widen(piece.z >> 16), widen(piece.w), widen(piece.w >> 16));
    }
}
