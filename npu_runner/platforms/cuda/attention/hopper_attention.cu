// Attention on Hopper: tiles of 64 * CONSUMERS rows of queries over tiles of COLUMNS keys and values, in 16 bits.
//
// Online softmax (arXiv 2205.14135) with specialised warpgroups: the MMAs of a tile overlap the softmax of the tile
// before (arXiv 2407.08608). A producer warp copies queries, keys and values by TMA, from a context's last tile to its
// first. A block's number is a coordinate of the tensor map, so paged blocks need no gather. Each consumer warpgroup
// has 64 rows. Programs stay, and take the next tile from a counter, the longest first. The file behind this one
// defines Params: its tiles, num_tiles, num_heads, and value_scale, a factor of the results. An Item is one tile of one
// head, and its Source loads keys and values.
//
// Constants of the host: DIMS (64, 72, 80, 128) of a head, SPAN (128, 64) bytes of a row in shared memory, CONSUMERS
// (2, 3), COLUMNS (128, 112, 96), STAGES.

constexpr int ROWS = 64 * CONSUMERS, THREADS = 128 * (1 + CONSUMERS);
// Shared memory: a matrix is parts of SPAN bytes a row, swizzled. The rows of a part are consecutive.
constexpr int SCORE_DIMS = (DIMS + 15) / 16 * 16;  // K of the MMAs for scores is a multiple of 16
constexpr int PARTS = (2 * SCORE_DIMS + SPAN - 1) / SPAN;
constexpr u32 QUERY_PART = ROWS * SPAN, QUERY_BYTES = PARTS * QUERY_PART;
constexpr u32 TILE_PART = COLUMNS * SPAN, TILE_BYTES = PARTS * TILE_PART;
constexpr u32 KEYS = QUERY_BYTES, VALUES = KEYS + STAGES * TILE_BYTES, BARRIERS = VALUES + STAGES * TILE_BYTES;
// Barriers, 8 bytes each.
constexpr u32 QUERY_FULL = BARRIERS, QUERY_EMPTY = BARRIERS + 8, TAIL = BARRIERS + 16, ITEM = BARRIERS + 24;
constexpr u32 KEY_FULL = BARRIERS + 32, KEY_EMPTY = KEY_FULL + 8 * STAGES;
constexpr u32 VALUE_FULL = KEY_EMPTY + 8 * STAGES, VALUE_EMPTY = VALUE_FULL + 8 * STAGES;

// Zeroes values behind the context's end: they may be anything, and a weight of 0 does not make NaN 0.
__device__ __forceinline__ void zero_rows(u32 tile, int valid) {
  const int a_part = (COLUMNS - valid) * (SPAN / 16);
  for (int i = threadIdx.x; i < PARTS * a_part; i += 32)
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};"
                 ::"r"(tile + i / a_part * TILE_PART + valid * SPAN + i % a_part * 16), "r"(0) : "memory");
  proxy_fence();
  __syncwarp();
}

// The warp that loads queries, keys and values.
template <class Params> struct Producer {
  using Item = typename Params::Item;
  using Source = typename Params::Source;

  const TensorMap &q_map, &k_map, &v_map;
  const Params &params;
  u32 shared;
  Ring<STAGES> keys, values;
  u32 query_parity = 0, tail_parity = 0;

  __device__ void load_queries(const Item &item, int index) {
    wait(shared + QUERY_EMPTY, query_parity ^ 1);
    if (threadIdx.x == 0) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared + ITEM), "r"(index) : "memory");
      expect_bytes(shared + QUERY_FULL, PARTS * Params::TOKENS * Params::GROUP * SPAN);
      for (int part = 0; part < PARTS; ++part)
        tma_load(shared + part * QUERY_PART, q_map, shared + QUERY_FULL, part * SPAN / 2,
              item.head * Params::GROUP, item.first_row);
    }
    query_parity ^= 1;
  }
  __device__ void load_keys(Source &source, int n) {
    wait(shared + KEY_EMPTY + 8 * keys.stage, keys.parity ^ 1);
    source.load_tile(shared + KEYS + keys.stage * TILE_BYTES, k_map, shared + KEY_FULL + 8 * keys.stage, n);
    keys.next();
  }
  __device__ void load_values(Source &source, int n, int valid) {
    const u32 tile = shared + VALUES + values.stage * TILE_BYTES, full = shared + VALUE_FULL + 8 * values.stage;
    wait(shared + VALUE_EMPTY + 8 * values.stage, values.parity ^ 1);
    if (valid >= COLUMNS) {
      source.load_tile(tile, v_map, full, n);
    } else {
      source.load_tile(tile, v_map, shared + TAIL, n);
      wait(shared + TAIL, tail_parity);
      tail_parity ^= 1;
      zero_rows(tile, valid);
      if (threadIdx.x == 0) arrive(full);
    }
    values.next();
  }
  __device__ void run(u32 *counters) {
    const int num_items = params.num_tiles * params.num_heads;
    for (int index = blockIdx.x, next; index < num_items; index = __shfl_sync(~0u, next, 0)) {
      if (threadIdx.x == 0) next = gridDim.x + atomicAdd(counters, 1);
      const Item item(params, index);
      Source source(params, item);
      load_queries(item, index);
      int n = (item.end - 1) / COLUMNS;
      load_keys(source, n);
      for (; n > 0; --n) {
        load_keys(source, n - 1);
        load_values(source, n, item.end - n * COLUMNS);
      }
      load_values(source, 0, item.end);
    }
    wait(shared + QUERY_EMPTY, query_parity ^ 1);
    if (threadIdx.x == 0) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared + ITEM), "r"(-1) : "memory");
      arrive(shared + QUERY_FULL);
      // The last program resets the counters.
      if (atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;
    }
  }
};

