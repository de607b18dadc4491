// Products y = x W^T of a few rows with a weight of 4 or 8 bit integers, w = (q - z) s, on Hopper. What bounds them is
// reading the weight, so it is asked for before earlier kernels are done.
//
// The weight lies in pieces of 64 rows of 64 bytes (matmul/grouped.settled). A pair of tiles is 32 outputs, a run 128
// inputs: half a piece of four bits, of two pieces of eight. Programs of a cluster share the runs of the same pairs. An
// item is a pair and a part of the program's runs. A warp has items of its own, and brings what they consist of to a
// ring of its own in shared memory: no warp waits for another until its items are done. Numbers are the left factor of
// mma.m16n8k16, rows of x the right one. A lane has 16 bytes of each of four outputs, which are 16 inputs and the 16
// that lie 64 behind: the program brings x to shared memory in that order, once. Sums of parts, then of programs, are
// added in their order, so a result does not depend on which was first.
//
// Constants of the host: IS_BFLOAT16, BITS, BLOCKS of 8 rows of x, HAS_ZEROS, IN_HALVES (groups of 64: each half of a
// run has its own scale), WARPS beside the one that fills rings, REGISTERS of a thread.

constexpr int THREADS = 32 * WARPS, TILES = 2;
constexpr u32 PIECES = BITS == 8 ? 2 : 1, PIECE_BYTES = 4096, PART_BYTES = PIECE_BYTES / 2;
// Numbers of 4 bits stay 128 larger in bfloat16, and sums are corrected: that is less than taking it from each.
constexpr bool CORRECTS = BITS == 4 && IS_BFLOAT16;
constexpr int SCALES_OF_RUN = IN_HALVES ? 2 : 1;
constexpr int ELEMENTS = 128 * BLOCKS;  // of a tile's sums
constexpr int X_AT_ONCE = 6;            // pieces of x that a thread asks for

