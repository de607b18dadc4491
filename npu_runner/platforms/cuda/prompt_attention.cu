// Paged causal attention of prompts on Hopper: head dim 128, 16 bits, blocks of a multiple of 64 tokens.
//
// Online softmax (arXiv 2205.14135) in warpgroups with roles of their own, products behind the softmax of the tile
// before (arXiv 2407.08608). Constants that the host gives: GROUP query heads of a kv head, BLOCK_SIZE, IS_BFLOAT16.
//
// A tile is TOKENS tokens with all query heads of one kv head: row = token * GROUP + head, up to ROWS. A warp brings
// keys and values by tensor maps, COLUMNS tokens a stage, from the last ones to the first. Each consumer has 64 rows.

constexpr int HEAD_DIM = 128, COLUMNS = 128, CHUNK = 64, CONSUMERS = 2, ROWS = 64 * CONSUMERS, STAGES = 2;
constexpr int TOKENS = ROWS / GROUP;
constexpr int THREADS = 128 * (1 + CONSUMERS);
// Shared memory: a matrix is two halves of 64 dims, each with rows of 128 bytes, swizzled.
constexpr u32 ROW_BYTES = 128, CHUNK_BYTES = CHUNK * ROW_BYTES;
constexpr u32 QUERY_HALF = ROWS * ROW_BYTES, QUERY_BYTES = 2 * QUERY_HALF;
constexpr u32 TILE_HALF = COLUMNS * ROW_BYTES, TILE_BYTES = 2 * TILE_HALF;
constexpr u32 KEYS = QUERY_BYTES, VALUES = KEYS + STAGES * TILE_BYTES, BARRIERS = VALUES + STAGES * TILE_BYTES;
// Barriers, 8 bytes each.
constexpr u32 QUERY_FULL = BARRIERS, QUERY_EMPTY = BARRIERS + 8, TAIL = BARRIERS + 16, ITEM = BARRIERS + 24;
constexpr u32 KEY_FULL = BARRIERS + 32, KEY_EMPTY = KEY_FULL + 8 * STAGES;
constexpr u32 VALUE_FULL = KEY_EMPTY + 8 * STAGES, VALUE_EMPTY = VALUE_FULL + 8 * STAGES;

struct Work {
  const int4 *tiles;  // sequence, first row of the queries, tokens left from there, place in the context
  int num_tiles, num_kv_heads;
  const int *tables;
  int stride_table;
};

// One tile of one kv head.
struct Item {
  int kv_head, sequence, first_row, num_tokens, first_place, end, last;
  __device__ Item(const Work &work, int index) {
    const int4 tile = work.tiles[index % work.num_tiles];
    kv_head = index / work.num_tiles;
    sequence = tile.x;
    first_row = tile.y;
    num_tokens = min(tile.z, TOKENS);
    first_place = tile.w;
    end = first_place + num_tokens;
    last = (end - 1) / COLUMNS;
  }
};

// Which stage of a ring comes next, and the parity of its barriers.
struct Ring {
  u32 stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == STAGES) { stage = 0; parity ^= 1; }
  }
};

// Block numbers of 32 chunks of a context, one in each lane.
struct Blocks {
  const int *table;
  int num_chunks, first = -1, held = 0;
  __device__ Blocks(const Work &work, const Item &item)
      : table(work.tables + (long long)item.sequence * work.stride_table), num_chunks((item.end + CHUNK - 1) / CHUNK) {}
  __device__ int of(int chunk) {
    if (chunk / 32 != first) {
      first = chunk / 32;
      const int mine = first * 32 + threadIdx.x % 32;
      held = mine < num_chunks ? table[mine * CHUNK / BLOCK_SIZE] : 0;
    }
    return __shfl_sync(~0u, held, chunk % 32);
  }
};

