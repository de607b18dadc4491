// GEMM y = x W^T of 17 to 192 rows in FP8 (e4m3) on Hopper. Reading the weight is its bound.
//
// The weight's rows are the left operand of warpgroup MMAs, the rows of x the columns. A producer warp copies tiles of
// both by TMA; a slice is 128 bytes of each row. It loads the ring's weights before it waits for earlier kernels. The
// programs of a cluster split the K of one tile. Each stores its accumulators in shared memory, and each reduces a part
// of the tile, in the order of the programs. So the result does not depend on which was first, and there is no
// workspace. The next kernel may start early, since all programs of this one run at once.
//
// Constants of the host: IN_BLOCKS (scales of 128 x 128, and of 128 inputs of a row), BLOCKS of 64 outputs of a
// warpgroup, TILE_M, STAGES, PROGRAMS of a cluster.

constexpr int CONSUMERS = 2, WARPS = 4 * CONSUMERS, THREADS = 32 * WARPS, WARPGROUP_N = 64 * BLOCKS;
constexpr int TILE_N = CONSUMERS * WARPGROUP_N, TILE_K = 128;
constexpr u32 WEIGHT_BYTES = 128 * TILE_N, STAGE_BYTES = WEIGHT_BYTES + 128 * TILE_M;
// Accumulators of CHUNK rows of x are exchanged at once, as rows of outputs. Rows start 4 banks apart.
constexpr int CHUNK = TILE_M > 64 ? TILE_M / 2 : TILE_M, PITCH = TILE_N + 4;
constexpr u32 SCALES = STAGES * STAGE_BYTES, EXCHANGE = SCALES + (IN_BLOCKS ? STAGES * TILE_M * 4 : 0);
// Barriers, 8 bytes each.
constexpr u32 FULL = EXCHANGE + CHUNK * PITCH * 4, EMPTY = FULL + 8 * STAGES;
constexpr u32 PARTIALS_FULL = EMPTY + 8 * STAGES, PARTIALS_EMPTY = PARTIALS_FULL + 8;
// Where a thread has more accumulators than a third of a partition's registers, the producer is a whole warpgroup, and
// releases its own registers.
constexpr bool MOVES_REGISTERS = (BLOCKS + 1) * TILE_M / 2 > 120;
constexpr int ALL_THREADS = THREADS + (MOVES_REGISTERS ? 128 : 32);
// A thread reduces 4 outputs of each of its rows.
constexpr int QUADS = TILE_N / 4, ROWS_AT_ONCE = THREADS / QUADS, ROWS_APART = PROGRAMS * ROWS_AT_ONCE;
constexpr int ROWS_A_THREAD = (CHUNK + ROWS_APART - 1) / ROWS_APART;

// 64 outputs, `columns`, 32 bytes of K.
#define WGMMA_E4M3(columns, count, left_name, right_name, adds_name)                                                   \
  __device__ __forceinline__ void wgmma_e4m3(float (&acc)[count], u64 left, u64 right, int adds) {                     \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_name ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k32.f32.e4m3.e4m3 {" LIST_##count "}, " left_name ", "   \
                 right_name ", adds, 1, 1;\n}" : ALL_##count(acc) : "l"(left), "l"(right), "r"(adds));                 \
  }
WGMMA_E4M3("32", 16, "%16", "%17", "%18")
WGMMA_E4M3("64", 32, "%32", "%33", "%34")
WGMMA_E4M3("96", 48, "%48", "%49", "%50")
WGMMA_E4M3("128", 64, "%64", "%65", "%66")

