// Products y = x W^T of a few rows with a weight of 4 or 8 bit integers, w = (q - z) s, on Hopper. What bounds them is
// reading the weight, so it is asked for before earlier kernels are done.
//
// The weight lies in pieces of 64 rows of 64 bytes (grouped_products.settled). A tile is 16 outputs, a run 128 inputs:
// one piece of four bits, two of eight. Programs of a cluster share the runs, so do the warps of a program. Each warp
// has a ring of its own; its 16 x 128 numbers are the left factor of mma.m16n8k16, rows of x, in registers, the right
// one. A lane has 16 bytes of two outputs, which are 16 inputs and the 16 that lie 64 behind: x is read in that order.
// Sums of warps, then of programs, are added in their order, so a result does not depend on which was first.
//
// Constants of the host: IS_BFLOAT16, BITS, BLOCKS of 8 rows of x, HAS_ZEROS, IN_HALVES (groups of 64: each half of a
// run has its own scale), PROGRAMS of a cluster.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int RUNS = BLOCKS > 2 ? 1 : 2;  // that a warp has of one tile at once
constexpr int PIECES = BITS == 8 ? 2 : 1, PIECE_BYTES = 4096, PART_BYTES = 1024;
constexpr int ELEMENTS = 128 * BLOCKS;  // of a tile's sums
constexpr u32 ONES = IS_BFLOAT16 ? 0x3F803F80 : 0x3C003C00;
// Floats whose last mantissa bits count ones, and what 4 bits are larger than what they mean without zeros.
constexpr u32 BASE_BITS = IS_BFLOAT16 ? 0x43004300 : 0x64006400;
constexpr float BASE = IS_BFLOAT16 ? 128 : 1024, MIDDLE = 8;

// x: (num_rows, inputs), rows x_stride apart. Scales and zeros: (groups, num_outputs).
struct Work {
  int num_rows, num_outputs, num_runs, runs_of_group, x_stride, stages, tiles_of_cluster, is_wide_bias;
  const unsigned short *x;
  const unsigned char *values;
  const unsigned short *scales, *zeros;
  const void *bias;
  unsigned short *out;
};

__device__ __forceinline__ void bring_bytes(u32 to, const void *from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void multiply_tile(float (&sums)[4], const u32 (&left)[4], const u32 (&right)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
__device__ __forceinline__ u32 fused(u32 x, u32 y, u32 z) {
  u32 result;
#if IS_BFLOAT16
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
#endif
  return result;
}
__device__ __forceinline__ float wide(unsigned short x) {
#if IS_BFLOAT16
  return __uint_as_float((u32)x << 16);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#endif
}
__device__ __forceinline__ uint4 from_shared(u32 address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  return x;
}
__device__ __forceinline__ unsigned short half_from_shared(u32 address) {
  unsigned short x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address));
  return x;
}
// Two numbers 16 bits apart, from bit SHIFT on, less `negative` of what is above theirs; exact.
template <int SHIFT> __device__ __forceinline__ u32 unpacked(u32 word, u32 negative) {
#if BITS == 4
  return fused(((word >> SHIFT) & 0x000F000F) | BASE_BITS, ONES, negative);
#elif IS_BFLOAT16
  // 128 + the low 7 bits, less 128, or 256 where the sign is set.
  const u32 low = ((word >> SHIFT) & 0x007F007F) | BASE_BITS, above = ((word >> SHIFT) & 0x00800080) | BASE_BITS;
  const u32 value = fused(above, 0xBF80BF80, low);
  return HAS_ZEROS ? fused(value, ONES, negative) : value;
#else
  return fused((((word ^ 0x80808080) >> SHIFT) & 0x00FF00FF) | BASE_BITS, ONES, negative);
#endif
}

// A cluster has tiles `first_tile` to `last_tile`; this program runs `first_run` to `last_run` of them; this warp those
// from `begin` on, `count` in all, in as many passes as all warps need.
struct Share {
  int rank, first_tile, last_tile, first_run, last_run, begin, count, passes;

  __device__ Share(const Work &work) {
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int clusters = gridDim.x / PROGRAMS, cluster = blockIdx.x / PROGRAMS, warp = threadIdx.x / 32;
    const int num_tiles = (work.num_outputs + 15) / 16;
    first_tile = (int)((long long)num_tiles * cluster / clusters);
    last_tile = (int)((long long)num_tiles * (cluster + 1) / clusters);
    first_run = work.num_runs * rank / PROGRAMS;
    last_run = work.num_runs * (rank + 1) / PROGRAMS;
    const int runs = last_run - first_run;
    begin = first_run + runs * warp / WARPS;
    count = first_run + runs * (warp + 1) / WARPS - begin;
    passes = ((runs + WARPS - 1) / WARPS + RUNS - 1) / RUNS;
  }
  __device__ int tiles() const { return last_tile - first_tile; }
  __device__ int run(int pass) const { return begin + count * pass / passes; }
};

