// Products y = x W^T of some rows in FP8 (e4m3) on Hopper: what bounds them is reading the weight.
//
// The weight's rows are the left factor of a warpgroup's products, the rows of x their columns. A warp brings tiles of
// both by tensor maps: 128 bytes of each row are a slice. The programs of a cluster share the slices of one tile; each
// leaves its sums in shared memory, and each adds a part of the tile, in the order of the programs. So a result does
// not depend on which was first.
//
// Constants of the host: IN_BLOCKS (scales of 128 x 128 and of rows of 128 terms), BLOCKS of 64 outputs that a warpgroup
// has, ROWS of x, STAGES, PROGRAMS of a cluster.

constexpr int CONSUMERS = 2, WARPS = 4 * CONSUMERS, THREADS = 32 * WARPS, HEIGHT = 64 * BLOCKS;
constexpr int OUTPUTS = CONSUMERS * HEIGHT, TERMS = 128;
constexpr u32 WEIGHT_BYTES = 128 * OUTPUTS, STAGE_BYTES = WEIGHT_BYTES + 128 * ROWS;
// Sums of so many columns are exchanged at once, as rows of outputs. Rows begin 4 banks apart.
constexpr int CHUNK = ROWS > 64 ? ROWS / 2 : ROWS, PITCH = OUTPUTS + 4;
constexpr u32 SCALES = STAGES * STAGE_BYTES, EXCHANGE = SCALES + (IN_BLOCKS ? STAGES * ROWS * 4 : 0);
// Barriers, 8 bytes each.
constexpr u32 FULL = EXCHANGE + CHUNK * PITCH * 4, EMPTY = FULL + 8 * STAGES;
constexpr u32 GIVEN = EMPTY + 8 * STAGES, TAKEN = GIVEN + 8;
// Where a thread has more sums than a third of a partition's registers hold, a whole warpgroup brings, and leaves its own.
constexpr bool MOVES_REGISTERS = (BLOCKS + 1) * ROWS / 2 > 120;
constexpr int ALL_THREADS = THREADS + (MOVES_REGISTERS ? 128 : 32);
// A thread adds 4 outputs of each of its rows.
constexpr int QUADS = OUTPUTS / 4, ROWS_AT_ONCE = THREADS / QUADS, ROWS_APART = PROGRAMS * ROWS_AT_ONCE;
constexpr int ROWS_A_THREAD = (CHUNK + ROWS_APART - 1) / ROWS_APART;

#define LIST_16 SUMS_0 ", " SUMS_8
#define ALL_16(d) EIGHT(d, 0), EIGHT(d, 8)
// 64 outputs, `columns`, 32 bytes of terms of each.
#define ADD_PRODUCT(columns, count, left_name, right_name, adds_name)                                                  \
  __device__ __forceinline__ void add_product(float (&sums)[count], u64 left, u64 right, int adds) {                   \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_name ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k32.f32.e4m3.e4m3 {" LIST_##count "}, " left_name ", "     \
                 right_name ", adds, 1, 1;\n}" : ALL_##count(sums) : "l"(left), "l"(right), "r"(adds));                                      \
  }                                                                                                                    \
  __device__ __forceinline__ void hold(float (&sums)[count]) { asm volatile("" : ALL_##count(sums)::"memory"); }
ADD_PRODUCT("32", 16, "%16", "%17", "%18")
ADD_PRODUCT("64", 32, "%32", "%33", "%34")
ADD_PRODUCT("96", 48, "%48", "%49", "%50")
ADD_PRODUCT("128", 64, "%64", "%65", "%66")

