// GEMM y = x W^T of 1 to 16 rows with a weight of 4 or 8 bit integers, w = (q - z) s, on Hopper. Reading the weight is
// its bound, so its loads start before earlier kernels have ended.
//
// The weight lies in pieces of 64 rows of 64 bytes (grouped.lay_out). A pair of tiles is 32 outputs, a run 128 inputs:
// half a piece of four bits, of two pieces of eight. Programs of a cluster split the runs of the same pairs. An item is
// a pair and a split of the program's runs. A warp has items of its own, and a ring of its own in shared memory: no
// warp waits for another until its items are done. One more warp does nothing but fill the rings. It starts before x is
// there, with one load in flight for each ring, and loads the rest when x has come. The integers are the left operand
// of mma.m16n8k16, rows of x the right one. A lane has 16 bytes of each of four outputs, which are 16 inputs and the 16
// inputs 64 behind them: the program copies x to shared memory in that order, once. Accumulators of splits, then of
// programs, are added in their order, so the result does not depend on which was first.
//
// Constants of the host: IS_BFLOAT16, BITS, BLOCKS of 8 rows of x, HAS_ZEROS, IN_HALVES (groups of 64: each half of a
// run has its own scale), WARPS beside the one that fills rings, REGISTERS of a thread.

constexpr int THREADS = 32 * WARPS, TILES = 2;
constexpr u32 PIECES = BITS == 8 ? 2 : 1, PIECE_BYTES = 4096, PART_BYTES = PIECE_BYTES / 2;
// Integers of 4 bits stay 128 larger in bfloat16, and accumulators are corrected: 128 + z times the sum of a group's
// inputs, which an MMA with ones computes. That is cheaper than subtracting it from each integer.
constexpr bool CORRECTS = BITS == 4 && IS_BFLOAT16;
constexpr int SCALES_OF_RUN = IN_HALVES ? 2 : 1;
constexpr int ELEMENTS = 128 * BLOCKS;  // accumulators of a tile
constexpr int X_AT_ONCE = 6;            // 16-byte loads of x that a thread keeps in flight

// x is (M, K), rows stride_x apart. Scales and zeros are (groups, N). A program has `pairs` and `runs`, the first
// `more_pairs` clusters and `more_runs` programs of a cluster one more. A ring has `stages`.
struct Params {
  int m, n, num_runs, runs_per_group, stride_x;
  int pairs, more_pairs, runs, more_runs, splits, stages, is_wide_bias;
  const unsigned short *x;
  const unsigned char *values;
  const unsigned short *scales, *zeros;
  const void *bias;
  unsigned short *out;
};

__device__ __forceinline__ void mma(float (&acc)[4], const u32 (&left)[4], u32 right_0, u32 right_1) {
  MMA(asm, DTYPE);
}
__device__ __forceinline__ bool is_over(u32 barrier, u32 parity) {
  u32 found;
  asm volatile("{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
               "selp.u32 %0, 1, 0, over;\n}" : "=r"(found) : "r"(barrier), "r"(parity) : "memory");
  return found;
}
template <int SHIFT> __device__ __forceinline__ u32 left_operand(u32 word, u32 negative) {
  return CORRECTS ? or_base<0x000F000F>(word >> SHIFT) : dequantize<SHIFT>(word, negative);
}

// Exact for the small numbers here, and faster than an integer division.
__device__ __forceinline__ int fast_divide(int x, int y) { return __float2int_rz(__fdividef(x + 0.5f, y)); }
// The cells `first`, first + step, ... of a table with `count` columns.
struct TableCursor {
  int row, column, rows, columns, count;

  __device__ TableCursor(int first, int step, int count)
      : row(fast_divide(first, count)), rows(fast_divide(step, count)), count(count) {
    column = first - row * count;
    columns = step - rows * count;
  }
  __device__ void next() {
    row += rows;
    column += columns;
    if (column < count) return;
    column -= count;
    ++row;
  }
};

