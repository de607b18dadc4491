// GEMM y = x W^T of 129 to 256 rows with a weight of 4 or 8 bit integers, w = (q - z) s rounded once to 16 bits, on
// Hopper.
//
// The weight's outputs are the left operand of warpgroup MMAs, dequantized into registers; rows of x are the right one.
// A producer warp copies both by TMA, a run of 128 inputs at a time: the weight's pieces of 64 rows of 64 bytes
// (grouped.lay_out), one of four bits, two of eight, with their scales. Of four bits the low ones of a piece are the
// first 64 inputs of a run. With split-K each split stores its accumulators in memory. The last of them to finish adds
// them in their order, so the result does not depend on which was last.
//
// Constants of the host: IS_BFLOAT16, BITS, HAS_ZEROS, IN_HALVES (groups of 64: each half of a run has its own scale),
// GROUPS of warps, which have 64 outputs each, TILE_M, STAGES.

constexpr int WARPS = 4 * GROUPS, THREADS = 32 * WARPS, TILE_N = 64 * GROUPS;
constexpr int PIECES = BITS == 8 ? 2 : 1;
constexpr u32 PIECE_BYTES = 4096, HALF_BYTES = 128 * TILE_M, X_BYTES = 2 * HALF_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + GROUPS * PIECES * PIECE_BYTES;
// Lines of scales, then of zeros.
constexpr u32 SCALES_OF_RUN = IN_HALVES ? 2 : 1, LINES = SCALES_OF_RUN * (HAS_ZEROS ? 2 : 1), LINE_BYTES = 2 * TILE_N;
constexpr u32 SCALES = STAGES * STAGE_BYTES, FULL = SCALES + STAGES * LINES * LINE_BYTES, EMPTY = FULL + 8 * STAGES;
constexpr u32 IS_LAST = EMPTY + 8 * STAGES;

// 64 outputs, `columns` rows of x, K of 16.
#define WGMMA_LEFT_REGISTERS(columns, count, left_names, right_name)                                                   \
  __device__ __forceinline__ void wgmma(float (&acc)[count], const u32 (&left)[4], u64 right) {                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." DTYPE "." DTYPE " {" LIST_##count "}, {"       \
                 left_names "}, " right_name ", 1, 1, 1, 0;"                                                           \
                 : ALL_##count(acc) : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));             \
  }
WGMMA_LEFT_REGISTERS("32", 16, "%16, %17, %18, %19", "%20")
WGMMA_LEFT_REGISTERS("64", 32, "%32, %33, %34, %35", "%36")
WGMMA_LEFT_REGISTERS("96", 48, "%48, %49, %50, %51", "%52")
WGMMA_LEFT_REGISTERS("128", 64, "%64, %65, %66, %67", "%68")

// Scales and zeros are (groups, N). `partials` has room for the accumulators of every item.
struct Params {
  int m, n, num_runs, runs_per_group, splits, m_tiles, num_items, is_wide_bias;
  const unsigned short *scales, *zeros;
  const void *bias;
  unsigned short *out;
  float *partials;
  int *counters;
};

__device__ __forceinline__ u32 mul16(u32 x, u32 y) {
  u32 result;
#if IS_BFLOAT16
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
#endif
  return result;
}

// An item is a split of the runs of a tile. A program has items blockIdx.x, blockIdx.x + gridDim.x, ...
struct ItemCursor {
  const Params &params;
  int item, run, end, row, tile, split;

  __device__ ItemCursor(const Params &params) : params(params), item(blockIdx.x) { begin(); }
  __device__ bool is_there() const { return item < params.num_items; }
  __device__ void begin() {
    const int part = item / params.m_tiles;
    row = item % params.m_tiles * TILE_M;
    tile = part / params.splits;
    split = part % params.splits;
    run = params.num_runs * split / params.splits;
    end = params.num_runs * (split + 1) / params.splits;
  }
  __device__ void next() {
    if (++run == end) { item += gridDim.x; begin(); }
  }
};

struct Producer {
  const TensorMap &x_map, &values_map;
  const Params &params;
  u32 shared;
  u64 once, kept;

  __device__ void load_weight(const ItemCursor &cursor, u32 stage) {
    const u32 barrier = shared + FULL + 8 * stage;
    const u32 bytes = 2 * min(TILE_N, params.n - cursor.tile * TILE_N);
    expect_bytes(barrier, STAGE_BYTES + LINES * bytes);
    for (int group = 0; group < GROUPS; ++group)
      for (int piece = 0; piece < PIECES; ++piece)
        tma_load(shared + stage * STAGE_BYTES + X_BYTES + (group * PIECES + piece) * PIECE_BYTES, values_map, barrier,
                 0,
              (((cursor.tile * GROUPS + group) * params.num_runs + cursor.run) * PIECES + piece) * 64, once);
    for (u32 line = 0; line < LINES; ++line) {
      const unsigned short *from = line < SCALES_OF_RUN ? params.scales : params.zeros;
      const int group = IN_HALVES ? 2 * cursor.run + line % 2 : cursor.run / params.runs_per_group;
      bulk_load(shared + SCALES + (stage * LINES + line) * LINE_BYTES,
                  from + (long long)group * params.n + cursor.tile * TILE_N, bytes, barrier, kept);
    }
  }
  __device__ void load_x(const ItemCursor &cursor, u32 stage) {
    for (int half = 0; half < 2; ++half)
      tma_load(shared + stage * STAGE_BYTES + half * HALF_BYTES, x_map, shared + FULL + 8 * stage,
            cursor.run * 128 + half * 64, cursor.row, kept);
  }
  // Loads weights before earlier kernels have ended, and rows of x after.
  __device__ void run() {
    ItemCursor cursor(params), x_cursor(params);
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(kept));
    for (int stage = 0; stage < STAGES && cursor.is_there(); ++stage, cursor.next()) load_weight(cursor, stage);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int stage = 0; stage < STAGES && x_cursor.is_there(); ++stage, x_cursor.next()) load_x(x_cursor, stage);
    for (Ring<STAGES> ring; cursor.is_there(); cursor.next(), ring.next()) {
      wait(shared + EMPTY + 8 * ring.stage, ring.parity);
      load_weight(cursor, ring.stage);
      load_x(cursor, ring.stage);
    }
  }
};

