// Products y = x W^T of a few rows with a weight of 4 or 8 bit integers, w = (q - z) s, on Hopper. What bounds them is
// reading the weight, so it is asked for before earlier kernels are done.
//
// The weight lies in pieces of 64 rows of 64 bytes (grouped_products.settled). A tile is 16 outputs, a run 128 inputs:
// one piece of four bits, two of eight. Programs of a cluster share the runs, so do the warps of a program. A warp's
// 16 x 128 numbers go straight to registers: they are the left factor of mma.m16n8k16, rows of x the right one. A lane
// has 16 bytes of two outputs, which are 16 inputs and the 16 that lie 64 behind: x is read in that order. Sums of
// warps, then of programs, are added in their order, so a result does not depend on which was first.
//
// Constants of the host: IS_BFLOAT16, BITS, BLOCKS of 8 rows of x, HAS_ZEROS, IN_HALVES (groups of 64: each half of a
// run has its own scale), PROGRAMS of a cluster, WARPS, TILES whose four bits a warp has at once, REGISTERS of a thread.

constexpr int THREADS = 32 * WARPS;
constexpr int PIECES = BITS == 8 ? 2 : 1, PIECE_BYTES = 4096, PART_BYTES = 1024;
constexpr int AT_ONCE = TILES / PIECES;  // tiles of which a warp has numbers
// Numbers of 4 bits stay 128 larger in bfloat16, and sums are corrected: that is less than taking it from each.
constexpr bool CORRECTS = BITS == 4 && IS_BFLOAT16;
constexpr bool HAS_ROOM = BLOCKS == 1;  // in registers, for the next pass's rows of x
constexpr int SCALES_OF_RUN = IN_HALVES ? 2 : 1;
constexpr int ELEMENTS = 128 * BLOCKS;  // of a tile's sums

// x: (num_rows, inputs), rows x_stride apart. Scales and zeros: (groups, num_outputs).
struct Work {
  int num_rows, num_outputs, num_runs, runs_of_group, x_stride, tiles_of_cluster, is_wide_bias;
  const unsigned short *x;
  const unsigned char *values;
  const unsigned short *scales, *zeros;
  const void *bias;
  unsigned short *out;
};

__device__ __forceinline__ void multiply_tile(float (&sums)[4], const u32 (&left)[4], const u32 (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
// What is read once, and never written by a step.
__device__ __forceinline__ uint4 streamed(const unsigned char *from, u64 policy) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from), "l"(policy));
  return x;
}
template <int SHIFT> __device__ __forceinline__ u32 of_tile(u32 word, u32 negative) {
  return CORRECTS ? behind_base<0x000F000F>(word >> SHIFT) : unpacked<SHIFT>(word, negative);
}

// A cluster has tiles `first_tile` to `last_tile`; this program runs `first_run` to `last_run` of them; this warp those
// from `begin` on, `count` in all, one in each pass.
struct Share {
  int rank, first_tile, last_tile, first_run, last_run, begin, count, passes;

  __device__ Share(const Work &work) {
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int clusters = gridDim.x / PROGRAMS, cluster = blockIdx.x / PROGRAMS, warp = threadIdx.x / 32;
    const int num_tiles = (work.num_outputs + 15) / 16;
    first_tile = num_tiles * cluster / clusters;
    last_tile = num_tiles * (cluster + 1) / clusters;
    first_run = work.num_runs * rank / PROGRAMS;
    last_run = work.num_runs * (rank + 1) / PROGRAMS;
    const int runs = last_run - first_run;
    begin = first_run + runs * warp / WARPS;
    count = first_run + runs * (warp + 1) / WARPS - begin;
    passes = (runs + WARPS - 1) / WARPS;
  }
  __device__ int tiles() const { return last_tile - first_tile; }
};

// Where everything lies in shared memory.
struct Room {
  u32 scales, zeros, pitch, parts, totals, scaled;

  __device__ Room(u32 shared, const Work &work, int groups) {
    pitch = work.tiles_of_cluster * 32;
    scales = shared;
    zeros = scales + groups * pitch;
    parts = zeros + (HAS_ZEROS ? groups * pitch : 0);
    totals = parts + AT_ONCE * WARPS * ELEMENTS * 4;
    scaled = totals + work.tiles_of_cluster * ELEMENTS * 4;
  }
};

// A step is a pass over AT_ONCE tiles.
struct Step {
  int tile = 0, pass = 0;
  __device__ void next(int passes) {
    if (++pass == passes) { pass = 0; tile += AT_ONCE; }
  }
};

struct Warp {
  const Work &work;
  const Share &share;
  const Room &room;
  u64 policy;
  int lane, warp;
  uint4 numbers[AT_ONCE][PIECES][2];
  uint4 next_x[BLOCKS][2][2];
  u32 x[BLOCKS][2][4][2];
  float x_sums[SCALES_OF_RUN][BLOCKS][2];
  float sums[AT_ONCE][BLOCKS][4];