// x: (num_rows, inputs), rows x_stride apart. Scales and zeros: (groups, num_outputs). A program has `pairs` and
// `runs`, the first `more_pairs` clusters and `more_runs` programs of a cluster one more. A ring has `stages`.
struct Work {
  int num_rows, num_outputs, num_runs, runs_of_group, x_stride;
  int pairs, more_pairs, runs, more_runs, parts, stages, is_wide_bias;
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
__device__ __forceinline__ uint4 read_shared(u32 from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
}
__device__ __forceinline__ bool is_over(u32 barrier, u32 parity) {
  u32 found;
  asm volatile("{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
               "selp.u32 %0, 1, 0, over;\n}" : "=r"(found) : "r"(barrier), "r"(parity) : "memory");
  return found;
}
template <int SHIFT> __device__ __forceinline__ u32 of_tile(u32 word, u32 negative) {
  return CORRECTS ? behind_base<0x000F000F>(word >> SHIFT) : unpacked<SHIFT>(word, negative);
}
__device__ __forceinline__ u32 word_of(const uint4 &four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Exact for numbers as small as those here, and quicker than a division of integers.
__device__ __forceinline__ int divided(int x, int y) { return __float2int_rz(__fdividef(x + 0.5f, y)); }
// Places `first`, first + step, ... of a table with so many columns.
struct Walk {
  int row, column, rows, columns, count;

  __device__ Walk(int first, int step, int count)
      : row(divided(first, count)), rows(divided(step, count)), count(count) {
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
struct Share {
  int rank, programs, first_pair, pairs, first_run, runs, runs_of_part, more_of_parts;

  __device__ Share(const Work &work) {
    int cluster;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(programs));
    first_pair = cluster * work.pairs + min(cluster, work.more_pairs);
    pairs = work.pairs + (cluster < work.more_pairs);
    first_run = rank * work.runs + min(rank, work.more_runs);
    runs = work.runs + (rank < work.more_runs);
    runs_of_part = divided(runs, work.parts);
    more_of_parts = runs - runs_of_part * work.parts;
  }
  __device__ int begin(int part) const { return part * runs_of_part + min(part, more_of_parts); }
};

// Where everything lies in shared memory. Sums: of each of this program's tiles, of each program and part.
struct Room {
  u32 rings, barriers, started, x, scales, zeros, pitch, sums;

  __device__ Room(u32 shared, const Work &work, u32 programs, int groups) {
    const int pairs = work.pairs + (work.more_pairs > 0), runs = work.runs + (work.more_runs > 0);
    pitch = pairs * 64;
    rings = shared;
    barriers = rings + WARPS * work.stages * PART_BYTES;
    started = barriers + WARPS * work.stages * 8;
    sums = started + 16;
    x = sums + (2 * pairs + programs - 1) / programs * programs * work.parts * ELEMENTS * 4;
    scales = x + work.num_rows * runs * 256;
    zeros = scales + groups * pitch;
  }
};

// A warp's ring. Another warp fills it, then its first lane asks for what comes where a piece was read. Until x is
// there, one piece at a time is on its way: the small kernels on which x waits would wait behind more.
struct Pieces {
  const Work &work;
  const Share &share;
  u32 shared, barriers, stage = 0, parity = 0;
  Walk item;
  int left = 0;
  const unsigned char *from = nullptr;
  u64 policy;

  __device__ Pieces(const Work &work, const Share &share, const Room &room, u64 policy, int warp)
      : work(work), share(share), shared(room.rings + warp * work.stages * PART_BYTES),
        barriers(room.barriers + warp * work.stages * 8), item(warp, WARPS, share.pairs), policy(policy) {
    begin();
  }
  // By one thread. `started` stands where it says whether x is there; too early a yes costs time only.
  __device__ void fill(u32 started) {
#pragma unroll 1
    for (int i = 0; i < work.stages; ++i) make_barrier(barriers + 8 * i, 1);
    proxy_fence();
#pragma unroll 1
    for (int i = 0; i < work.stages && left > 0;) {
      u32 is_started;
      asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(is_started) : "r"(started));
      if (i == 0 || is_started || is_over(barriers + 8 * (i - 1), 0)) bring_next(i++);
    }
  }
  // Another thread fills the ring.
  __device__ void skip() {
#pragma unroll 1
    for (int i = 0; i < work.stages; ++i) step();
  }
  __device__ void begin() {
    if (item.row >= work.parts) return;
    const int pair = share.first_pair + item.column, run = share.begin(item.row);
    left = (share.begin(item.row + 1) - run) * PIECES;
    from = work.values + (((u64)(pair / 2) * work.num_runs + share.first_run + run) * PIECES * PIECE_BYTES
                          + pair % 2 * PART_BYTES);
  }
  // By the first lane.
  __device__ void bring_next(int to) {
    if (left == 0) return;
    expect(barriers + 8 * to, PART_BYTES);
    bring_bytes(shared + to * PART_BYTES, from, PART_BYTES, barriers + 8 * to, policy);
    step();
  }
  __device__ void step() {
    from += PIECE_BYTES;
    if (--left > 0) return;
    left = 0;
    item.next();
    begin();
  }
  // 16 bytes of each of four outputs, 8 apart. What was read makes room for the next piece.
  __device__ void take(uint4 (&numbers)[TILES][2]) {
    wait(barriers + 8 * stage, parity);
    const u32 at = shared + stage * PART_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) numbers[i / 2][i % 2] = read_shared(at + i * 512);
    __syncwarp();
    if (threadIdx.x % 32 == 0) bring_next(stage);
    if (++stage == work.stages) { stage = 0; parity ^= 1; }
  }
};

// x of this program's runs, in the order in which lanes read it: of each run, half and 8 of a lane's 16 inputs all
// rows, four lanes each. Pairs of inputs are two apart, as numbers are unpacked.
struct Rows {
  const Work &work;
  const Share &share;
  const Room &room;

  __device__ void bring(Walk place) const {
    const int eight = threadIdx.x % 16, stride = 2 * work.x_stride;
    const unsigned char *from = reinterpret_cast<const unsigned char *>(work.x) + share.first_run * 256 + eight * 16;
    const u32 to = room.x + (eight / 8 * 2 + eight % 2) * work.num_rows * 64 + eight / 2 % 4 * 16;
    while (place.row < work.num_rows) {
      Walk after = place;
      uint4 found[X_AT_ONCE];
#pragma unroll
      for (int i = 0; i < X_AT_ONCE && after.row < work.num_rows; ++i, after.next())
        found[i] = __ldcg(reinterpret_cast<const uint4 *>(from + (long long)after.row * stride + after.column * 256));
#pragma unroll
      for (int i = 0; i < X_AT_ONCE && place.row < work.num_rows; ++i, place.next())
        leave(found[i], to + place.column * work.num_rows * 256 + place.row * 64);
    }
  }
  static __device__ void leave(const uint4 &words, u32 to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(__byte_perm(words.x, words.y, 0x5410)),
                 "r"(__byte_perm(words.x, words.y, 0x7632)), "r"(__byte_perm(words.z, words.w, 0x5410)),
                 "r"(__byte_perm(words.z, words.w, 0x7632)) : "memory");
  }
};

