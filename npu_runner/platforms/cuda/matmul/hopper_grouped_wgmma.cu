// Products y = x W^T of some rows with a weight of 4 or 8 bit integers, w = (q - z) s rounded once to 16 bits, on Hopper.
//
// The weight's outputs are the left factor of a warpgroup's products, in registers, where they are made of the integers;
// rows of x are the right one. A warp brings both by tensor maps, a run of 128 inputs at a time: the weight's pieces of
// 64 rows of 64 bytes (matmul/grouped.settled), one of four bits, two of eight, with their scales. Of four bits the
// low ones of a piece are the first 64 inputs of a run. Where inputs are split, each part leaves its sums in memory; the
// last to come adds them in their order, so a result does not depend on which was last.
//
// Constants of the host: IS_BFLOAT16, BITS, HAS_ZEROS, IN_HALVES (groups of 64: each half of a run has its own scale),
// GROUPS of warps, which have 64 outputs each, ROWS of x, STAGES.

constexpr int WARPS = 4 * GROUPS, THREADS = 32 * WARPS, OUTPUTS = 64 * GROUPS;
constexpr int PIECES = BITS == 8 ? 2 : 1;
constexpr u32 PIECE_BYTES = 4096, HALF_BYTES = 128 * ROWS, X_BYTES = 2 * HALF_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + GROUPS * PIECES * PIECE_BYTES;
// Lines of scales, then of zeros.
constexpr u32 SCALES_OF_RUN = IN_HALVES ? 2 : 1, LINES = SCALES_OF_RUN * (HAS_ZEROS ? 2 : 1), LINE_BYTES = 2 * OUTPUTS;
constexpr u32 SCALES = STAGES * STAGE_BYTES, FULL = SCALES + STAGES * LINES * LINE_BYTES, EMPTY = FULL + 8 * STAGES;
constexpr u32 IS_LAST = EMPTY + 8 * STAGES;

#define LIST_16 SUMS_0 ", " SUMS_8
#define ALL_16(d) EIGHT(d, 0), EIGHT(d, 8)
// 64 outputs, `columns` rows of x, 16 terms.
#define ADD_PRODUCT(columns, count, left_names, right_name)                                                            \
  __device__ __forceinline__ void add_product(float (&sums)[count], const u32 (&left)[4], u64 right) {                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." KIND "." KIND " {" LIST_##count "}, {"           \
                 left_names "}, " right_name ", 1, 1, 1, 0;"                                                           \
                 : ALL_##count(sums) : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));            \
  }                                                                                                                    \
  __device__ __forceinline__ void hold(float (&sums)[count]) { asm volatile("" : ALL_##count(sums)::"memory"); }
ADD_PRODUCT("32", 16, "%16, %17, %18, %19", "%20")
ADD_PRODUCT("64", 32, "%32, %33, %34, %35", "%36")
ADD_PRODUCT("96", 48, "%48, %49, %50, %51", "%52")
ADD_PRODUCT("128", 64, "%64, %65, %66, %67", "%68")

// Scales and zeros: (groups, num_outputs). `parts` has room for the sums of every item.
struct Work {
  int num_rows, num_outputs, num_runs, runs_of_group, splits, row_tiles, num_items, is_wide_bias;
  const unsigned short *scales, *zeros;
  const void *bias;
  unsigned short *out;
  float *parts;
  int *counts;
};

__device__ __forceinline__ u32 multiplied(u32 x, u32 y) {
  u32 result;
#if IS_BFLOAT16
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
#endif
  return result;
}
__device__ __forceinline__ u32 transposed(u32 pairs) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pairs));
  return result;
}

// An item is a part of the runs of a tile. A program has items blockIdx.x, blockIdx.x + gridDim.x, ...
struct Place {
  const Work &work;
  int item, run, end, row, tile, split;

  __device__ Place(const Work &work) : work(work), item(blockIdx.x) { begin(); }
  __device__ bool is_there() const { return item < work.num_items; }
  __device__ void begin() {
    const int part = item / work.row_tiles;
    row = item % work.row_tiles * ROWS;
    tile = part / work.splits;
    split = part % work.splits;
    run = work.num_runs * split / work.splits;
    end = work.num_runs * (split + 1) / work.splits;
  }
  __device__ void next() {
    if (++run == end) { item += gridDim.x; begin(); }
  }
};