// A warpgroup with 64 outputs. A thread has two of them, 8 apart, and two of each 8 columns: element 4 * j + 2 * i + c
// is column 8 * j + c from its first one.
struct Consumer {
  const Params &params;
  u32 shared;
  int lane, output;  // the first of the thread's two, within the tile
  u32 cursor, swizzle;  // of its bytes in a piece
  Ring<STAGES> ring;
  float acc[TILE_M / 2];

  __device__ Consumer(const Params &params, u32 shared) : params(params), shared(shared), lane(threadIdx.x % 32) {
    const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    output = threadIdx.x / 128 * 64 + row;
    cursor = X_BYTES + threadIdx.x / 128 * PIECES * PIECE_BYTES + row * 64 + lane % 4 * 2;
    swizzle = lane / 8;
  }
  __device__ void release(u32 stage) {
    __syncwarp();
    if (lane == 0) arrive(shared + EMPTY + 8 * stage);
  }
  // Pairs of inputs of both outputs, from `unit` times 8 on, as bytes 0 and 1 of two halves.
  __device__ u32 load_bytes(u32 piece, int unit, int i) const {
    return __byte_perm(load_shared_u16(piece + ((unit / 2 ^ swizzle) << 4) + unit % 2 * 8 + i * 512), 0, 0x4140);
  }
  __device__ void load_scales(u32 (&scale)[2], u32 (&negative)[2], u32 line) const {
    const u32 at = shared + SCALES + (ring.stage * LINES + line) * LINE_BYTES + output * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = load_shared_u16(at + 16 * i) * 0x10001u;
      const float above =
          above_zero(HAS_ZEROS ? to_float(load_shared_u16(at + SCALES_OF_RUN * LINE_BYTES + 16 * i)) : OFFSET);
      negative[i] = pack(-above, -above);
    }
  }
  __device__ void add_run() {
    const u32 stage = shared + ring.stage * STAGE_BYTES, piece = stage + cursor;
    u32 scale[2][2], negative[2][2];
    load_scales(scale[0], negative[0], 0);
    if (IN_HALVES) load_scales(scale[1], negative[1], 1);
    // All operands are dequantized before the MMAs start; MMAs of other warpgroups may run meanwhile.
    u32 left[2][4][4];
#pragma unroll
    for (int v = 0; v < 4; ++v)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = e % 2, unit = 2 * v + e / 2, k = IN_HALVES ? 1 : 0;
        const u32 first = load_bytes(piece, unit, i);
        const u32 second = BITS == 8 ? load_bytes(piece + PIECE_BYTES, unit, i) : first >> 4;
        left[0][v][e] = mul16(dequantize<0>(first, negative[0][i]), scale[0][i]);
        left[1][v][e] = mul16(dequantize<0>(second, negative[k][i]), scale[k][i]);
      }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      wgmma(acc, left[step / 4][step % 4],
                  smem_descriptor<128>(stage + step / 4 * HALF_BYTES + step % 4 * 32, 16));
    }
    wgmma_commit();
    wgmma_wait<0>();
    release(ring.stage);
  }
  __device__ void sum(const ItemCursor &at) {
#pragma unroll
    for (int e = 0; e < TILE_M / 2; ++e) acc[e] = 0;
    fence_registers(acc);
    for (int run = at.run; run < at.end; ++run) {
      wait(shared + FULL + 8 * ring.stage, ring.parity);
      add_run();
      ring.next();
    }
    fence_registers(acc);
  }
  __device__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
  // Whether this was the last split of the tile, which then has the sum of all accumulators.
  __device__ bool add_partials(const ItemCursor &at) {
    const int tile = at.tile * params.m_tiles + at.row / TILE_M;
    float *partials = params.partials + (long long)tile * params.splits * (TILE_M / 2 * THREADS) + threadIdx.x;
#pragma unroll
    for (int e = 0; e < TILE_M / 2; ++e) __stcg(partials + (at.split * (TILE_M / 2) + e) * THREADS, acc[e]);
    __threadfence();
    sync_consumers();
    if (threadIdx.x == 0) {
      const bool is_last = atomicAdd(params.counters + tile, 1) == params.splits - 1;
      if (is_last) params.counters[tile] = 0;
      __threadfence();
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + IS_LAST), "r"((u32)is_last) : "memory");
    }
    sync_consumers();
    u32 is_last;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(is_last) : "r"(shared + IS_LAST) : "memory");
    if (!is_last) return false;
    __threadfence();