// Of the four outputs of a lane; `above`: what numbers are larger by than what they mean.
struct Scales {
  float scale[2 * TILES], above[2 * TILES];

  __device__ void read(const Room &room, u32 at) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      scale[i] = wide(half_from_shared(room.scales + at + 16 * i));
      above[i] = above_zero(HAS_ZEROS ? wide(half_from_shared(room.zeros + at + 16 * i)) : MIDDLE);
    }
  }
};

// Runs of a pair; the place of a group's scales moves with them.
struct Item {
  int run, end, in_group;
  u32 scales;

  __device__ Item(const Work &work, const Share &share, const Room &room, const Walk &place, int first_group)
      : run(share.begin(place.row)), end(share.begin(place.row + 1)) {
    const int group = divided(share.first_run + run, work.runs_of_group);
    in_group = share.first_run + run - group * work.runs_of_group;
    scales = (IN_HALVES ? 2 * run : group - first_group) * room.pitch + place.column * 64;
  }
};

struct Multiplier {
  const Work &work;
  const Share &share;
  const Room &room;
  Pieces &pieces;
  const int lane = threadIdx.x % 32, first_group;
  float sums[TILES][BLOCKS][4], products[TILES][BLOCKS][4], x_sums[BLOCKS][4];

  __device__ void add_half(const uint4 (&numbers)[TILES][2], const Scales &scales, int half, u32 x) {
    constexpr int NEXT = BITS == 4 ? 4 : 0;
    uint4 right[BLOCKS][2];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int part = 0; part < 2; ++part)
        right[b][part] = read_shared(x + part * work.num_rows * 64 + min(8 * b + lane / 4, work.num_rows - 1) * 64);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 rows[BLOCKS][2];
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        rows[b][0] = word_of(right[b][w / 2], w % 2 * 2);
        rows[b][1] = word_of(right[b][w / 2], w % 2 * 2 + 1);
        if (CORRECTS) multiply_tile(x_sums[b], {ONES, ONES, ONES, ONES}, rows[b]);
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        u32 left[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float above = scales.above[2 * t + i];
          const u32 word = word_of(numbers[t][i], w), negative = packed(-above, -above);
          left[i] = half ? of_tile<NEXT>(word, negative) : of_tile<0>(word, negative);
          left[2 + i] = half ? of_tile<8 + NEXT>(word, negative) : of_tile<8>(word, negative);
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) multiply_tile(products[t][b], left, rows[b]);
      }
    }
  }
  // A group's products are scaled; what its numbers are larger by is taken from them first.
  __device__ void add_group(const Scales &scales) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float &product = products[t][b][e];
          if (CORRECTS) product = fmaf(x_sums[b][e % 2], -scales.above[2 * t + e / 2], product);
          sums[t][b][e] = fmaf(product, scales.scale[2 * t + e / 2], sums[t][b][e]);
          product = 0;
        }
#pragma unroll
    for (int e = 0; e < 4 * BLOCKS; ++e) x_sums[e / 4][e % 4] = 0;
  }
  __device__ void add_run(int run, u32 scales_at) {
    uint4 numbers[TILES][2];
    Scales scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0 || IN_HALVES) scales.read(room, scales_at + half * room.pitch);
      if (half < PIECES) pieces.take(numbers);
      add_half(numbers, scales, half, room.x + (run * 2 + half) * work.num_rows * 128 + lane % 4 * 16);
      if (half == 1 || IN_HALVES) add_group(scales);
    }
  }
  __device__ void multiply_item(Item item) {
#pragma unroll
    for (int e = 0; e < TILES * BLOCKS * 4; ++e)
      sums[e / 4 / BLOCKS][e / 4 % BLOCKS][e % 4] = products[e / 4 / BLOCKS][e / 4 % BLOCKS][e % 4] = 0;
#pragma unroll
    for (int e = 0; e < 4 * BLOCKS; ++e) x_sums[e / 4][e % 4] = 0;
    for (; item.run < item.end; ++item.run) {
      add_run(item.run, item.scales + lane / 4 * 2);
      if (++item.in_group < work.runs_of_group) continue;
      item.in_group = 0;
      item.scales += SCALES_OF_RUN * room.pitch;
    }
  }
  // Sums of a tile go to the program that ends it.
  __device__ void leave(int pair, int part) const {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const int tile = 2 * pair + t, slot = divided(tile, share.programs), owner = tile - slot * share.programs;
      const int at = (slot * share.programs + share.rank) * work.parts + part;
      u32 there;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(room.sums + at * ELEMENTS * 4), "r"(owner));
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"r"(there + (b * 128 + lane * 4) * 4), "f"(sums[t][b][0]), "f"(sums[t][b][1]),
                       "f"(sums[t][b][2]), "f"(sums[t][b][3]) : "memory");
    }
  }
  __device__ void run(Walk place, Item item) {
    while (place.row < work.parts) {
      multiply_item(item);
      leave(place.column, place.row);
      place.next();
      item = Item(work, share, room, place, first_group);
    }
  }
  // Adds what programs and parts left, in their order.
  __device__ void end(Walk place) const {
    const int in_tile = threadIdx.x % 16, count = share.programs * work.parts;
    for (; place.row < work.num_rows; place.next()) {
      const int row = place.row, slot = place.column;
      const int output = (share.first_pair * 2 + slot * share.programs + share.rank) * 16 + in_tile;
      if (output >= work.num_outputs) continue;
      u32 from = room.sums + (slot * count * ELEMENTS + row / 8 * 128 + in_tile % 8 * 16 + row % 8 / 2 * 4 + row % 2
                              + in_tile / 8 * 2) * 4;
      float sum = 0;
#pragma unroll 4
      for (int part = 0; part < count; ++part, from += ELEMENTS * 4) {
        float found;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found) : "r"(from));
        sum += found;
      }
      if (work.bias) sum += work.is_wide_bias ? static_cast<const float *>(work.bias)[output]
                                              : wide(static_cast<const unsigned short *>(work.bias)[output]);
      work.out[(long long)row * work.num_outputs + output] = (unsigned short)packed(sum, sum);
    }
  }
};