struct Producer {
  const Map &x_map, &values_map;
  const Work &work;
  u32 shared;
  u64 once, kept;

  __device__ void bring_weight(const Place &place, u32 stage) {
    const u32 barrier = shared + FULL + 8 * stage;
    const u32 bytes = 2 * min(OUTPUTS, work.num_outputs - place.tile * OUTPUTS);
    expect(barrier, STAGE_BYTES + LINES * bytes);
    for (int group = 0; group < GROUPS; ++group)
      for (int piece = 0; piece < PIECES; ++piece)
        bring(shared + stage * STAGE_BYTES + X_BYTES + (group * PIECES + piece) * PIECE_BYTES, values_map, barrier, 0,
              (((place.tile * GROUPS + group) * work.num_runs + place.run) * PIECES + piece) * 64, once);
    for (u32 line = 0; line < LINES; ++line) {
      const unsigned short *from = line < SCALES_OF_RUN ? work.scales : work.zeros;
      const int group = IN_HALVES ? 2 * place.run + line % 2 : place.run / work.runs_of_group;
      bring_bytes(shared + SCALES + (stage * LINES + line) * LINE_BYTES,
                  from + (long long)group * work.num_outputs + place.tile * OUTPUTS, bytes, barrier, kept);
    }
  }
  __device__ void bring_rows(const Place &place, u32 stage) {
    for (int half = 0; half < 2; ++half)
      bring(shared + stage * STAGE_BYTES + half * HALF_BYTES, x_map, shared + FULL + 8 * stage,
            place.run * 128 + half * 64, place.row, kept);
  }
  // Weights come before earlier kernels are done, rows of x behind them.
  __device__ void run() {
    Place place(work), behind(work);
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(kept));
    for (int stage = 0; stage < STAGES && place.is_there(); ++stage, place.next()) bring_weight(place, stage);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int stage = 0; stage < STAGES && behind.is_there(); ++stage, behind.next()) bring_rows(behind, stage);
    for (Ring<STAGES> ring; place.is_there(); place.next(), ring.next()) {
      wait(shared + EMPTY + 8 * ring.stage, ring.parity);
      bring_weight(place, ring.stage);
      bring_rows(place, ring.stage);
    }
  }
};

// A warpgroup, which has 64 outputs. A thread has two of them, 8 apart, of 8 columns each two: element 4 * j + 2 * i + c
// is column 8 * j + c behind its first one.
struct Consumer {
  const Work &work;
  u32 shared;
  int lane, output;  // the first of the thread's two, within the tile
  u32 place, swizzle;  // of its bytes in a piece
  Ring<STAGES> ring;
  float sums[ROWS / 2];

