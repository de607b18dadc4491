// GEMM y = x W^T of 1 to 16 rows on Hopper. Reading the weight is its bound.
//
// A program has a share of the outputs, in tiles of 16, N_TILES of them at once, and all of K. Each warp has slices of
// 128 bytes of the rows: the first warp slices 0, WARPS, 2 * WARPS, ... It copies the weight's slices by TMA to a ring
// of its own, before earlier kernels have ended: the weight depends on none. No warp waits for another until the end. A
// warp reads its slices of x from global memory into registers. 16 outputs are the rows of an MMA, 8 rows of x its
// columns. e4m3 is multiplied in float16, which holds it exactly. A thread multiplies what it reads, 16 bytes at once:
// K may have any order that both operands share. At the end the accumulators of all warps are added, in the order of
// the warps.
//
// Constants of the host: ITEM (bytes of an element: 1 is e4m3, 2 the type that IS_BFLOAT16 names), IN_BLOCKS (scales of
// 128 x 128, and of 128 inputs of a row), TILE_M (8 or 16), N_TILES, WARPS, STAGES, FIRST.

constexpr int MMA_N = 16, SLICE = 128, BLOCK_TILES = 128 / MMA_N, HALVES = TILE_M / 8, THREADS = 32 * WARPS;
constexpr bool HAS_OUTPUT_SCALES = ITEM == 1 && !IN_BLOCKS;
// Pairs of outputs that a thread stores.
constexpr int PAIRS = (N_TILES * TILE_M * MMA_N / 2 + THREADS - 1) / THREADS;
static_assert(PAIRS <= 2);
constexpr u32 STAGE_BYTES = MMA_N * SLICE;
// Accumulators of a warp: N_TILES times TILE_M times MMA_N outputs, which start 20 banks apart.
constexpr int PITCH = MMA_N + 4, ACCUMULATORS = N_TILES * TILE_M * PITCH;
constexpr u32 EXCHANGE = WARPS * STAGES * STAGE_BYTES, FULL = EXCHANGE + 4 * WARPS * ACCUMULATORS;

// x is (M, K), the weight (N, K), both counted in bytes. Scales of x are `group_stride` apart between groups. Scales of
// the weight are one per output, or one where scale_stride is 0, or (N / 128, groups).
struct Params {
  int m, n, num_slices;
  i64 stride_x, group_stride, scale_stride;
  const u8 *x;
  const float *x_scales, *scales;
  const u16 *bias;
  u16 *out;
};

__device__ __forceinline__ uint4 read_global(const u8 *from) {
  uint4 piece;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(from));
  return piece;
}
__device__ __forceinline__ void mma(float (&acc)[4], const u32 (&left)[4], u32 right_0, u32 right_1) {
  if (IS_BFLOAT16 && ITEM == 2) MMA(asm, "bf16"); else MMA(asm, "f16");
}
__device__ __forceinline__ void tma_load_slice(u32 to, const TensorMap &map, u32 barrier, int row, int slice,
                                               u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(0), "r"(row), "r"(slice), "l"(policy) : "memory");
}

// The order of a warp's stages: N_TILES tiles at once, slice after slice, tile after tile.
struct SliceCursor {
  int first, end, slice, num_slices, i = 0;
  __device__ SliceCursor(const Params &params) : slice(threadIdx.x / 32), num_slices(params.num_slices) {
    const int n_tiles = params.n / MMA_N;
    first = (i64)n_tiles * blockIdx.x / gridDim.x;
    end = slice < num_slices ? (i64)n_tiles * (blockIdx.x + 1) / gridDim.x : first;
  }
  __device__ bool is_there() const { return first < end; }
  __device__ int count() const { return min(N_TILES, end - first); }
  __device__ int row() const { return (first + i) * MMA_N; }
  __device__ void next() {
    if (++i < count()) return;
    i = 0;
    slice += WARPS;
    if (slice < num_slices) return;
    slice = threadIdx.x / 32;
    first += N_TILES;
  }
};

// A warp's ring, which its first thread fills. At first it keeps no more than FIRST loads in flight, until the ring is
// full: more would delay the small kernels before this one, on which x depends.
struct WeightRing {
  const TensorMap &map;
  u32 shared, barriers, stage = 0, parity = 0;
  SliceCursor cursor;
  u64 policy;