// A cluster has `pairs` from `first_pair` on; this program `runs` of them from `first_run` on.
struct ClusterShare {
  int rank, programs, first_pair, pairs, first_run, runs, runs_per_split, more_per_splits;

  __device__ ClusterShare(const Params &params) {
    int cluster;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(programs));
    first_pair = cluster * params.pairs + min(cluster, params.more_pairs);
    pairs = params.pairs + (cluster < params.more_pairs);
    first_run = rank * params.runs + min(rank, params.more_runs);
    runs = params.runs + (rank < params.more_runs);
    runs_per_split = fast_divide(runs, params.splits);
    more_per_splits = runs - runs_per_split * params.splits;
  }
  __device__ int begin(int split) const { return split * runs_per_split + min(split, more_per_splits); }
};

// The layout of shared memory. `sums` has the accumulators of this program's tiles, of each program and split.
struct SharedLayout {
  u32 rings, barriers, started, x, scales, zeros, pitch, acc;

  __device__ SharedLayout(u32 shared, const Params &params, u32 programs, int groups) {
    const int pairs = params.pairs + (params.more_pairs > 0), runs = params.runs + (params.more_runs > 0);
    pitch = pairs * 64;
    rings = shared;
    barriers = rings + WARPS * params.stages * PART_BYTES;
    started = barriers + WARPS * params.stages * 8;
    acc = started + 16;
    x = acc + (2 * pairs + programs - 1) / programs * programs * params.splits * ELEMENTS * 4;
    scales = x + params.m * runs * 256;
    zeros = scales + groups * pitch;
  }
};

// A warp's ring. Another warp fills it at first; then its first lane loads the next piece into each stage that was
// read. Until x is there, one load is in flight: more would delay the small kernels on which x depends.
struct WeightRing {
  const Params &params;
  const ClusterShare &share;
  u32 shared, barriers, stage = 0, parity = 0;
  TableCursor item;
  int left = 0;
  const unsigned char *from = nullptr;
  u64 policy;

  __device__ WeightRing(const Params &params, const ClusterShare &share, const SharedLayout &layout, u64 policy,
                        int warp)
      : params(params), share(share), shared(layout.rings + warp * params.stages * PART_BYTES),
        barriers(layout.barriers + warp * params.stages * 8), item(warp, WARPS, share.pairs), policy(policy) {
    begin();
  }
  // Called by one thread. `started` is the address of the flag that says whether x is there; a flag read too early
  // costs only time.
  __device__ void fill(u32 started) {
#pragma unroll 1
    for (int i = 0; i < params.stages; ++i) init_barrier(barriers + 8 * i, 1);
    proxy_fence();
#pragma unroll 1
    for (int i = 0; i < params.stages && left > 0;) {
      u32 is_started;
      asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(is_started) : "r"(started));
      if (i == 0 || is_started || is_over(barriers + 8 * (i - 1), 0)) load_next(i++);
    }
  }
  // Another thread fills the ring.
  __device__ void skip() {
#pragma unroll 1
    for (int i = 0; i < params.stages; ++i) step();
  }
  __device__ void begin() {
    if (item.row >= params.splits) return;
    const int pair = share.first_pair + item.column, run = share.begin(item.row);
    left = (share.begin(item.row + 1) - run) * PIECES;
    from = params.values + (((u64)(pair / 2) * params.num_runs + share.first_run + run) * PIECES * PIECE_BYTES
                          + pair % 2 * PART_BYTES);
  }
  // Called by the first lane.
  __device__ void load_next(int to) {
    if (left == 0) return;
    expect_bytes(barriers + 8 * to, PART_BYTES);
    bulk_load(shared + to * PART_BYTES, from, PART_BYTES, barriers + 8 * to, policy);
    step();
  }
  __device__ void step() {
    from += PIECE_BYTES;
    if (--left > 0) return;
    left = 0;
    item.next();
    begin();
  }
  // Reads 16 bytes of each of four outputs, 8 apart, and loads the next piece into the stage.
  __device__ void pop(uint4 (&numbers)[TILES][2]) {
    wait(barriers + 8 * stage, parity);
    const u32 at = shared + stage * PART_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) numbers[i / 2][i % 2] = read_shared(at + i * 512);
    __syncwarp();
    if (threadIdx.x % 32 == 0) load_next(stage);
    if (++stage == params.stages) { stage = 0; parity ^= 1; }
  }
};