// Chunks of tile `n` that lie in the context, to `to`.
__device__ __forceinline__ void bring_tile(u32 to, const Map &map, u32 barrier, int kv_head, Blocks &blocks, int n) {
  const int first = n * (COLUMNS / CHUNK), count = min(COLUMNS / CHUNK, blocks.num_chunks - first);
  if (threadIdx.x == 0) expect(barrier, count * 2 * CHUNK_BYTES);
  for (int i = 0; i < count; ++i) {
    const int block = blocks.of(first + i), token = (first + i) * CHUNK % BLOCK_SIZE;
    if (threadIdx.x == 0) {
      bring(to + i * CHUNK_BYTES, map, barrier, 0, kv_head, token, block);
      bring(to + i * CHUNK_BYTES + TILE_HALF, map, barrier, 64, kv_head, token, block);
    }
  }
}

// Values of the last tile: those from `valid` on may be anything, and their weight of 0 would not make NaN 0.
__device__ __forceinline__ void zero_rows(u32 tile, int valid) {
  for (int i = threadIdx.x; i < 2 * (COLUMNS - valid) * 8; i += 32) {
    const u32 half = i / ((COLUMNS - valid) * 8), place = i % ((COLUMNS - valid) * 8);
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};"
                 ::"r"(tile + half * TILE_HALF + valid * ROW_BYTES + place * 16), "r"(0) : "memory");
  }
  proxy_fence();
  __syncwarp();
}

// The warp that brings all.
struct Producer {
  const Map &q_map, &k_map, &v_map;
  const Work &work;
  u32 shared;
  Ring keys, values;
  u32 query_parity = 0, tail_parity = 0;

  __device__ void bring_queries(const Item &item, int index) {
    wait(shared + QUERY_EMPTY, query_parity ^ 1);
    if (threadIdx.x == 0) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared + ITEM), "r"(index) : "memory");
      expect(shared + QUERY_FULL, 2 * TOKENS * GROUP * ROW_BYTES);
      bring(shared, q_map, shared + QUERY_FULL, 0, item.kv_head * GROUP, item.first_row);
      bring(shared + QUERY_HALF, q_map, shared + QUERY_FULL, 64, item.kv_head * GROUP, item.first_row);
    }
    query_parity ^= 1;
  }
  __device__ void bring_keys(const Item &item, Blocks &blocks, int n) {
    wait(shared + KEY_EMPTY + 8 * keys.stage, keys.parity ^ 1);
    bring_tile(shared + KEYS + keys.stage * TILE_BYTES, k_map, shared + KEY_FULL + 8 * keys.stage, item.kv_head,
               blocks, n);
    keys.next();
  }
  __device__ void bring_values(const Item &item, Blocks &blocks, int n) {
    const u32 tile = shared + VALUES + values.stage * TILE_BYTES, full = shared + VALUE_FULL + 8 * values.stage;
    const int valid = item.end - n * COLUMNS;
    wait(shared + VALUE_EMPTY + 8 * values.stage, values.parity ^ 1);
    if (valid >= COLUMNS) {
      bring_tile(tile, v_map, full, item.kv_head, blocks, n);
    } else {
      bring_tile(tile, v_map, shared + TAIL, item.kv_head, blocks, n);
      wait(shared + TAIL, tail_parity);
      tail_parity ^= 1;
      zero_rows(tile, valid);
      if (threadIdx.x == 0) arrive(full);
    }
    values.next();
  }
  __device__ void run(u32 *counters) {
    const int num_items = work.num_tiles * work.num_kv_heads;
    for (int index = blockIdx.x, next; index < num_items; index = __shfl_sync(~0u, next, 0)) {
      if (threadIdx.x == 0) next = gridDim.x + atomicAdd(counters, 1);
      const Item item(work, index);
      Blocks blocks(work, item);
      bring_queries(item, index);
      bring_keys(item, blocks, item.last);
      for (int n = item.last - 1; n >= 0; --n) {
        bring_keys(item, blocks, n);
        bring_values(item, blocks, n + 1);
      }
      bring_values(item, blocks, 0);
    }
    wait(shared + QUERY_EMPTY, query_parity ^ 1);
    if (threadIdx.x == 0) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared + ITEM), "r"(-1) : "memory");
      arrive(shared + QUERY_FULL);
      // The last one leaves the counters as they were.
      if (atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;
    }
  }
};

