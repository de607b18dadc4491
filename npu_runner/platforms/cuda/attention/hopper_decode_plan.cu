// Plans where the warps of a decode step read: ranges of equal length over the context tokens of all rows,
// concatenated. A kernel computes them on the device, once for all layers, so that graphs follow the lengths of
// contexts.
//
// Constants of the host: QUERY_HEADS of a kv head (up to 8), KV_HEADS, BLOCK_SIZE (a multiple of 16), IS_FP8 (the
// cache), TILES of 16 tokens that a warp reads at once (a step), LEAST_STEPS of a range.

constexpr int TILE = 16, STEP = TILES * TILE, DIMS = 128;
constexpr int ITEM = IS_FP8 ? 1 : 2, HEAD_BYTES = DIMS * ITEM, ROW_BYTES = KV_HEADS * HEAD_BYTES;
// The 16-byte pieces that a thread reads of a token: a quarter of its keys, and an eighth of its values.
constexpr int KEY_PIECES = HEAD_BYTES / 64, VALUE_PIECES = HEAD_BYTES / 128;
// Accumulators of all heads, then the highest score and the total of each head.
constexpr int PARTIAL = (QUERY_HEADS * (DIMS + 2) + 3) / 4 * 4;
// The blocks that a step's tiles may lie in.
constexpr int PLACES = BLOCK_SIZE % STEP == 0 ? 1 : TILES;
// The most ranges of a row: one warp adds up their accumulators.
constexpr int MOST_PARTIALS = 64;
#define INFINITE __int_as_float(0x7F800000)

struct Params {
  const u16 *q;
  const u8 *k_cache, *v_cache;
  u16 *out;
  float *partials;
  const int *tables, *lens;
  int *plan;
  u32 *counters;
  const float *scales;  // of keys and of values, or none
  float factor;
  int stride_q, stride_table, num_rows, num_ranges, window;
};

// The first context token that a row reads, and its steps of STEP tokens from a multiple of STEP on; at least one.
__device__ __forceinline__ int first_token(int len, int window) { return window > 0 ? max(len - window, 0) : 0; }
__device__ __forceinline__ int steps_of(int len, int window) {
  return max(1, (len + STEP - 1) / STEP - first_token(len, window) / STEP);
}

// The plan: steps of a range and of all rows, two empty cells; the start of each range; the numbers of its first 32
// blocks; the steps before each row, and before the end.
struct Begin { int row, start, after, len; };

struct Plan {
  int *header, *blocks, *starts;
  Begin *begins;
  __device__ Plan(int *at, int num_ranges)
      : header(at), blocks(at + 4 + 4 * num_ranges), starts(at + 4 + 36 * num_ranges),
        begins(reinterpret_cast<Begin *>(at + 4)) {}
};

// The prefix sum of `x`, its total over a program of 1024 threads, and the maximum of `high`.
__device__ __forceinline__ int sum_up_to(int x, int high, int &all, int &highest) {
  __shared__ int acc[32], highs[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int apart = 1; apart < 32; apart *= 2) {
    const int other = __shfl_up_sync(~0u, x, apart);
    if (lane >= apart) x += other;
    high = max(high, __shfl_xor_sync(~0u, high, apart));
  }
  __syncthreads();
  if (lane == 31) { acc[warp] = x; highs[warp] = high; }
  __syncthreads();
  int before = 0;
  all = highest = 0;
  for (int i = 0; i < 32; ++i) {
    if (i < warp) before += acc[i];
    all += acc[i];
    highest = max(highest, highs[i]);
  }
  return before + x;
}

// A program plans 32 ranges. All programs count all rows, and write the same starts.
extern "C" __global__ void __launch_bounds__(1024, 1)
plan_decode(const int *lens, const int *tables, int *memory, int stride_table, int num_rows, int num_ranges,
            int window) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const Plan plan(memory, num_ranges);
  int all = 0, longest = 0;
  for (int begin = 0; begin < num_rows; begin += 1024) {
    const int row = begin + threadIdx.x, steps = row < num_rows ? steps_of(lens[row], window) : 0;
    int these, high;
    const int sum = sum_up_to(steps, steps, these, high);
    if (row < num_rows) plan.starts[row] = all + sum - steps;
    all += these;
    longest = max(longest, high);
  }
  const int a_range = max(max(LEAST_STEPS, (longest + MOST_PARTIALS - 3) / (MOST_PARTIALS - 2)),
                          (all + num_ranges - 1) / num_ranges);
  if (threadIdx.x == 0) {
    plan.header[0] = a_range;
    plan.header[1] = plan.starts[num_rows] = all;
  }
  __syncthreads();
  const int first = 32 * blockIdx.x, last = min(first + 32, num_ranges) - 1;
  for (int row = threadIdx.x; row < num_rows; row += 1024) {
    const int start = plan.starts[row], after = plan.starts[row + 1];
    for (int range = max(first, (start + a_range - 1) / a_range); range <= last && range * a_range < after; ++range)
      plan.begins[range] = Begin{row, start, after, lens[row]};
  }
  __syncthreads();
  const int range = first + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (range <= last && range * a_range < all) {
    const Begin begin = plan.begins[range];
    const int token = (first_token(begin.len, window) / STEP + range * a_range - begin.start) * STEP;
    const int block = token / BLOCK_SIZE + lane;
    plan.blocks[range * 32 + lane] =
        block * BLOCK_SIZE < begin.len ? tables[(i64)begin.row * stride_table + block] : 0;
  }
}