// Copies x of this program's runs in the order in which lanes read it: of each run, half and 8 of a lane's 16 inputs
// all rows, four lanes each. Pairs of inputs are two apart, as integers are dequantized.
struct XLoader {
  const Params &params;
  const ClusterShare &share;
  const SharedLayout &layout;

  __device__ void load(TableCursor cursor) const {
    const int eight = threadIdx.x % 16, stride = 2 * params.stride_x;
    const unsigned char *from = reinterpret_cast<const unsigned char *>(params.x) + share.first_run * 256 + eight * 16;
    const u32 to = layout.x + (eight / 8 * 2 + eight % 2) * params.m * 64 + eight / 2 % 4 * 16;
    while (cursor.row < params.m) {
      TableCursor after = cursor;
      uint4 found[X_AT_ONCE];
#pragma unroll
      for (int i = 0; i < X_AT_ONCE && after.row < params.m; ++i, after.next())
        found[i] = __ldcg(reinterpret_cast<const uint4 *>(from + (long long)after.row * stride + after.column * 256));
#pragma unroll
      for (int i = 0; i < X_AT_ONCE && cursor.row < params.m; ++i, cursor.next())
        store_partials(found[i], to + cursor.column * params.m * 256 + cursor.row * 64);
    }
  }
  static __device__ void store_partials(const uint4 &words, u32 to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(__byte_perm(words.x, words.y, 0x5410)),
                 "r"(__byte_perm(words.x, words.y, 0x7632)), "r"(__byte_perm(words.z, words.w, 0x5410)),
                 "r"(__byte_perm(words.z, words.w, 0x7632)) : "memory");
  }
};

// The scales of the four outputs of a lane, and the excess of their integers (above_zero).
struct Scales {
  float scale[2 * TILES], above[2 * TILES];

  __device__ void read(const SharedLayout &layout, u32 at) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      scale[i] = to_float(load_shared_u16(layout.scales + at + 16 * i));
      above[i] = above_zero(HAS_ZEROS ? to_float(load_shared_u16(layout.zeros + at + 16 * i)) : OFFSET);
    }
  }
};

// The runs of a pair. The offset of a group's scales moves with them.
struct Item {
  int run, end, in_group;
  u32 scales;

  __device__ Item(const Params &params, const ClusterShare &share, const SharedLayout &layout,
                  const TableCursor &cursor, int first_group)
      : run(share.begin(cursor.row)), end(share.begin(cursor.row + 1)) {
    const int group = fast_divide(share.first_run + run, params.runs_per_group);
    in_group = share.first_run + run - group * params.runs_per_group;
    scales = (IN_HALVES ? 2 * run : group - first_group) * layout.pitch + cursor.column * 64;
  }
};

struct WarpGemm {
  const Params &params;
  const ClusterShare &share;
  const SharedLayout &layout;
  WeightRing &ring;
  const int lane = threadIdx.x % 32, first_group;
  float acc[TILES][BLOCKS][4], partial[TILES][BLOCKS][4], x_sums[BLOCKS][4];