// Scales and zeros of all outputs of the cluster, for groups of this program.
__device__ __forceinline__ void bring_scales(const Work &work, const Share &share, const Room &room, int first_group,
                                             int groups) {
  for (Walk place(threadIdx.x, THREADS, share.pairs * 4); place.row < groups; place.next()) {
    const int output = share.first_pair * 32 + place.column * 8;
    if (output >= work.num_outputs) continue;
    const long long from = (long long)(first_group + place.row) * work.num_outputs + output;
    const u32 to = room.scales + place.row * room.pitch + place.column * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(work.scales + from) : "memory");
    if (HAS_ZEROS)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   ::"r"(to + room.zeros - room.scales), "l"(work.zeros + from) : "memory");
  }
}

// By a warp of its own, since no other may wait for pieces before x: each lane fills a warp's ring.
__device__ __forceinline__ void fill_rings(const Work &work, const Share &share, const Room &room, u64 policy) {
  const int lane = threadIdx.x % 32;
  Pieces pieces(work, share, room, policy, lane);
  if (lane < WARPS) pieces.fill(room.started);
  __syncwarp();
  asm volatile("bar.arrive 1, %0;" ::"n"(THREADS + 32) : "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern "C" __global__ void __maxnreg__(REGISTERS) multiply_few_rows(const __grid_constant__ Work work) {
  extern __shared__ __align__(128) unsigned char memory[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const Share share(work);
  // Programs of a cluster have to be there when their neighbours leave sums.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  const int first_group = IN_HALVES ? 2 * share.first_run : divided(share.first_run, work.runs_of_group);
  const int last_run = share.first_run + share.runs;
  const int groups = (IN_HALVES ? 2 * last_run : divided(last_run - 1, work.runs_of_group) + 1) - first_group;
  const Room room((u32)__cvta_generic_to_shared(memory), work, share.programs, groups);
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const int warp = threadIdx.x / 32;
  if (warp == WARPS) return fill_rings(work, share, room, policy);
  if (threadIdx.x == 0) asm volatile("st.volatile.shared.u32 [%0], 0;" ::"r"(room.started) : "memory");
  bring_scales(work, share, room, first_group, groups);
  Pieces pieces(work, share, room, policy, warp);
  pieces.skip();
  const Walk item(warp, WARPS, share.pairs), x_place(threadIdx.x / 16, THREADS / 16, share.runs);
  const Walk end_place(threadIdx.x / 16, THREADS / 16,
                       divided(2 * share.pairs - share.rank + share.programs - 1, share.programs));
  const Item first_item(work, share, room, item, first_group);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) asm volatile("st.volatile.shared.u32 [%0], 1;" ::"r"(room.started) : "memory");
  Rows{work, share, room}.bring(x_place);
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS + 32) : "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  Multiplier multiplier{work, share, room, pieces, (int)threadIdx.x % 32, first_group};
  multiplier.run(item, first_item);
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  multiplier.end(end_place);
}