__device__ __forceinline__ void multiply_keys(float (&scores)[64], u32 queries, u32 keys) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; ++k)
    multiply(scores, matrix(queries + k / 4 * QUERY_HALF + k % 4 * 32, 16),
             matrix(keys + k / 4 * TILE_HALF + k % 4 * 32, 16), k > 0);
}
__device__ __forceinline__ void multiply_values(float (&sums)[64], const u32 (&weights)[32], u32 values, bool adds) {
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k)
    multiply(sums, weights + 4 * k, matrix(values + k * 16 * ROW_BYTES, TILE_HALF), k > 0 || adds);
}

// A thread has two rows, 8 apart, and of 8 columns each two: element 4 * j + 2 * row + i is column 8 * j + i behind
// the thread's first one, 2 * (lane % 4).
struct Softmax {
  float factor, highest[2], total[2], fade[2];

  __device__ void mask(float (&scores)[64], const int (&places)[2], int first_column) {
#pragma unroll
    for (int e = 0; e < 64; ++e)
      if (e / 4 * 8 + e % 2 > places[e / 2 % 2] - first_column) scores[e] = -__int_as_float(0x7F800000);
  }
  // Scores become weights. A row may have seen nothing yet where some are masked.
  template <bool IS_MASKED> __device__ void weigh(float (&scores)[64]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float top = fmaxf(scores[2 * row], scores[2 * row + 1]);
#pragma unroll
      for (int j = 1; j < 16; ++j) top = fmaxf(top, fmaxf(scores[4 * j + 2 * row], scores[4 * j + 2 * row + 1]));
      top = fmaxf(highest[row], highest_of_four_lanes(top));
      float base = top * factor;
      if (IS_MASKED && top == -__int_as_float(0x7F800000)) base = 0;
      fade[row] = exp2_of(highest[row] * factor - base);
      highest[row] = top;
      float sums[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float &score = scores[4 * j + 2 * row + i];
          score = exp2_of(score * factor - base);
          sums[i] += score;
        }
      total[row] = total[row] * fade[row] + (sums[0] + sums[1]);
    }
  }
  __device__ void fade_sums(float (&sums)[64]) {
#pragma unroll
    for (int e = 0; e < 64; ++e) sums[e] *= fade[e / 2 % 2];
  }
};

// A warpgroup that has 64 of the tile's rows.
struct Consumer {
  const Work &work;
  u32 shared;
  int group, row;  // of this thread: the first of its two rows
  Ring keys, values;
  float sums[64], scores[64];
  u32 weights[32];
  Softmax softmax;