  __device__ bool has(const Step &step, int j) const { return step.tile + j < share.tiles() && step.pass < share.count; }
  __device__ void load_numbers(const Step &step, int j) {
    if (!has(step, j)) return;
    const u32 tile = share.first_tile + step.tile + j;
    const u32 piece = (tile / 4 * work.num_runs + share.begin + step.pass) * PIECES;
    const unsigned char *from = work.values + ((u64)piece * PIECE_BYTES + tile % 4 * PART_BYTES + lane * 16);
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
      for (int i = 0; i < 2; ++i) numbers[j][p][i] = streamed(from + p * PIECE_BYTES + i * 512, policy);
  }
  __device__ void load_x(int pass) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int row = 8 * b + lane / 4;
          next_x[b][half][part] = make_uint4(0, 0, 0, 0);
          if (pass < share.count && row < work.num_rows)
            next_x[b][half][part] = __ldcg(reinterpret_cast<const uint4 *>(
                work.x + (long long)row * work.x_stride + (share.begin + pass) * 128 + half * 64 + lane % 4 * 16 + part * 8));
        }
  }
  // Pairs of columns two apart, as numbers are unpacked; and what a group's rows of x add up to.
  __device__ void order_x() {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const uint4 words = next_x[b][half][part];
          u32(&to)[4][2] = x[b][half];
          to[2 * part][0] = __byte_perm(words.x, words.y, 0x5410);
          to[2 * part][1] = __byte_perm(words.x, words.y, 0x7632);
          to[2 * part + 1][0] = __byte_perm(words.z, words.w, 0x5410);
          to[2 * part + 1][1] = __byte_perm(words.z, words.w, 0x7632);
        }
    if (!CORRECTS) return;
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      float found[2][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int w = 0; w < 4; ++w) multiply_tile(found[IN_HALVES ? half : 0], ones, x[b][half][w]);
#pragma unroll
      for (int k = 0; k < SCALES_OF_RUN; ++k)
#pragma unroll
        for (int c = 0; c < 2; ++c) x_sums[k][b][c] = found[k][c];
    }
  }
  // Of the two outputs of a lane, 8 apart; `above`: what numbers are larger by than what they mean.
  __device__ void scales_of(float (&scale)[2], float (&above)[2], int group, int tile) const {
    const u32 at = group * room.pitch + (tile * 16 + lane / 4) * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = wide(half_from_shared(room.scales + at + 16 * i));
      above[i] = above_zero(HAS_ZEROS ? wide(half_from_shared(room.zeros + at + 16 * i)) : MIDDLE);
    }
  }
  __device__ void add_tile(int j, int group, int tile) {
    float products[SCALES_OF_RUN][BLOCKS][4] = {};
    float scale[SCALES_OF_RUN][2], above[SCALES_OF_RUN][2];
#pragma unroll
    for (int k = 0; k < SCALES_OF_RUN; ++k) scales_of(scale[k], above[k], group + k, tile);
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr int NEXT = BITS == 4 ? 4 : 0;
        const int k = IN_HALVES ? half : 0;
        u32 left[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 &four = numbers[j][BITS == 8 ? half : 0][i];
          const u32 word = w == 0 ? four.x : w == 1 ? four.y : w == 2 ? four.z : four.w;
          const u32 negative = packed(-above[k][i], -above[k][i]);
          left[i] = half ? of_tile<NEXT>(word, negative) : of_tile<0>(word, negative);
          left[2 + i] = half ? of_tile<8 + NEXT>(word, negative) : of_tile<8>(word, negative);
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) multiply_tile(products[k][b], left, x[b][half][w]);
      }
#pragma unroll
    for (int k = 0; k < SCALES_OF_RUN; ++k)
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float &sum = sums[j][b][e];
          sum = fmaf(products[k][b][e], scale[k][e / 2], sum);
          if (CORRECTS) sum = fmaf(x_sums[k][b][e % 2], -scale[k][e / 2] * above[k][e / 2], sum);
        }
  }
  __device__ void leave_sums(int j) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      float(&sum)[4] = sums[j][b];
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                   ::"r"(room.parts + ((j * WARPS + warp) * ELEMENTS + b * 128 + lane * 4) * 4), "f"(sum[0]), "f"(sum[1]),
                     "f"(sum[2]), "f"(sum[3]) : "memory");
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = 0;
    }
  }
};

// Adds the sums of warps and programs.
struct Ender {
  const Work &work;
  const Share &share;
  const Room &room;