  __device__ Consumer(const Work &work, u32 shared) : work(work), shared(shared), lane(threadIdx.x % 32) {
    const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    output = threadIdx.x / 128 * 64 + row;
    place = X_BYTES + threadIdx.x / 128 * PIECES * PIECE_BYTES + row * 64 + lane % 4 * 2;
    swizzle = lane / 8;
  }
  __device__ void release(u32 stage) {
    __syncwarp();
    if (lane == 0) arrive(shared + EMPTY + 8 * stage);
  }
  // Pairs of inputs of both outputs, from `unit` times 8 on, as bytes 0 and 1 of two halves.
  __device__ u32 bytes_of(u32 piece, int unit, int i) const {
    return __byte_perm(half_from_shared(piece + ((unit / 2 ^ swizzle) << 4) + unit % 2 * 8 + i * 512), 0, 0x4140);
  }
  __device__ void scales_of(u32 (&scale)[2], u32 (&negative)[2], u32 line) const {
    const u32 at = shared + SCALES + (ring.stage * LINES + line) * LINE_BYTES + output * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = half_from_shared(at + 16 * i) * 0x10001u;
      const float above =
          above_zero(HAS_ZEROS ? wide(half_from_shared(at + SCALES_OF_RUN * LINE_BYTES + 16 * i)) : MIDDLE);
      negative[i] = packed(-above, -above);
    }
  }
  __device__ void add_run() {
    const u32 stage = shared + ring.stage * STAGE_BYTES, piece = stage + place;
    u32 scale[2][2], negative[2][2];
    scales_of(scale[0], negative[0], 0);
    if (IN_HALVES) scales_of(scale[1], negative[1], 1);
    // All are made before products begin; products of other warpgroups may run meanwhile.
    u32 left[2][4][4];
#pragma unroll
    for (int v = 0; v < 4; ++v)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = e % 2, unit = 2 * v + e / 2, k = IN_HALVES ? 1 : 0;
        const u32 first = bytes_of(piece, unit, i);
        const u32 second = BITS == 8 ? bytes_of(piece + PIECE_BYTES, unit, i) : first >> 4;
        left[0][v][e] = multiplied(unpacked<0>(first, negative[0][i]), scale[0][i]);
        left[1][v][e] = multiplied(unpacked<0>(second, negative[k][i]), scale[k][i]);
      }
    begin_products();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      add_product(sums, left[step / 4][step % 4],
                  matrix<128>(stage + step / 4 * HALF_BYTES + step % 4 * 32, 16));
    }
    end_products();
    await_products<0>();
    release(ring.stage);
  }
  __device__ void sum(const Place &at) {
#pragma unroll
    for (int e = 0; e < ROWS / 2; ++e) sums[e] = 0;
    hold(sums);
    for (int run = at.run; run < at.end; ++run) {
      wait(shared + FULL + 8 * ring.stage, ring.parity);
      add_run();
      ring.next();
    }
    hold(sums);
  }
  __device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
  // Whether this was the last part of the tile; it has all sums then.
  __device__ bool add_parts(const Place &at) {
    const int tile = at.tile * work.row_tiles + at.row / ROWS;
    float *parts = work.parts + (long long)tile * work.splits * (ROWS / 2 * THREADS) + threadIdx.x;
#pragma unroll
    for (int e = 0; e < ROWS / 2; ++e) __stcg(parts + (at.split * (ROWS / 2) + e) * THREADS, sums[e]);
    __threadfence();
    meet();
    if (threadIdx.x == 0) {
      const bool is_last = atomicAdd(work.counts + tile, 1) == work.splits - 1;
      if (is_last) work.counts[tile] = 0;
      __threadfence();
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + IS_LAST), "r"((u32)is_last) : "memory");
    }
    meet();
    u32 is_last;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(is_last) : "r"(shared + IS_LAST) : "memory");
    if (!is_last) return false;
    __threadfence();
#pragma unroll
    for (int e = 0; e < ROWS / 2; ++e) sums[e] = 0;
    for (int split = 0; split < work.splits; ++split)
#pragma unroll
      for (int e = 0; e < ROWS / 2; ++e) sums[e] += __ldcg(parts + (split * (ROWS / 2) + e) * THREADS);
    return true;
  }
  __device__ float bias_of(int output) const {
    if (!work.bias || output >= work.num_outputs) return 0;
    return work.is_wide_bias ? static_cast<const float *>(work.bias)[output]
                             : wide(static_cast<const unsigned short *>(work.bias)[output]);
  }
  __device__ void store(const Place &at) {
    const int first = at.tile * OUTPUTS + output - lane / 4;  // of the warp's 16
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float bias = bias_of(first + lane / 4 + 8 * i);
      const int from = first + 8 * i + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) {
        const u32 pair = transposed(packed(sums[4 * j + 2 * i] + bias, sums[4 * j + 2 * i + 1] + bias));
        const int row = at.row + 8 * j + lane / 4;
        if (row < work.num_rows && from < work.num_outputs)
          *reinterpret_cast<u32 *>(work.out + (long long)row * work.num_outputs + from) = pair;
      }
    }
  }
  __device__ void run() {
    for (Place at(work); at.is_there(); at.item += gridDim.x, at.begin()) {
      sum(at);
      asm volatile("griddepcontrol.wait;" ::: "memory");
      if (work.splits == 1 || add_parts(at)) store(at);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
multiply_rows(const __grid_constant__ Map x_map, const __grid_constant__ Map values_map,
              const __grid_constant__ Work work) {
  extern __shared__ unsigned char memory[];
  const u32 shared = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == THREADS) {
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared + FULL + 8 * stage, 1);
      make_barrier(shared + EMPTY + 8 * stage, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    proxy_fence();
  }
  __syncthreads();
  if (threadIdx.x < THREADS) Consumer(work, shared).run();
  else if (threadIdx.x == THREADS) Producer{x_map, values_map, work, shared}.run();
}