  __device__ WeightRing(const TensorMap &map, const Params &params, u32 all)
      : map(map), shared(all + threadIdx.x / 32 * STAGES * STAGE_BYTES),
        barriers(all + FULL + threadIdx.x / 32 * STAGES * 8), cursor(params) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < STAGES; ++i) init_barrier(barriers + 8 * i, 1);
      proxy_fence();
      for (int i = 0; i < STAGES && cursor.is_there(); ++i) {
        if (i >= FIRST) wait(barriers + 8 * (i - FIRST), 0);
        load_next(i);
      }
    }
    __syncwarp();
  }
  // Called by the first thread.
  __device__ void load_next(int to) {
    if (!cursor.is_there()) return;
    expect_bytes(barriers + 8 * to, STAGE_BYTES);
    tma_load_slice(shared + to * STAGE_BYTES, map, barriers + 8 * to, cursor.row(), cursor.slice, policy);
    cursor.next();
  }
  __device__ void wait_full() const { wait(barriers + 8 * stage, parity); }
  __device__ u32 at() const { return shared + stage * STAGE_BYTES; }
  // Releases a stage that was read, and loads the next one into it.
  __device__ void next() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) load_next(stage);
    if (++stage == STAGES) { stage = 0; parity ^= 1; }
  }
};

// A warp's slice of x: 2 times 16 bytes of row `group` (and of the row 8 behind it), and the scales of 2 columns.
struct XSlice {
  uint4 pieces[HALVES][2];
  float scales[HALVES][2];
};

// Scales of two outputs, and of a row of x.
struct OutputScales {
  float low, high, row;
};

struct WarpGemm {
  const Params &params;
  WeightRing &ring;
  const int warp, lane, group, member;
  float acc[N_TILES][HALVES][4];

  __device__ WarpGemm(const Params &params, WeightRing &ring)
      : params(params), ring(ring), warp(threadIdx.x / 32), lane(threadIdx.x % 32), group(lane / 4), member(lane % 4) {}