// Where everything lies in shared memory.
struct Room {
  u32 ring, slot_bytes, scales, zeros, pitch, parts, totals, full, scaled;

  __device__ Room(u32 shared, const Work &work, const Share &share, int groups) {
    slot_bytes = RUNS * PIECES * PART_BYTES;
    pitch = work.tiles_of_cluster * 32;
    ring = shared;
    scales = ring + WARPS * work.stages * slot_bytes;
    zeros = scales + groups * pitch;
    parts = zeros + (HAS_ZEROS ? groups * pitch : 0);
    totals = parts + 2 * WARPS * ELEMENTS * 4;
    full = totals + work.tiles_of_cluster * ELEMENTS * 4;
    scaled = full + WARPS * work.stages * 8;
  }
};

struct Warp {
  const Work &work;
  const Share &share;
  const Room &room;
  u64 policy;
  int lane, warp;
  u32 x[RUNS][BLOCKS][2][4][2];
  // The next item to be asked for: a pass and a tile; where it goes.
  int asked_pass = 0, asked_tile = 0;

  __device__ u32 slot(int stage) const { return room.ring + (warp * work.stages + stage) * room.slot_bytes; }
  __device__ u32 barrier(int stage) const { return room.full + (warp * work.stages + stage) * 8; }
  __device__ bool ask(int stage) {
    if (asked_pass == share.passes || share.count == 0) return false;
    const int run = share.run(asked_pass), pieces = (share.run(asked_pass + 1) - run) * PIECES;
    const int tile = share.first_tile + asked_tile;
    const unsigned char *from = work.values + (long long)(tile / 4) * work.num_runs * PIECES * PIECE_BYTES +
                                tile % 4 * PART_BYTES + (long long)(run * PIECES + lane) * PIECE_BYTES;
    if (lane == 0) expect(barrier(stage), pieces * PART_BYTES);
    __syncwarp();
    if (lane < pieces) bring_bytes(slot(stage) + lane * PART_BYTES, from, PART_BYTES, barrier(stage), policy);
    if (++asked_tile == share.tiles()) { asked_tile = 0; ++asked_pass; }
    return true;
  }
  __device__ void load_x(int pass) {
    const int run = share.run(pass), runs = share.run(pass + 1) - run;
#pragma unroll
    for (int r = 0; r < RUNS; ++r)
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            const int row = 8 * b + lane / 4;
            uint4 words = make_uint4(0, 0, 0, 0);
            if (r < runs && row < work.num_rows)
              words = __ldcg(reinterpret_cast<const uint4 *>(work.x + (long long)row * work.x_stride + (run + r) * 128 +
                                                             half * 64 + lane % 4 * 16 + part * 8));
            u32(&to)[4][2] = x[r][b][half];
            to[2 * part][0] = __byte_perm(words.x, words.y, 0x5410);
            to[2 * part][1] = __byte_perm(words.x, words.y, 0x7632);
            to[2 * part + 1][0] = __byte_perm(words.z, words.w, 0x5410);
            to[2 * part + 1][1] = __byte_perm(words.z, words.w, 0x7632);
          }
  }
  // Of the two outputs of a lane, 8 apart.
  __device__ void scales_of(float (&scale)[2], u32 (&negative)[2], int group, int tile) const {
    const u32 at = group * room.pitch + (tile * 16 + lane / 4) * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = wide(half_from_shared(room.scales + at + 16 * i));
      const float zero = HAS_ZEROS ? wide(half_from_shared(room.zeros + at + 16 * i)) : BITS == 4 ? MIDDLE : 0;
      const float above = zero + (BITS == 4 ? BASE : IS_BFLOAT16 ? 0 : BASE + 128);
      negative[i] = packed(-above, -above);
    }
  }
  __device__ void add_run(float (&sums)[BLOCKS][4], const u32 (&x)[BLOCKS][2][4][2], u32 at, int group, int tile) const {
    float products[2][BLOCKS][4] = {};
    float scale[2][2];
    u32 negative[2][2];
    scales_of(scale[0], negative[0], group, tile);
    if (IN_HALVES) {
      scales_of(scale[1], negative[1], group + 1, tile);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) { scale[1][i] = scale[0][i]; negative[1][i] = negative[0][i]; }
    }
    uint4 read[PIECES][2];
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
      for (int i = 0; i < 2; ++i) read[p][i] = from_shared(at + p * PART_BYTES + i * 512 + lane * 16);
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr int NEXT = BITS == 4 ? 4 : 0;
        u32 left[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 &four = read[BITS == 8 ? half : 0][i];
          const u32 word = w == 0 ? four.x : w == 1 ? four.y : w == 2 ? four.z : four.w;
          left[i] = half ? unpacked<NEXT>(word, negative[1][i]) : unpacked<0>(word, negative[0][i]);
          left[2 + i] = half ? unpacked<8 + NEXT>(word, negative[1][i]) : unpacked<8>(word, negative[0][i]);
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) multiply_tile(products[half][b], left, x[b][half][w]);
      }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[b][e] = fmaf(products[0][b][e], scale[0][e / 2], fmaf(products[1][b][e], scale[1][e / 2], sums[b][e]));
  }
};