__device__ __forceinline__ void tma_load(u32 to, const TensorMap &map, u32 barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void bulk_load(u32 to, const void *from, u32 barrier, u32 bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
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

// x is (M, K), the weight (N, K). Scales of x are `group_stride` apart between groups, with room for `room` rows.
// Scales of the weight are one per output, or one where scale_stride is 0, or (N / 128, slices).
struct Params {
  int m, n, num_slices, room;
  long long group_stride, scale_stride;
  const float *x_scales, *scales;
  const unsigned short *bias;
  unsigned short *out;
};

// The work of a cluster: tiles `cluster`, `cluster` + clusters, ... Each program has the slices from `begin` to `end`.
struct Schedule {
  int rank, cluster, clusters, m_tiles, num_tiles, begin, end;

  __device__ Schedule(const Params &params) {
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cluster = blockIdx.x / PROGRAMS;
    clusters = gridDim.x / PROGRAMS;
    m_tiles = (params.m + TILE_M - 1) / TILE_M;
    num_tiles = (params.n + TILE_N - 1) / TILE_N * m_tiles;
    begin = params.num_slices * rank / PROGRAMS;
    end = params.num_slices * (rank + 1) / PROGRAMS;
  }
};

// Tile after tile, slice after slice.
struct TileCursor {
  const Schedule &schedule;
  int tile, slice;

  __device__ TileCursor(const Schedule &schedule) : schedule(schedule), tile(schedule.cluster), slice(schedule.begin) {}
  __device__ bool is_there() const { return tile < schedule.num_tiles; }
  __device__ int output() const { return tile / schedule.m_tiles * TILE_N; }
  __device__ int row() const { return tile % schedule.m_tiles * TILE_M; }
  __device__ void next() {
    if (++slice == schedule.end) { slice = schedule.begin; tile += schedule.clusters; }
  }
};

struct Producer {
  const TensorMap &x_map, &weight_map;
  const Params &params;
  u32 shared;
  u64 policy;

  __device__ void load_weight(const TileCursor &cursor, u32 stage) {
    const int rows = min(TILE_M, params.room - cursor.row());
    expect_bytes(shared + FULL + 8 * stage, STAGE_BYTES + (IN_BLOCKS ? 4 * rows : 0));
    tma_load(shared + stage * STAGE_BYTES, weight_map, shared + FULL + 8 * stage, cursor.slice * TILE_K,
             cursor.output(),
          policy);
  }
  __device__ void load_x(const TileCursor &cursor, u32 stage) {
    tma_load(shared + stage * STAGE_BYTES + WEIGHT_BYTES, x_map, shared + FULL + 8 * stage, cursor.slice * TILE_K,
          cursor.row());
    if (IN_BLOCKS)
      bulk_load(shared + SCALES + stage * TILE_M * 4,
                params.x_scales + cursor.slice * params.group_stride + cursor.row(),
                  shared + FULL + 8 * stage, 4 * min(TILE_M, params.room - cursor.row()));
  }
  // Loads weights before earlier kernels have ended, and rows of x after.
  __device__ void run(const Schedule &schedule) {
    TileCursor cursor(schedule), x_cursor(schedule);
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    for (int stage = 0; stage < STAGES && cursor.is_there(); ++stage, cursor.next()) load_weight(cursor, stage);
    wait_for_earlier_kernels();
    for (int stage = 0; stage < STAGES && x_cursor.is_there(); ++stage, x_cursor.next()) load_x(x_cursor, stage);
    for (Ring<STAGES> ring; cursor.is_there(); cursor.next(), ring.next()) {
      wait(shared + EMPTY + 8 * ring.stage, ring.parity);
      load_weight(cursor, ring.stage);
      load_x(cursor, ring.stage);
    }
  }
};

// A warpgroup with WARPGROUP_N of the tile's outputs. A thread has two outputs, 8 apart, and two of each 8 columns:
// element 4 * j + 2 * i + c is column 8 * j + c from its first one.
struct Consumer {
  const Params &params;
  const Schedule &schedule;
  u32 shared;
  int group;
  Ring<STAGES> ring;
  u32 parity = 0;
  float acc[BLOCKS][TILE_M / 2];

  __device__ void release(u32 stage) {
    if (threadIdx.x % 32 == 0) arrive(shared + EMPTY + 8 * stage);
  }
  __device__ void wgmma_slice(float (&partial)[TILE_M / 2], int block) {
    const u32 stage = shared + ring.stage * STAGE_BYTES;
    const u32 left = stage + (group * WARPGROUP_N + block * 64) * 128, right = stage + WEIGHT_BYTES;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_e4m3(partial, smem_descriptor<128>(left + 32 * k, 16), smem_descriptor<128>(right + 32 * k, 16), k > 0);
  }
  __device__ void add(float (&acc)[TILE_M / 2], const float (&partial)[TILE_M / 2], float scale) {
    const u32 scales = shared + SCALES + (ring.stage * TILE_M + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int j = 0; j < TILE_M / 8; ++j) {
      float row_scales[2] = {1, 1};
      if (IN_BLOCKS) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(row_scales[0]),
                     "=f"(row_scales[1]) : "r"(scales + 32 * j));
        row_scales[0] *= scale;
        row_scales[1] *= scale;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &sum = acc[4 * j + e];
        sum = IN_BLOCKS ? fmaf(partial[4 * j + e], row_scales[e % 2], sum) : sum + partial[4 * j + e];
      }
    }
  }
  // Partial accumulators of a slice are added in float32, because tensor cores keep fewer bits of sums of e4m3.
  __device__ void sum(int output) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int e = 0; e < TILE_M / 2; ++e) acc[b][e] = 0;
    // Prefetches the scale of the next slice. Outputs beyond the end are not stored.
    const int last = (params.n - 1) / 128;
    const float *scales = params.scales + min((output + group * WARPGROUP_N) / 128, last) * params.scale_stride;
    float next = IN_BLOCKS ? scales[schedule.begin] : 1;
    for (int slice = schedule.begin; slice < schedule.end; ++slice) {
      const float scale = next;
      if (IN_BLOCKS && slice + 1 < schedule.end) next = scales[slice + 1];
      wait(shared + FULL + 8 * ring.stage, ring.parity);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        float partial[TILE_M / 2];
        fence_registers(partial);
        wgmma_fence();
        wgmma_slice(partial, b);
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(partial);
        if (!IN_BLOCKS && b == BLOCKS - 1) release(ring.stage);
        add(acc[b], partial, scale);
      }
      if (IN_BLOCKS) release(ring.stage);
      ring.next();
    }
  }
  // Stores the accumulators of CHUNK rows of x in shared memory for the cluster.
  __device__ void store_partials(int chunk) {
    const int output = group * WARPGROUP_N + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const u32 to = shared + EXCHANGE + (threadIdx.x % 4 * 2 * PITCH + output) * 4;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int j = 0; j < CHUNK / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          asm volatile("st.shared.f32 [%0], %1;"
                       ::"r"(to + ((8 * j + e % 2) * PITCH + 64 * b + e / 2 * 8) * 4),
                       "f"(acc[b][4 * (chunk * CHUNK / 8 + j) + e]) : "memory");
  }
  __device__ void signal(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < PROGRAMS) arrive_in_cluster(cluster_address(shared + barrier, threadIdx.x % 32));
  }
  // The row of a chunk that is this thread's `i`-th.
  __device__ int row(int i) const { return i * ROWS_APART + schedule.rank * ROWS_AT_ONCE + threadIdx.x / QUADS; }
  __device__ void load_row_scales(float (&row_scales)[ROWS_A_THREAD], int m, int first) {
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; ++i)
      row_scales[i] = !IN_BLOCKS && row(i) < m ? params.x_scales[first + row(i)] : 1;
  }
  // The partial accumulators of a row, of all programs.
  __device__ void load_partials(float4 (&parts)[PROGRAMS], int row) {
    const u32 at = shared + EXCHANGE + (row * PITCH + threadIdx.x % QUADS * 4) * 4;
#pragma unroll
    for (int rank = 0; rank < PROGRAMS; ++rank) {
      float4 &x = parts[rank];
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(cluster_address(at, rank)));
    }
  }
  // Reduces this program's rows of a chunk that starts with row `first`. Two rows are read at once.
  __device__ void reduce(const float (&row_scales)[ROWS_A_THREAD], int m, int first, int output, float4 scale,
                       float4 bias) {
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i += 2) {
      float4 parts[2][PROGRAMS];
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (i + k < ROWS_A_THREAD && row(i + k) < m) load_partials(parts[k], row(i + k));
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (i + k < ROWS_A_THREAD && row(i + k) < m && output < params.n) {
          float4 sum = parts[k][0];
#pragma unroll
          for (int rank = 1; rank < PROGRAMS; ++rank) {
            const float4 x = parts[k][rank];
            sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
          }
          store(sum, scale, row_scales[i + k], bias, first + row(i + k), output);
        }
    }
  }
  __device__ void store(float4 sum, float4 scale, float row_scale, float4 bias, int row, int output) {
    const u32 low = pack(fmaf(sum.x, scale.x * row_scale, bias.x), fmaf(sum.y, scale.y * row_scale, bias.y));
    const u32 high = pack(fmaf(sum.z, scale.z * row_scale, bias.z), fmaf(sum.w, scale.w * row_scale, bias.w));
    *reinterpret_cast<uint2 *>(params.out + (long long)row * params.n + output) = make_uint2(low, high);
  }
  __device__ float4 load_scale(int output) {
    if (IN_BLOCKS || output >= params.n) return make_float4(1, 1, 1, 1);
    const float *from = params.scales + output * params.scale_stride;
    return make_float4(from[0], from[params.scale_stride], from[2 * params.scale_stride],
                       from[3 * params.scale_stride]);
  }
  __device__ float4 load_bias(int output) {
    if (!params.bias || output >= params.n) return make_float4(0, 0, 0, 0);
    const unsigned short *from = params.bias + output;
    return make_float4(to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3]));
  }
  __device__ void run() {
    for (int tile = schedule.cluster; tile < schedule.num_tiles; tile += schedule.clusters) {
      const int first_output = tile / schedule.m_tiles * TILE_N, first_row = tile % schedule.m_tiles * TILE_M;
      const int output = first_output + threadIdx.x % QUADS * 4;
      const float4 scale = load_scale(output), bias = load_bias(output);
      sum(first_output);
      if (tile == schedule.cluster) {
        wait_cluster();
        wait_for_earlier_kernels();
      }
#pragma unroll
      for (int chunk = 0; chunk < TILE_M / CHUNK; ++chunk) {
        const int first = first_row + chunk * CHUNK;
        if (first >= params.m) break;
        const int m = min(CHUNK, params.m - first);
        float row_scales[ROWS_A_THREAD];
        load_row_scales(row_scales, m, first);
        wait_in_cluster(shared + PARTIALS_EMPTY, parity ^ 1);
        store_partials(chunk);
        signal(PARTIALS_FULL);
        wait_in_cluster(shared + PARTIALS_FULL, parity);
        reduce(row_scales, m, first, output, scale, bias);
        signal(PARTIALS_EMPTY);
        parity ^= 1;
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
fp8_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
              const __grid_constant__ Params params) {
  extern __shared__ unsigned char memory[];
  const u32 shared = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
  const Schedule schedule(params);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == THREADS) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(shared + FULL + 8 * stage, 1);
      init_barrier(shared + EMPTY + 8 * stage, WARPS);
    }
    init_barrier(shared + PARTIALS_FULL, WARPS * PROGRAMS);
    init_barrier(shared + PARTIALS_EMPTY, WARPS * PROGRAMS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    proxy_fence();
  }
  __syncthreads();
  arrive_cluster();
  if (threadIdx.x >= THREADS) {
    if (MOVES_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == THREADS) Producer{x_map, weight_map, params, shared}.run(schedule);
    __syncwarp();
    wait_cluster();
  } else {
    if (MOVES_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Consumer consumer{params, schedule, shared, (int)threadIdx.x / 128};
    consumer.run();
  }
  // No program ends while others read its shared memory.
  arrive_cluster();
  wait_cluster();
}