  __device__ void load_x(XSlice &rows, int slice) const {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const u8 *x = params.x + min(8 * h + group, params.m - 1) * params.stride_x + slice * SLICE + member * 16;
      rows.pieces[h][0] = read_global(x);
      rows.pieces[h][1] = read_global(x + 64);
      if (IN_BLOCKS)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          rows.scales[h][i] = params.x_scales[slice * params.group_stride + min(8 * h + 2 * member + i, params.m - 1)];
    }
  }
  // The scales of the blocks of the first and of the last tile: N_TILES are no more than a block has.
  __device__ void load_scales(float (&scales)[2], int first, int count, int slice) const {
    scales[0] = params.scales[first / BLOCK_TILES * params.scale_stride + slice];
    scales[1] = params.scales[(first + count - 1) / BLOCK_TILES * params.scale_stride + slice];
  }
  // This warp's slice of a tile. TMA swizzles the 16-byte pieces of a row. 8 threads read pieces of two rows that lie
  // in different banks, if those rows are 4 apart.
  __device__ int row_of_group() const { return group / 2 + group % 2 * 4; }
  __device__ void load_weight(uint4 (&piece)[2][2]) const {
    const int row = row_of_group();
    const u32 from = ring.at() + row * SLICE;
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
      for (int below = 0; below < 2; ++below)
        piece[p][below] = read_shared(from + below * 8 * SLICE + ((4 * p + member) ^ row) * 16);
  }
  __device__ void add(float (&acc)[HALVES][4], const uint4 (&piece)[2][2], const XSlice &rows, float scale) {
    float chains[2][HALVES][4] = {};
#pragma unroll
    for (int w = 0; w < 4; w += ITEM)
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        u32 left[4];
        if (ITEM == 1) {
          widen(word(piece[p][0], w), left[0], left[2]);
          widen(word(piece[p][1], w), left[1], left[3]);
        } else {
          left[0] = word(piece[p][0], w);
          left[1] = word(piece[p][1], w);
          left[2] = word(piece[p][0], w + 1);
          left[3] = word(piece[p][1], w + 1);
        }
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
          u32 right[2];
          if (ITEM == 1) widen(word(rows.pieces[h][p], w), right[0], right[1]);
          mma(chains[p][h], left, ITEM == 1 ? right[0] : word(rows.pieces[h][p], w),
              ITEM == 1 ? right[1] : word(rows.pieces[h][p], w + 1));
        }
      }
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float both = chains[0][h][e] + chains[1][h][e];
        acc[h][e] = IN_BLOCKS ? fmaf(both, rows.scales[h][e % 2] * scale, acc[h][e]) : acc[h][e] + both;
      }
  }
  __device__ void mma_slice(const XSlice &rows, const float (&scales)[2], int first, int count) {
#pragma unroll
    for (int i = 0; i < N_TILES; ++i)
      if (i < count) {
        uint4 piece[2][2];
        ring.wait_full();
        load_weight(piece);
        ring.next();
        add(acc[i], piece, rows, first % BLOCK_TILES + i < BLOCK_TILES ? scales[0] : scales[1]);
      }
  }
  __device__ void store_partials(float *exchange, int count) const {
#pragma unroll
    for (int i = 0; i < N_TILES; ++i)
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 8 * h + 2 * member + e % 2;
          if (i < count && row < params.m)
            exchange[warp * ACCUMULATORS + (i * TILE_M + row) * PITCH + row_of_group() + e / 2 * 8] = acc[i][h][e];
        }
  }
  // Loads the scales that this thread needs before the accumulators are there, so that the epilogue waits for no
  // memory.
  __device__ void load_output_scales(OutputScales (&output_scales)[PAIRS], int first, int count) const {
    if (!HAS_OUTPUT_SCALES) return;
#pragma unroll
    for (int turn = 0; turn < PAIRS; ++turn) {
      const int at = threadIdx.x + turn * THREADS;
      if (at >= count * params.m * MMA_N / 2) continue;
      const int output = (first + at / (MMA_N / 2) % count) * MMA_N + at % (MMA_N / 2) * 2;
      output_scales[turn] = {params.scales[output * params.scale_stride],
                             params.scales[(output + 1) * params.scale_stride],
                       params.x_scales[at / (MMA_N / 2) / count]};
    }
  }
  // Two outputs of a row at once.
  __device__ void reduce(const float *exchange, const OutputScales (&output_scales)[PAIRS], int first,
                         int count) const {
    for (int at = threadIdx.x, turn = 0; at < count * params.m * MMA_N / 2; at += THREADS, ++turn) {
      const int pair = at % (MMA_N / 2), i = at / (MMA_N / 2) % count, row = at / (MMA_N / 2) / count;
      const int output = (first + i) * MMA_N + 2 * pair;
      float2 sum = make_float2(0, 0);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float2 part = *reinterpret_cast<const float2 *>(exchange + w * ACCUMULATORS + (i * TILE_M + row) * PITCH
                                                              + 2 * pair);
        sum = make_float2(sum.x + part.x, sum.y + part.y);
      }
      if (HAS_OUTPUT_SCALES) {
        const OutputScales by = turn == 0 ? output_scales[0] : output_scales[PAIRS - 1];
        sum = make_float2(sum.x * (by.low * by.row), sum.y * (by.high * by.row));
      }
      if (params.bias) sum = make_float2(sum.x + to_float(params.bias[output]),
                                         sum.y + to_float(params.bias[output + 1]));
      *reinterpret_cast<u32 *>(params.out + (i64)row * params.n + output) = pack(sum.x, sum.y);
    }
  }
  __device__ void multiply_tiles(int first, int count) {
#pragma unroll
    for (int e = 0; e < N_TILES * HALVES * 4; ++e) acc[e / 4 / HALVES][e / 4 % HALVES][e % 4] = 0;
    // Prefetches x and scales of the next slice.
    XSlice next;
    float next_scales[2];
    if (warp < params.num_slices) {
      load_x(next, warp);
      if (IN_BLOCKS) load_scales(next_scales, first, count, warp);
    }
    for (int slice = warp; slice < params.num_slices; slice += WARPS) {
      const XSlice rows = next;
      const float scales[2] = {next_scales[0], next_scales[1]};
      if (slice + WARPS < params.num_slices) {
        load_x(next, slice + WARPS);
        if (IN_BLOCKS) load_scales(next_scales, first, count, slice + WARPS);
      }
      mma_slice(rows, scales, first, count);
    }
  }
  __device__ void run(float *exchange) {
    const int n_tiles = params.n / MMA_N, end = (i64)n_tiles * (blockIdx.x + 1) / gridDim.x;
    for (int first = (i64)n_tiles * blockIdx.x / gridDim.x; first < end; first += N_TILES) {
      const int count = min(N_TILES, end - first);
      OutputScales output_scales[PAIRS];
      load_output_scales(output_scales, first, count);
      multiply_tiles(first, count);
      store_partials(exchange, count);
      __syncthreads();
      reduce(exchange, output_scales, first, count);
      __syncthreads();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
small_m_gemm(const __grid_constant__ TensorMap weight_map, const __grid_constant__ Params params) {
  extern __shared__ unsigned char memory[];
  const u32 begin = (u32)__cvta_generic_to_shared(memory), shared = (begin + 1023) / 1024 * 1024;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  WeightRing ring(weight_map, params, shared);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  WarpGemm(params, ring).run(reinterpret_cast<float *>(memory + (shared - begin) + EXCHANGE));
}