// Prefetches the first step of a range into the L2 cache. An earlier kernel may still write what this reads: block
// numbers may be anything then, and keys and values are read again.
__device__ __forceinline__ void prefetch(const Params &params, int range, int head, int num_blocks) {
  constexpr int LINES = HEAD_BYTES / 128;
  const Plan plan(params.plan, params.num_ranges);
  const int2 header = __ldcg(reinterpret_cast<const int2 *>(plan.header));
  const int4 begin = __ldcg(reinterpret_cast<const int4 *>(plan.begins + range));
  const u32 block = min((u32)__ldcg(plan.blocks + range * 32), (u32)num_blocks - 1);
  const u32 first = (u32)(first_token(begin.w, params.window) / STEP + range * header.x - begin.y) * STEP % BLOCK_SIZE;
  for (int i = threadIdx.x % 32; i < 2 * LINES * STEP; i += 32) {
    const u8 *cache = i % 2 ? params.v_cache : params.k_cache;
    const u32 token = min(first + i / (2 * LINES), (u32)BLOCK_SIZE - 1);
    const u8 *at = cache + ((i64)block * BLOCK_SIZE + token) * ROW_BYTES + head * HEAD_BYTES + i / 2 % LINES * 128;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  }
}

// The position of a warp in its range: a step of a row.
struct Cursor {
  const Params &params;
  int at, end, a_range;   // steps of all rows
  int row, start, after;  // steps before the row, and before the next
  int token, first, len;  // of the step, of the row
  int held_from, held;    // block numbers from that one on, one in each thread

  __device__ Cursor(const Params &params, int range) : params(params) {
    const Plan plan(params.plan, params.num_ranges);
    const int2 header = __ldcg(reinterpret_cast<const int2 *>(plan.header));
    const int4 begin = __ldcg(reinterpret_cast<const int4 *>(plan.begins + range));
    held = __ldcg(plan.blocks + range * 32 + threadIdx.x % 32);
    a_range = header.x;
    at = min(range * a_range, header.y);
    end = min(at + a_range, header.y);
    row = begin.x;
    start = begin.y;
    after = begin.z;
    len = begin.w;
    enter();
    held_from = token / BLOCK_SIZE;
  }
  __device__ bool is_done() const { return at >= end; }
  // Whether the row has the step's token `n`, and whether it has all of them.
  __device__ bool has(int n) const { return token + n >= first && token + n < len; }
  __device__ bool is_whole() const { return token >= first && token + STEP <= len; }
  __device__ void enter() {
    first = first_token(len, params.window);
    token = (first / STEP + at - start) * STEP;
    held_from = -32;
  }
  __device__ void next() {
    ++at;
    token += STEP;
    if (at == after && at < end) {
      ++row;
      start = after;
      after = Plan(params.plan, params.num_ranges).starts[row + 1];
      len = params.lens[row];
      enter();
    }
  }
  // The bytes from the start of the cache to a tile.
  __device__ i64 place(int tile) {
    const int at = token + tile * TILE, index = at / BLOCK_SIZE;
    if (index >= held_from + 32) {
      held_from = index;
      const int mine = index + threadIdx.x % 32;
      held = mine * BLOCK_SIZE < len ? params.tables[(i64)row * params.stride_table + mine] : 0;
    }
    const int block = __shfl_sync(~0u, held, index - held_from);
    return ((i64)block * BLOCK_SIZE + at % BLOCK_SIZE) * ROW_BYTES;
  }
  __device__ void find(i64 (&places)[PLACES]) {
#pragma unroll
    for (int i = 0; i < PLACES; ++i) places[i] = place(i);
  }
};