  __device__ u32 total(int tile, int e) const { return room.totals + (tile * ELEMENTS + e) * 4; }
  __device__ void add(int first_tile) const {
#pragma unroll
    for (int first = 0; first < AT_ONCE * ELEMENTS; first += THREADS) {
      const int j = (first + threadIdx.x) / ELEMENTS, e = (first + threadIdx.x) % ELEMENTS;
      if (j >= AT_ONCE || first_tile + j >= share.tiles()) break;
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) {
        float part;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part) : "r"(room.parts + ((j * WARPS + warp) * ELEMENTS + e) * 4));
        sum += part;
      }
      if (PROGRAMS == 1) store(sum, first_tile + j, e);
      else asm volatile("st.shared.f32 [%0], %1;" ::"r"(total(first_tile + j, e)), "f"(sum) : "memory");
    }
  }
  // Each program of a cluster ends some of its tiles.
  __device__ void end() const {
    for (int i = threadIdx.x; i < share.tiles() * ELEMENTS; i += THREADS) {
      const int tile = i / ELEMENTS, e = i % ELEMENTS;
      if (tile % PROGRAMS != share.rank) continue;
      float sum = 0;
#pragma unroll
      for (int rank = 0; rank < PROGRAMS; ++rank) {
        u32 there;
        float part;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(total(tile, e)), "r"(rank));
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(there));
        sum += part;
      }
      store(sum, tile, e);
    }
  }
  __device__ void store(float sum, int tile, int e) const {
    const int lane = e % 128 / 4;
    const int row = e / 128 * 8 + lane % 4 * 2 + e % 2, output = (share.first_tile + tile) * 16 + lane / 4 + e % 4 / 2 * 8;
    if (row >= work.num_rows || output >= work.num_outputs) return;
    if (work.bias) sum += work.is_wide_bias ? static_cast<const float *>(work.bias)[output]
                                            : wide(static_cast<const unsigned short *>(work.bias)[output]);
    work.out[(long long)row * work.num_outputs + output] = (unsigned short)packed(sum, sum);
  }
};

// Scales and zeros of all outputs of the cluster, for groups of this program.
__device__ __forceinline__ void bring_scales(const Work &work, const Share &share, const Room &room, int first_group,
                                             int groups, u64 policy) {
  const int first_output = share.first_tile * 16;
  const u32 bytes = 2 * min(share.tiles() * 16, work.num_outputs - first_output);
  if (threadIdx.x == 0) expect(room.scaled, bytes * groups * (HAS_ZEROS ? 2 : 1));
  for (int group = threadIdx.x; group < groups; group += THREADS) {
    const long long from = (long long)(first_group + group) * work.num_outputs + first_output;
    bring_bytes(room.scales + group * room.pitch, work.scales + from, bytes, room.scaled, policy);
    if (HAS_ZEROS) bring_bytes(room.zeros + group * room.pitch, work.zeros + from, bytes, room.scaled, policy);
  }
}

extern "C" __global__ void __maxnreg__(REGISTERS) multiply_few_rows(const __grid_constant__ Work work) {
  extern __shared__ __align__(128) unsigned char memory[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const Share share(work);
  // Groups of this program's runs.
  const int first_group = IN_HALVES ? 2 * share.first_run : share.first_run / work.runs_of_group;
  const int last_group = IN_HALVES ? 2 * share.last_run : (share.last_run - 1) / work.runs_of_group + 1;
  const Room room((u32)__cvta_generic_to_shared(memory), work, last_group - first_group);
  Warp warp{work, share, room, 0, (int)threadIdx.x % 32, (int)threadIdx.x / 32};
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(warp.policy));
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j) warp.load_numbers(Step(), j);
  if (threadIdx.x == 0) {
    make_barrier(room.scaled, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    proxy_fence();
  }
  __syncthreads();
  bring_scales(work, share, room, first_group, last_group - first_group, warp.policy);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (HAS_ROOM) warp.load_x(0);
  wait(room.scaled, 0);

  const Ender ender{work, share, room};
  Step step;
  while (step.tile < share.tiles()) {
    Step next = step;
    next.next(share.passes);
    if (share.passes > 1 || step.tile == 0) {
      if (!HAS_ROOM) warp.load_x(step.pass);
      warp.order_x();
      if (HAS_ROOM && share.passes > 1) warp.load_x(next.pass);
    }
    const int run = share.begin + step.pass;
    const int group = (IN_HALVES ? 2 * run : run / work.runs_of_group) - first_group;
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (warp.has(step, j)) {
        warp.add_tile(j, group, step.tile + j);
        warp.load_numbers(next, j);
      }
    if (next.tile != step.tile) {
      if (step.tile > 0) __syncthreads();
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) warp.leave_sums(j);
      __syncthreads();
      ender.add(step.tile);
    }
    step = next;
  }
  if (PROGRAMS > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    ender.end();
    // Nobody leaves while others read its sums.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  }
}