__device__ __forceinline__ void bring(u32 to, const Map &map, u32 barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void bring_bytes(u32 to, const void *from, u32 barrier, u32 bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void await_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ u32 in_program(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void arrive_in_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_in_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// x: (rows, terms), weight: (outputs, terms). Scales of x lie `group_stride` apart from group to group, with room for
// `room` rows; scales of the weight are one an output, or one where scale_stride is 0, or (outputs / 128, slices).
struct Work {
  int num_rows, num_outputs, num_slices, room;
  long long group_stride, scale_stride;
  const float *x_scales, *scales;
  const unsigned short *bias;
  unsigned short *out;
};

// What the programs of a cluster do: tiles `cluster`, `cluster` + clusters, ...; each the slices from `begin` to `end`.
struct Share {
  int rank, cluster, clusters, row_tiles, num_tiles, begin, end;

  __device__ Share(const Work &work) {
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cluster = blockIdx.x / PROGRAMS;
    clusters = gridDim.x / PROGRAMS;
    row_tiles = (work.num_rows + ROWS - 1) / ROWS;
    num_tiles = (work.num_outputs + OUTPUTS - 1) / OUTPUTS * row_tiles;
    begin = work.num_slices * rank / PROGRAMS;
    end = work.num_slices * (rank + 1) / PROGRAMS;
  }
};

// Tile after tile, slice after slice.
struct Place {
  const Share &share;
  int tile, slice;

  __device__ Place(const Share &share) : share(share), tile(share.cluster), slice(share.begin) {}
  __device__ bool is_there() const { return tile < share.num_tiles; }
  __device__ int output() const { return tile / share.row_tiles * OUTPUTS; }
  __device__ int row() const { return tile % share.row_tiles * ROWS; }
  __device__ void next() {
    if (++slice == share.end) { slice = share.begin; tile += share.clusters; }
  }
};

struct Producer {
  const Map &x_map, &weight_map;
  const Work &work;
  u32 shared;
  u64 policy;

  __device__ void bring_weight(const Place &place, u32 stage) {
    const int rows = min(ROWS, work.room - place.row());
    expect(shared + FULL + 8 * stage, STAGE_BYTES + (IN_BLOCKS ? 4 * rows : 0));
    bring(shared + stage * STAGE_BYTES, weight_map, shared + FULL + 8 * stage, place.slice * TERMS, place.output(),
          policy);
  }
  __device__ void bring_rows(const Place &place, u32 stage) {
    bring(shared + stage * STAGE_BYTES + WEIGHT_BYTES, x_map, shared + FULL + 8 * stage, place.slice * TERMS,
          place.row());
    if (IN_BLOCKS)
      bring_bytes(shared + SCALES + stage * ROWS * 4, work.x_scales + place.slice * work.group_stride + place.row(),
                  shared + FULL + 8 * stage, 4 * min(ROWS, work.room - place.row()));
  }
  // Weights come before earlier kernels are done, rows of x behind them.
  __device__ void run(const Share &share) {
    Place place(share), behind(share);
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    for (int stage = 0; stage < STAGES && place.is_there(); ++stage, place.next()) bring_weight(place, stage);
    await_earlier_kernels();
    for (int stage = 0; stage < STAGES && behind.is_there(); ++stage, behind.next()) bring_rows(behind, stage);
    for (Ring<STAGES> ring; place.is_there(); place.next(), ring.next()) {
      wait(shared + EMPTY + 8 * ring.stage, ring.parity);
      bring_weight(place, ring.stage);
      bring_rows(place, ring.stage);
    }
  }
};

// A warpgroup that has HEIGHT of the tile's outputs. A thread has two outputs, 8 apart, of 8 columns each two: element
// 4 * j + 2 * i + c is column 8 * j + c behind its first one.
struct Consumer {
  const Work &work;
  const Share &share;
  u32 shared;
  int group;
  Ring<STAGES> ring;
  u32 parity = 0;
  float sums[BLOCKS][ROWS / 2];

  __device__ void release(u32 stage) {
    if (threadIdx.x % 32 == 0) arrive(shared + EMPTY + 8 * stage);
  }
  __device__ void multiply_slice(float (&products)[ROWS / 2], int block) {
    const u32 stage = shared + ring.stage * STAGE_BYTES;
    const u32 left = stage + (group * HEIGHT + block * 64) * 128, right = stage + WEIGHT_BYTES;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      add_product(products, matrix<128>(left + 32 * k, 16), matrix<128>(right + 32 * k, 16), k > 0);
  }
  __device__ void add(float (&sums)[ROWS / 2], const float (&products)[ROWS / 2], float scale) {
    const u32 scales = shared + SCALES + (ring.stage * ROWS + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
      float of_rows[2] = {1, 1};
      if (IN_BLOCKS) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(of_rows[0]), "=f"(of_rows[1]) : "r"(scales + 32 * j));
        of_rows[0] *= scale;
        of_rows[1] *= scale;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &sum = sums[4 * j + e];
        sum = IN_BLOCKS ? fmaf(products[4 * j + e], of_rows[e % 2], sum) : sum + products[4 * j + e];
      }
    }
  }
  // Products of a slice are added in float32: tensor cores keep fewer bits of sums of e4m3.
  __device__ void sum(int output) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int e = 0; e < ROWS / 2; ++e) sums[b][e] = 0;
    // A scale of the next slice is asked for while this one's is used. Outputs beyond the end are not stored.
    const int last = (work.num_outputs - 1) / 128;
    const float *scales = work.scales + min((output + group * HEIGHT) / 128, last) * work.scale_stride;
    float next = IN_BLOCKS ? scales[share.begin] : 1;
    for (int slice = share.begin; slice < share.end; ++slice) {
      const float scale = next;
      if (IN_BLOCKS && slice + 1 < share.end) next = scales[slice + 1];
      wait(shared + FULL + 8 * ring.stage, ring.parity);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        float products[ROWS / 2];
        hold(products);
        begin_products();
        multiply_slice(products, b);
        end_products();
        await_products<0>();
        hold(products);
        if (!IN_BLOCKS && b == BLOCKS - 1) release(ring.stage);
        add(sums[b], products, scale);
      }
      if (IN_BLOCKS) release(ring.stage);
      ring.next();
    }
  }
  // Sums of CHUNK columns from `column` on are laid into shared memory for the cluster.
  __device__ void give(int chunk) {
    const int output = group * HEIGHT + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const u32 to = shared + EXCHANGE + (threadIdx.x % 4 * 2 * PITCH + output) * 4;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int j = 0; j < CHUNK / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          asm volatile("st.shared.f32 [%0], %1;"
                       ::"r"(to + ((8 * j + e % 2) * PITCH + 64 * b + e / 2 * 8) * 4),
                       "f"(sums[b][4 * (chunk * CHUNK / 8 + j) + e]) : "memory");
  }
  __device__ void signal(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < PROGRAMS) arrive_in_cluster(in_program(shared + barrier, threadIdx.x % 32));
  }
  // The row of a chunk that is this thread's `i`-th.
  __device__ int row(int i) const { return i * ROWS_APART + share.rank * ROWS_AT_ONCE + threadIdx.x / QUADS; }
  __device__ void ask_for_scales(float (&of_rows)[ROWS_A_THREAD], int num_rows, int first) {
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; ++i)
      of_rows[i] = !IN_BLOCKS && row(i) < num_rows ? work.x_scales[first + row(i)] : 1;
  }
  // A row's sums of all programs.
  __device__ void read(float4 (&parts)[PROGRAMS], int row) {
    const u32 at = shared + EXCHANGE + (row * PITCH + threadIdx.x % QUADS * 4) * 4;
#pragma unroll
    for (int rank = 0; rank < PROGRAMS; ++rank) {
      float4 &x = parts[rank];
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(in_program(at, rank)));
    }
  }
  // This program's rows of a chunk that begins with `first`, of the whole cluster. Two rows are read at once.
  __device__ void take(const float (&of_rows)[ROWS_A_THREAD], int num_rows, int first, int output, float4 scale,
                       float4 bias) {
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i += 2) {
      float4 parts[2][PROGRAMS];
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (i + k < ROWS_A_THREAD && row(i + k) < num_rows) read(parts[k], row(i + k));
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (i + k < ROWS_A_THREAD && row(i + k) < num_rows && output < work.num_outputs) {
          float4 sum = parts[k][0];
#pragma unroll
          for (int rank = 1; rank < PROGRAMS; ++rank) {
            const float4 x = parts[k][rank];
            sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
          }
          store(sum, scale, of_rows[i + k], bias, first + row(i + k), output);
        }
    }
  }
  __device__ void store(float4 sum, float4 scale, float of_row, float4 bias, int row, int output) {
    const u32 low = packed(fmaf(sum.x, scale.x * of_row, bias.x), fmaf(sum.y, scale.y * of_row, bias.y));
    const u32 high = packed(fmaf(sum.z, scale.z * of_row, bias.z), fmaf(sum.w, scale.w * of_row, bias.w));
    *reinterpret_cast<uint2 *>(work.out + (long long)row * work.num_outputs + output) = make_uint2(low, high);
  }
  __device__ float4 scale_of(int output) {
    if (IN_BLOCKS || output >= work.num_outputs) return make_float4(1, 1, 1, 1);
    const float *from = work.scales + output * work.scale_stride;
    return make_float4(from[0], from[work.scale_stride], from[2 * work.scale_stride], from[3 * work.scale_stride]);
  }
  __device__ float4 bias_of(int output) {
    if (!work.bias || output >= work.num_outputs) return make_float4(0, 0, 0, 0);
    const unsigned short *from = work.bias + output;
    return make_float4(wide(from[0]), wide(from[1]), wide(from[2]), wide(from[3]));
  }
  static __device__ float wide(unsigned short x) { return __uint_as_float((u32)x << 16); }
  __device__ void run() {
    for (int tile = share.cluster; tile < share.num_tiles; tile += share.clusters) {
      const int first_output = tile / share.row_tiles * OUTPUTS, first_row = tile % share.row_tiles * ROWS;
      const int output = first_output + threadIdx.x % QUADS * 4;
      const float4 scale = scale_of(output), bias = bias_of(output);
      sum(first_output);
      if (tile == share.cluster) {
        wait_cluster();
        await_earlier_kernels();
      }
#pragma unroll
      for (int chunk = 0; chunk < ROWS / CHUNK; ++chunk) {
        const int first = first_row + chunk * CHUNK;
        if (first >= work.num_rows) break;
        const int num_rows = min(CHUNK, work.num_rows - first);
        float of_rows[ROWS_A_THREAD];
        ask_for_scales(of_rows, num_rows, first);
        wait_in_cluster(shared + TAKEN, parity ^ 1);
        give(chunk);
        signal(GIVEN);
        wait_in_cluster(shared + GIVEN, parity);
        take(of_rows, num_rows, first, output, scale, bias);
        signal(TAKEN);
        parity ^= 1;
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
multiply_rows(const __grid_constant__ Map x_map, const __grid_constant__ Map weight_map,
              const __grid_constant__ Work work) {
  extern __shared__ unsigned char memory[];
  const u32 shared = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
  const Share share(work);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == THREADS) {
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared + FULL + 8 * stage, 1);
      make_barrier(shared + EMPTY + 8 * stage, WARPS);
    }
    make_barrier(shared + GIVEN, WARPS * PROGRAMS);
    make_barrier(shared + TAKEN, WARPS * PROGRAMS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    proxy_fence();
  }
  __syncthreads();
  arrive_cluster();
  if (threadIdx.x >= THREADS) {
    if (MOVES_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == THREADS) Producer{x_map, weight_map, work, shared}.run(share);
    __syncwarp();
    wait_cluster();
  } else {
    if (MOVES_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Consumer consumer{work, share, shared, (int)threadIdx.x / 128};
    consumer.run();
  }
  // Nobody leaves while others read its sums.
  arrive_cluster();
  wait_cluster();
}