__device__ __forceinline__ void multiply_keys(float (&scores)[COLUMNS / 2], u32 queries, u32 keys) {
  constexpr int A_PART = SPAN / 32;
#pragma unroll
  for (int k = 0; k < SCORE_DIMS / 16; ++k)
    wgmma(scores, smem_descriptor<SPAN>(queries + k / A_PART * QUERY_PART + k % A_PART * 32, 16),
             smem_descriptor<SPAN>(keys + k / A_PART * TILE_PART + k % A_PART * 32, 16), k > 0);
}
__device__ __forceinline__ void multiply_values(float (&acc)[DIMS / 2], const u32 (&weights)[COLUMNS / 4], u32 values,
                                                bool adds) {
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k)
    wgmma(acc, weights + 4 * k, smem_descriptor<SPAN>(values + k * 16 * SPAN, TILE_PART), k > 0 || adds);
}

// A thread has two rows, 8 apart, and two of each 8 columns: element 4 * j + 2 * row + i is column 8 * j + i from the
// thread's first one, 2 * (lane % 4).
struct Softmax {
  float factor, row_max[2], row_sum[2], rescale[2];

  __device__ void mask(float (&scores)[COLUMNS / 2], const int (&positions)[2], int first_column) {
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; ++e)
      if (e / 4 * 8 + e % 2 > positions[e / 2 % 2] - first_column) scores[e] = -__int_as_float(0x7F800000);
  }
  // Turns scores into weights. With masks a row may have seen nothing yet.
  template <bool IS_MASKED> __device__ void weigh(float (&scores)[COLUMNS / 2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float top = fmaxf(scores[2 * row], scores[2 * row + 1]);
#pragma unroll
      for (int j = 1; j < COLUMNS / 8; ++j) top = fmaxf(top, fmaxf(scores[4 * j + 2 * row],
                                                                   scores[4 * j + 2 * row + 1]));
      top = fmaxf(row_max[row], max_of_four_lanes(top));
      float base = top * factor;
      if (IS_MASKED && top == -__int_as_float(0x7F800000)) base = 0;
      rescale[row] = fast_exp2(row_max[row] * factor - base);
      row_max[row] = top;
      float acc[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float &score = scores[4 * j + 2 * row + i];
          score = fast_exp2(score * factor - base);
          acc[i] += score;
        }
      row_sum[row] = row_sum[row] * rescale[row] + (acc[0] + acc[1]);
    }
  }
  __device__ void rescale_acc(float (&acc)[DIMS / 2]) {
#pragma unroll
    for (int e = 0; e < DIMS / 2; ++e) acc[e] *= rescale[e / 2 % 2];
  }
};