  __device__ void add_half(const uint4 (&numbers)[TILES][2], const Scales &scales, int half, u32 x) {
    constexpr int NEXT = BITS == 4 ? 4 : 0;
    uint4 right[BLOCKS][2];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int split = 0; split < 2; ++split)
        right[b][split] = read_shared(x + split * params.m * 64 + min(8 * b + lane / 4, params.m - 1) * 64);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 rows[BLOCKS][2];
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        rows[b][0] = word(right[b][w / 2], w % 2 * 2);
        rows[b][1] = word(right[b][w / 2], w % 2 * 2 + 1);
        if (CORRECTS) mma(x_sums[b], {ONES, ONES, ONES, ONES}, rows[b][0], rows[b][1]);
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        u32 left[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float above = scales.above[2 * t + i];
          const u32 packed = word(numbers[t][i], w), negative = pack(-above, -above);
          left[i] = half ? left_operand<NEXT>(packed, negative) : left_operand<0>(packed, negative);
          left[2 + i] = half ? left_operand<8 + NEXT>(packed, negative) : left_operand<8>(packed, negative);
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) mma(partial[t][b], left, rows[b][0], rows[b][1]);
      }
    }
  }
  // Scales a group's partial accumulators, after the correction.
  __device__ void add_group(const Scales &scales) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float &value = partial[t][b][e];
          if (CORRECTS) value = fmaf(x_sums[b][e % 2], -scales.above[2 * t + e / 2], value);
          acc[t][b][e] = fmaf(value, scales.scale[2 * t + e / 2], acc[t][b][e]);
          value = 0;
        }
#pragma unroll
    for (int e = 0; e < 4 * BLOCKS; ++e) x_sums[e / 4][e % 4] = 0;
  }
  __device__ void add_run(int run, u32 scales_at) {
    uint4 numbers[TILES][2];
    Scales scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0 || IN_HALVES) scales.read(layout, scales_at + half * layout.pitch);
      if (half < PIECES) ring.pop(numbers);
      add_half(numbers, scales, half, layout.x + (run * 2 + half) * params.m * 128 + lane % 4 * 16);
      if (half == 1 || IN_HALVES) add_group(scales);
    }
  }
  __device__ void multiply_item(Item item) {
#pragma unroll
    for (int e = 0; e < TILES * BLOCKS * 4; ++e)
      acc[e / 4 / BLOCKS][e / 4 % BLOCKS][e % 4] = partial[e / 4 / BLOCKS][e / 4 % BLOCKS][e % 4] = 0;
#pragma unroll
    for (int e = 0; e < 4 * BLOCKS; ++e) x_sums[e / 4][e % 4] = 0;
    for (; item.run < item.end; ++item.run) {
      add_run(item.run, item.scales + lane / 4 * 2);
      if (++item.in_group < params.runs_per_group) continue;
      item.in_group = 0;
      item.scales += SCALES_OF_RUN * layout.pitch;
    }
  }
  // Sends a tile's accumulators to the program that stores the tile.
  __device__ void store_partials(int pair, int split) const {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const int tile = 2 * pair + t, slot = fast_divide(tile, share.programs), owner = tile - slot * share.programs;
      const int at = (slot * share.programs + share.rank) * params.splits + split;
      u32 there;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(layout.acc + at * ELEMENTS * 4), "r"(owner));
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"r"(there + (b * 128 + lane * 4) * 4), "f"(acc[t][b][0]), "f"(acc[t][b][1]),
                       "f"(acc[t][b][2]), "f"(acc[t][b][3]) : "memory");
    }
  }
  __device__ void run(TableCursor cursor, Item item) {
    while (cursor.row < params.splits) {
      multiply_item(item);
      store_partials(cursor.column, cursor.row);
      cursor.next();
      item = Item(params, share, layout, cursor, first_group);
    }
  }
  // Adds the accumulators of programs and splits, in their order.
  __device__ void end(TableCursor cursor) const {
    const int in_tile = threadIdx.x % 16, count = share.programs * params.splits;
    for (; cursor.row < params.m; cursor.next()) {
      const int row = cursor.row, slot = cursor.column;
      const int output = (share.first_pair * 2 + slot * share.programs + share.rank) * 16 + in_tile;
      if (output >= params.n) continue;
      u32 from = layout.acc + (slot * count * ELEMENTS + row / 8 * 128 + in_tile % 8 * 16 + row % 8 / 2 * 4 + row % 2
                              + in_tile / 8 * 2) * 4;
      float sum = 0;
#pragma unroll 4
      for (int split = 0; split < count; ++split, from += ELEMENTS * 4) {
        float found;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found) : "r"(from));
        sum += found;
      }
      if (params.bias) sum += params.is_wide_bias ? static_cast<const float *>(params.bias)[output]
                                              : to_float(static_cast<const unsigned short *>(params.bias)[output]);
      params.out[(long long)row * params.n + output] = (unsigned short)pack(sum, sum);
    }
  }
};