#pragma unroll
    for (int e = 0; e < TILE_M / 2; ++e) acc[e] = 0;
    for (int split = 0; split < params.splits; ++split)
#pragma unroll
      for (int e = 0; e < TILE_M / 2; ++e) acc[e] += __ldcg(partials + (split * (TILE_M / 2) + e) * THREADS);
    return true;
  }
  __device__ float load_bias(int output) const {
    if (!params.bias || output >= params.n) return 0;
    return params.is_wide_bias ? static_cast<const float *>(params.bias)[output]
                             : to_float(static_cast<const unsigned short *>(params.bias)[output]);
  }
  __device__ void store(const ItemCursor &at) {
    const int first = at.tile * TILE_N + output - lane / 4;  // of the warp's 16
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float bias = load_bias(first + lane / 4 + 8 * i);
      const int from = first + 8 * i + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < TILE_M / 8; ++j) {
        const u32 pair = transpose(pack(acc[4 * j + 2 * i] + bias, acc[4 * j + 2 * i + 1] + bias));
        const int row = at.row + 8 * j + lane / 4;
        if (row < params.m && from < params.n)
          *reinterpret_cast<u32 *>(params.out + (long long)row * params.n + from) = pair;
      }
    }
  }
  __device__ void run() {
    for (ItemCursor at(params); at.is_there(); at.item += gridDim.x, at.begin()) {
      sum(at);
      asm volatile("griddepcontrol.wait;" ::: "memory");
      if (params.splits == 1 || add_partials(at)) store(at);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
grouped_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap values_map,
              const __grid_constant__ Params params) {
  extern __shared__ unsigned char memory[];
  const u32 shared = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == THREADS) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(shared + FULL + 8 * stage, 1);
      init_barrier(shared + EMPTY + 8 * stage, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    proxy_fence();
  }
  __syncthreads();
  if (threadIdx.x < THREADS) Consumer(params, shared).run();
  else if (threadIdx.x == THREADS) Producer{x_map, values_map, params, shared}.run();
}