  __device__ void release(u32 empty) {
    if (threadIdx.x % 32 == 0) arrive(shared + empty);
  }
  __device__ void issue_keys() {
    wait(shared + KEY_FULL + 8 * keys.stage, keys.parity);
    begin_products();
    multiply_keys(scores, shared + group * 64 * ROW_BYTES, shared + KEYS + keys.stage * TILE_BYTES);
    end_products();
  }
  __device__ void release_keys() {
    release(KEY_EMPTY + 8 * keys.stage);
    keys.next();
  }
  __device__ void issue_values(bool adds) {
    wait(shared + VALUE_FULL + 8 * values.stage, values.parity);
    begin_products();
    multiply_values(sums, weights, shared + VALUES + values.stage * TILE_BYTES, adds);
    end_products();
  }
  __device__ void release_values() {
    release(VALUE_EMPTY + 8 * values.stage);
    values.next();
  }
  __device__ void round_weights() {
#pragma unroll
    for (int i = 0; i < 32; ++i) weights[i] = packed(scores[2 * i], scores[2 * i + 1]);
  }
  template <bool IS_MASKED> __device__ void step(const int (&places)[2], int n, bool adds) {
    issue_keys();
    issue_values(adds);
    await_products<1>(scores);
    release_keys();
    if (IS_MASKED) softmax.mask(scores, places, n * COLUMNS);
    softmax.weigh<IS_MASKED>(scores);
    compute_first(softmax.total[0] + softmax.total[1], shared + ITEM + 4);
    await_products<0>(sums);
    release_values();
    softmax.fade_sums(sums);
    round_weights();
  }
  __device__ void attend(const Item &item) {
    const int first = 2 * (threadIdx.x % 4);
    const int places[2] = {item.first_place + row / GROUP - first, item.first_place + (row + 8) / GROUP - first};
    const int whole = (item.first_place + 1) / COLUMNS;
    softmax.highest[0] = softmax.highest[1] = -__int_as_float(0x7F800000);
    softmax.total[0] = softmax.total[1] = 0;
    issue_keys();
    await_products<0>(scores);
    release_keys();
    softmax.mask(scores, places, item.last * COLUMNS);
    softmax.weigh<true>(scores);
    round_weights();
    int n = item.last - 1;
    for (; n >= whole; --n) step<true>(places, n, n < item.last - 1);
    for (; n >= 0; --n) step<false>(places, n, n < item.last - 1);
    release(QUERY_EMPTY);
    issue_values(item.last > 0);
    await_products<0>(sums);
    release_values();
  }
  // Four lanes have 4 bytes of each of four pieces of 16; then each has one piece.
  __device__ void exchange(u32 (&piece)[4]) {
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
      const bool is_upper = threadIdx.x & apart;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & apart) continue;
        const u32 other = __shfl_xor_sync(~0u, is_upper ? piece[i] : piece[i + apart], apart);
        if (is_upper) piece[i] = other; else piece[i + apart] = other;
      }
    }
  }
  __device__ void store(const Item &item, unsigned short *out) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float share = 1 / sum_of_four_lanes(softmax.total[r]);
      const int token = (row + 8 * r) / GROUP, head = item.kv_head * GROUP + (row + 8 * r) % GROUP;
      const long long place = (long long)(item.first_row + token) * (work.num_kv_heads * GROUP) + head;
      uint4 *to = reinterpret_cast<uint4 *>(out + place * HEAD_DIM) + threadIdx.x % 4;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        u32 piece[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float *pair = sums + 16 * part + 4 * j + 2 * r;
          piece[j] = packed(pair[0] * share, pair[1] * share);
        }
        exchange(piece);
        if (token < item.num_tokens) to[4 * part] = make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
    }
  }
  __device__ void run(unsigned short *out) {
    for (u32 parity = 0;; parity ^= 1) {
      int index;
      wait(shared + QUERY_FULL, parity);
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(index) : "r"(shared + ITEM) : "memory");
      if (index < 0) break;
      const Item item(work, index);
      attend(item);
      store(item, out);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_prompts(const __grid_constant__ Map q_map, const __grid_constant__ Map k_map, const __grid_constant__ Map v_map,
               const int4 *tiles, int num_tiles, int num_kv_heads, const int *tables, int stride_table,
               unsigned short *out, u32 *counters, float factor) {
  extern __shared__ unsigned char memory[];
  const u32 shared = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
  if (threadIdx.x == 0) {
    make_barrier(shared + QUERY_FULL, 1);
    make_barrier(shared + QUERY_EMPTY, 4 * CONSUMERS);
    make_barrier(shared + TAIL, 1);
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared + KEY_FULL + 8 * stage, 1);
      make_barrier(shared + VALUE_FULL + 8 * stage, 1);
      make_barrier(shared + KEY_EMPTY + 8 * stage, 4 * CONSUMERS);
      make_barrier(shared + VALUE_EMPTY + 8 * stage, 4 * CONSUMERS);
    }
    proxy_fence();
  }
  __syncthreads();
  const Work work{tiles, num_tiles, num_kv_heads, tables, stride_table};
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) Producer{q_map, k_map, v_map, work, shared}.run(counters);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = threadIdx.x / 128 - 1;
    Consumer consumer{work, shared, group, (int)(group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4)};
    consumer.softmax.factor = factor;
    consumer.run(out);
  }
}