// Copies scales and zeros of all outputs of the cluster, for this program's groups.
__device__ __forceinline__ void load_scales(const Params &params, const ClusterShare &share,
                                            const SharedLayout &layout, int first_group,
                                             int groups) {
  for (TableCursor cursor(threadIdx.x, THREADS, share.pairs * 4); cursor.row < groups; cursor.next()) {
    const int output = share.first_pair * 32 + cursor.column * 8;
    if (output >= params.n) continue;
    const long long from = (long long)(first_group + cursor.row) * params.n + output;
    const u32 to = layout.scales + cursor.row * layout.pitch + cursor.column * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(params.scales + from) : "memory");
    if (HAS_ZEROS)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   ::"r"(to + layout.zeros - layout.scales), "l"(params.zeros + from) : "memory");
  }
}

// Runs in a warp of its own, since no other may wait for pieces before x. Each lane fills a warp's ring.
__device__ __forceinline__ void fill_rings(const Params &params, const ClusterShare &share, const SharedLayout &layout,
                                           u64 policy) {
  const int lane = threadIdx.x % 32;
  WeightRing ring(params, share, layout, policy, lane);
  if (lane < WARPS) ring.fill(layout.started);
  __syncwarp();
  asm volatile("bar.arrive 1, %0;" ::"n"(THREADS + 32) : "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern "C" __global__ void __maxnreg__(REGISTERS) grouped_small_m_gemm(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char memory[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const ClusterShare share(params);
  // Programs of a cluster must have started before others write to their shared memory.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  const int first_group = IN_HALVES ? 2 * share.first_run : fast_divide(share.first_run, params.runs_per_group);
  const int last_run = share.first_run + share.runs;
  const int groups = (IN_HALVES ? 2 * last_run : fast_divide(last_run - 1, params.runs_per_group) + 1) - first_group;
  const SharedLayout layout((u32)__cvta_generic_to_shared(memory), params, share.programs, groups);
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const int warp = threadIdx.x / 32;
  if (warp == WARPS) return fill_rings(params, share, layout, policy);
  if (threadIdx.x == 0) asm volatile("st.volatile.shared.u32 [%0], 0;" ::"r"(layout.started) : "memory");
  load_scales(params, share, layout, first_group, groups);
  WeightRing ring(params, share, layout, policy, warp);
  ring.skip();
  const TableCursor item(warp, WARPS, share.pairs), x_place(threadIdx.x / 16, THREADS / 16, share.runs);
  const TableCursor end_place(threadIdx.x / 16, THREADS / 16,
                       fast_divide(2 * share.pairs - share.rank + share.programs - 1, share.programs));
  const Item first_item(params, share, layout, item, first_group);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) asm volatile("st.volatile.shared.u32 [%0], 1;" ::"r"(layout.started) : "memory");
  XLoader{params, share, layout}.load(x_place);
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS + 32) : "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  WarpGemm gemm{params, share, layout, ring, (int)threadIdx.x % 32, first_group};
  gemm.run(item, first_item);
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  gemm.end(end_place);
}