// A warpgroup with 64 of the tile's rows.
template <class Params> struct Consumer {
  using Item = typename Params::Item;

  const Params &params;
  u32 shared;
  int group, row;  // of this thread: the first of its two rows
  Ring<STAGES> keys, values;
  float acc[DIMS / 2], scores[COLUMNS / 2];
  u32 weights[COLUMNS / 4];
  Softmax softmax;

  __device__ void release(u32 empty) {
    if (threadIdx.x % 32 == 0) arrive(shared + empty);
  }
  __device__ void issue_keys() {
    wait(shared + KEY_FULL + 8 * keys.stage, keys.parity);
    wgmma_fence();
    multiply_keys(scores, shared + group * 64 * SPAN, shared + KEYS + keys.stage * TILE_BYTES);
    wgmma_commit();
  }
  template <int MOST> __device__ void await_scores() {
    wgmma_wait<MOST>();
    fence_registers(scores);
    release(KEY_EMPTY + 8 * keys.stage);
    keys.next();
  }
  __device__ void issue_values(bool adds) {
    wait(shared + VALUE_FULL + 8 * values.stage, values.parity);
    wgmma_fence();
    multiply_values(acc, weights, shared + VALUES + values.stage * TILE_BYTES, adds);
    wgmma_commit();
  }
  __device__ void await_sums() {
    wgmma_wait<0>();
    fence_registers(acc);
    release(VALUE_EMPTY + 8 * values.stage);
    values.next();
  }
  __device__ void round_weights() {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
  }
  template <bool IS_MASKED> __device__ void step(const int (&positions)[2], int n, bool adds) {
    issue_keys();
    issue_values(adds);
    await_scores<1>();
    if (IS_MASKED) softmax.mask(scores, positions, n * COLUMNS);
    softmax.weigh<IS_MASKED>(scores);
    compute_first(softmax.row_sum[0] + softmax.row_sum[1], shared + ITEM + 4);
    await_sums();
    softmax.rescale_acc(acc);
    round_weights();
  }
  __device__ void attend(const Item &item) {
    const int first = 2 * (threadIdx.x % 4), last = (item.end - 1) / COLUMNS, whole = item.whole();
    const int positions[2] = {item.position(row) - first, item.position(row + 8) - first};
    softmax.row_max[0] = softmax.row_max[1] = -__int_as_float(0x7F800000);
    softmax.row_sum[0] = softmax.row_sum[1] = 0;
    issue_keys();
    await_scores<0>();
    softmax.mask(scores, positions, last * COLUMNS);
    softmax.weigh<true>(scores);
    round_weights();
    int n = last - 1;
    for (; n >= whole; --n) step<true>(positions, n, n < last - 1);
    for (; n >= 0; --n) step<false>(positions, n, n < last - 1);
    release(QUERY_EMPTY);
    issue_values(last > 0);
    await_sums();
  }
  // Four lanes have 4 bytes of each of four 16-byte pieces. Afterwards each lane has one piece.
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
    constexpr int GROUP = Params::GROUP, HEAD_DIM = Params::HEAD_DIM;
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float share = params.value_scale / sum_of_four_lanes(softmax.row_sum[r]);
      const int token = (row + 8 * r) / GROUP, head = item.head * GROUP + (row + 8 * r) % GROUP;
      const long long row_at = (long long)(item.first_row + token) * (params.num_heads * GROUP) + head;
      uint4 *to = reinterpret_cast<uint4 *>(out + row_at * HEAD_DIM) + lane;
#pragma unroll
      for (int part = 0; part < (DIMS + 31) / 32; ++part) {
        u32 piece[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int e = 16 * part + 4 * j + 2 * r;
          piece[j] = e < DIMS / 2 ? pack(acc[e] * share, acc[e + 1] * share) : 0;
        }
        exchange(piece);
        if (token < item.num_tokens && 32 * part + 8 * lane < HEAD_DIM)
          to[4 * part] = make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
    }
  }
  __device__ void run(unsigned short *out) {
    for (u32 parity = 0;; parity ^= 1) {
      int index;
      wait(shared + QUERY_FULL, parity);
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(index) : "r"(shared + ITEM) : "memory");
      if (index < 0) break;
      const Item item(params, index);
      attend(item);
      store(item, out);
    }
  }
};

__device__ __forceinline__ void make_barriers(u32 shared) {
  init_barrier(shared + QUERY_FULL, 1);
  init_barrier(shared + QUERY_EMPTY, 4 * CONSUMERS);
  init_barrier(shared + TAIL, 1);
  for (int stage = 0; stage < STAGES; ++stage) {
    init_barrier(shared + KEY_FULL + 8 * stage, 1);
    init_barrier(shared + VALUE_FULL + 8 * stage, 1);
    init_barrier(shared + KEY_EMPTY + 8 * stage, 4 * CONSUMERS);
    init_barrier(shared + VALUE_EMPTY + 8 * stage, 4 * CONSUMERS);
  }
  proxy_fence();
}

template <class Params>
__device__ __forceinline__ void attend(const TensorMap &q_map, const TensorMap &k_map, const TensorMap &v_map,
                                       const Params &params,
                                       unsigned short *out, u32 *counters, float factor) {
  extern __shared__ unsigned char memory[];
  const u32 shared = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  // Registers per thread: the producer releases those that the consumers need.
  constexpr u32 FEW = CONSUMERS == 2 ? 40 : 32, MANY = CONSUMERS == 2 ? 232 : 160;
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
    if (threadIdx.x < 32) Producer<Params>{q_map, k_map, v_map, params, shared}.run(counters);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
    const int group = threadIdx.x / 128 - 1, row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    Consumer<Params> consumer{params, shared, group, row};
    consumer.softmax.factor = factor;
    consumer.run(out);
  }
}