// Adds the sums of warps and programs.
struct Ender {
  const Work &work;
  const Share &share;
  const Room &room;

  __device__ u32 total(int tile, int e) const { return room.totals + (tile * ELEMENTS + e) * 4; }
  __device__ void add(u32 parts, int tile, int pass) const {
#pragma unroll
    for (int first = 0; first < ELEMENTS; first += THREADS) {
      const int e = first + threadIdx.x;
      if (e >= ELEMENTS) break;
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) {
        float part;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part) : "r"(parts + (warp * ELEMENTS + e) * 4));
        sum += part;
      }
      if (pass > 0) {
        float before;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(before) : "r"(total(tile, e)));
        sum += before;
      }
      if (PROGRAMS == 1 && pass + 1 == share.passes) store(sum, tile, e);
      else asm volatile("st.shared.f32 [%0], %1;" ::"r"(total(tile, e)), "f"(sum) : "memory");
    }
  }
  // Each program of a cluster ends some of its tiles.
  __device__ void end() const {
    for (int tile = share.rank; tile < share.tiles(); tile += PROGRAMS)
#pragma unroll
      for (int first = 0; first < ELEMENTS; first += THREADS) {
        const int e = first + threadIdx.x;
        if (e >= ELEMENTS) break;
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply_few_rows(const __grid_constant__ Work work) {
  extern __shared__ __align__(128) unsigned char memory[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const Share share(work);
  // Groups of this program's runs.
  const int first_group = IN_HALVES ? 2 * share.first_run : share.first_run / work.runs_of_group;
  const int last_group = IN_HALVES ? 2 * share.last_run : (share.last_run - 1) / work.runs_of_group + 1;
  const Room room((u32)__cvta_generic_to_shared(memory), work, share, last_group - first_group);
  Warp warp{work, share, room, 0, (int)threadIdx.x % 32, (int)threadIdx.x / 32};
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(warp.policy));
  if (warp.lane < work.stages) make_barrier(warp.barrier(warp.lane), 1);
  if (threadIdx.x == 0) make_barrier(room.scaled, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  proxy_fence();
  __syncthreads();
  const int first_output = share.first_tile * 16;
  const u32 bytes = 2 * min(share.tiles() * 16, work.num_outputs - first_output);
  if (threadIdx.x == 0) expect(room.scaled, bytes * (last_group - first_group) * (HAS_ZEROS ? 2 : 1));
  for (int group = first_group + threadIdx.x; group < last_group; group += THREADS) {
    const long long from = (long long)group * work.num_outputs + first_output;
    const u32 to = (group - first_group) * room.pitch;
    bring_bytes(room.scales + to, work.scales + from, bytes, room.scaled, warp.policy);
    if (HAS_ZEROS) bring_bytes(room.zeros + to, work.zeros + from, bytes, room.scaled, warp.policy);
  }
  __syncwarp();
  for (int stage = 0; stage < work.stages; ++stage)
    if (!warp.ask(stage)) break;
  wait(room.scaled, 0);
  asm volatile("griddepcontrol.wait;" ::: "memory");

  const Ender ender{work, share, room};
  int stage = 0, item = 0;
  u32 parity = 0;
  for (int pass = 0; pass < share.passes; ++pass) {
    warp.load_x(pass);
    const int run = share.run(pass), runs = share.run(pass + 1) - run;
    for (int tile = 0; tile < share.tiles(); ++tile, ++item) {
      float sums[BLOCKS][4] = {};
      if (runs > 0) {
        wait(warp.barrier(stage), parity);
#pragma unroll
        for (int r = 0; r < RUNS; ++r)
          if (r < runs) {
            const int group = IN_HALVES ? 2 * (run + r) : (run + r) / work.runs_of_group;
            warp.add_run(sums, warp.x[r], warp.slot(stage) + r * PIECES * PART_BYTES, group - first_group, tile);
          }
        __syncwarp();
        warp.ask(stage);
        if (++stage == work.stages) { stage = 0; parity ^= 1; }
      }
      const u32 parts = room.parts + item % 2 * WARPS * ELEMENTS * 4;
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"r"(parts + (warp.warp * ELEMENTS + b * 128 + warp.lane * 4) * 4), "f"(sums[b][0]),
                       "f"(sums[b][1]), "f"(sums[b][2]), "f"(sums[b][3]) : "memory");
      __syncthreads();
      ender.add(parts, tile, pass);
    }
  }
  if (PROGRAMS > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    ender.end();
    // Nobody leaves while others read its sums.
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
}
