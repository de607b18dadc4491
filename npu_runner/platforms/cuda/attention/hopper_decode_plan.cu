// Plans where the warps of a decode step read. A kernel computes the plan on the device, once for all layers, so that
// graphs follow the lengths of contexts and the block tables.
//
// Rows whose block tables begin with the same blocks form a group. The blocks that all its rows read whole are its
// prefix, and the rest of each row is the row's suffix; a row without a group is all suffix. A program reads a prefix
// once for a team of rows, whose query heads its warps share; a warp reads a suffix. Suffixes are concatenated and cut
// into ranges of equal length, and so are prefixes.
//
// Constants of the host: QUERY_HEADS of a kv head (up to 8), KV_HEADS, BLOCK_SIZE (a multiple of 16), IS_FP8 (the
// cache), TILES of 16 tokens that are read at once (a step), WARPS of a program, LEAST_STEPS of a range, PREFIX_COLUMNS
// of 8 query heads that a warp has of a team's, MOST_ROWS of a step with groups (a thread has a row). Groups save at
// least SAVED_PERCENT of a step's tokens, and SAVED_STEPS for each range.

constexpr int TILE = 16, STEP = TILES * TILE, DIMS = 128;
constexpr int ITEM = IS_FP8 ? 1 : 2, HEAD_BYTES = DIMS * ITEM, ROW_BYTES = KV_HEADS * HEAD_BYTES;
// The 16-byte pieces that a thread reads of a token: a quarter of its keys, and an eighth of its values.
constexpr int KEY_PIECES = HEAD_BYTES / 64, VALUE_PIECES = HEAD_BYTES / 128;
// Accumulators of all heads, then the highest score and the total of each head.
constexpr int PARTIAL = (QUERY_HEADS * (DIMS + 2) + 3) / 4 * 4;
// The blocks that a step's tiles may lie in.
constexpr int PLACES = BLOCK_SIZE % STEP == 0 ? 1 : TILES;
// The most ranges of a suffix or of a prefix: one warp adds up their accumulators.
constexpr int MOST_PARTIALS = 64;
// The most rows of a warp of a team, and of the team.
constexpr int WARP_ROWS = 8 * PREFIX_COLUMNS / QUERY_HEADS, TEAM_ROWS = WARPS * WARP_ROWS;
// A prefix has at least LEAST_SHARED tokens, and ends at one of LEVELS forks of the block tables.
constexpr int LEAST_SHARED = 128, LEVELS = 3;
// Times in eighths of a suffix's step (H200): a prefix's step with one and with more columns of a warp, what it takes
// longer where suffixes fill the memory's queue, and the way to the next row.
constexpr int PREFIX_TIME = IS_FP8 ? 7 : 4, WIDE_PREFIX_TIME = IS_FP8 ? 9 : 7, QUEUE_TIME = 8, ROW_TIME = 16;
#define INFINITE __int_as_float(0x7F800000)

struct Params {
  const u16 *q;
  const u8 *k_cache, *v_cache;
  u16 *out;
  float *partials;
  const int *tables;
  int *plan;
  u32 *counters;
  const float *scales;  // of keys and of values, or none
  float factor;
  int stride_q, stride_table, num_rows, num_ranges, window;
};

// Ranges of prefixes and their steps each, the end of the ranges of suffixes, and their steps each. A range of suffixes
// has a warp for each kv head. One of prefixes has a program for each, and takes the numbers of WARPS ranges.
struct Header { int num_prefixes, prefix_steps, end, suffix_steps; };
// Of a range: its first segment, the steps before that segment, and the range's own steps.
struct Begin { int segment, start, at, end; };
// A suffix, or a team's prefix: the steps up to its end, and its tokens from `first` to `len`. `more` is the row of a
// prefix's block table. Of a suffix it is 0, or in a group the row's first partial and, from bit 24 on, their number.
struct Segment { int after, first, len, more; };
// The rows of a team's prefix, and of each row the first partial of its prefix, the number of all its partials, and
// their first.
struct Team { int first_member, num_rows; };
struct Member { int row, of_prefix, num_partials, first_partial; };

// Segments of suffixes, by row, come before those of prefixes. `blocks` are the first 32 block numbers of a range.
struct Plan {
  Header *header;
  Begin *begins;
  Segment *firsts, *segments;
  Member *members;
  Team *teams;
  int *blocks;
  __device__ Plan(int *at, int num_ranges, int num_rows) : header(reinterpret_cast<Header *>(at)) {
    begins = reinterpret_cast<Begin *>(header + 1);
    firsts = reinterpret_cast<Segment *>(begins + num_ranges);
    segments = firsts + num_ranges;
    members = reinterpret_cast<Member *>(segments + 2 * num_rows);
    blocks = reinterpret_cast<int *>(members + num_rows);
    teams = reinterpret_cast<Team *>(blocks + 32 * num_ranges);
  }
};

#ifndef ON_HOST  // tests run the rest on the CPU (tests/cuda/decode_on_cpu.cpp)
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void prefetch_line(const u8 *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
#endif

__device__ __forceinline__ int divide_up(int x, int by) { return (x + by - 1) / by; }
// The first context token that a row reads, and its steps of STEP tokens from a multiple of STEP on; at least one.
__device__ __forceinline__ int first_token(int len, int window) { return window > 0 ? max(len - window, 0) : 0; }
__device__ __forceinline__ int steps_of(int first, int len) { return max(1, divide_up(len, STEP) - first / STEP); }

// The prefix sums of `x`, and their totals over a program of 1024 threads.
template <int COUNT> __device__ __forceinline__ void sum_up_to(int (&x)[COUNT], int (&all)[COUNT]) {
  __shared__ int sums[COUNT][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, x[n], apart);
      if (lane >= apart) x[n] += other;
    }
    if (lane == 31) sums[n][warp] = x[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    const int sum = sums[n][lane];
    x[n] += __reduce_add_sync(~0u, lane < warp ? sum : 0);
    all[n] = __reduce_add_sync(~0u, sum);
  }
}
// The total and the maximum over a program.
__device__ __forceinline__ int2 sum_and_max(int x, int high) {
  __shared__ int2 found[32];
  const int2 both = make_int2(__reduce_add_sync(~0u, x), __reduce_max_sync(~0u, high));
  __syncthreads();
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = both;
  __syncthreads();
  const int2 one = found[threadIdx.x % 32];
  return make_int2(__reduce_add_sync(~0u, one.x), __reduce_max_sync(~0u, one.y));
}

// The group of a row: its first row, the place of this one among `count`, and the blocks of its prefix.
struct Group {
  int lead, rank, count, blocks;
  // The rank of the first row of this row's team, and the team's rows. A row that is left over reads by itself.
  __device__ int first() const { return rank - rank % TEAM_ROWS; }
  __device__ int num_rows() const { return min(TEAM_ROWS, count - first()); }
  __device__ bool is_shared() const { return num_rows() > 1; }
};

// How many blocks two tables have in common, if these are `common` and perhaps more; up to `whole`.
__device__ __forceinline__ int common_blocks(const int *table, const int *other, int common, int whole) {
  constexpr int AHEAD = 8;
  while (true) {
    u32 differs = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int at = min(common + i, whole - 1), block = table[at];
      differs |= (u32)(common + i >= whole || block != other[at] || block <= 0) << i;
    }
    if (differs) return common + __ffs(differs) - 1;
    common += AHEAD;
  }
}

// Sorts rows into classes by their first block, and each class by the first block behind the common ones, LEVELS times.
// For all rows with one first block it takes the level that saves the most blocks. Block 0 is the null block, which no
// rows share. A row keeps a token for its suffix; table entries behind its context are undefined, and not used.
__device__ __forceinline__ Group find_group(const int *lens, const int *tables, int stride_table, int num_rows,
                                            int num_ranges) {
  constexpr int SLOTS = 2 * MOST_ROWS;
  constexpr u64 EMPTY = ~0ull;
  __shared__ u64 keys[SLOTS];
  __shared__ int firsts[SLOTS], leads[MOST_ROWS], depths[MOST_ROWS], saved[MOST_ROWS];
  const int row = threadIdx.x, len = row < num_rows ? lens[row] : 0, whole = max(len - 1, 0) / BLOCK_SIZE;
  const int *table = tables + (i64)row * stride_table;
  const Group alone{row, 0, 1, 0};
  Group best = alone;
  int lead = 0, common = 0, top = row, most = 0;
  for (int level = 0; level < LEVELS; ++level) {
    for (int i = row; i < SLOTS; i += 1024) {
      keys[i] = EMPTY;
      firsts[i] = MOST_ROWS;
    }
    depths[row] = whole;
    saved[row] = 0;
    const int block = common < whole ? max(table[common], 0) : 0;
    u32 slot = (u32)(block + 31 * lead) % SLOTS;
    __syncthreads();
    if (block) {
      const u64 key = (u64)lead << 32 | block;
      for (u64 held; (held = atomicCAS(&keys[slot], EMPTY, key)) != EMPTY && held != key;) slot = (slot + 1) % SLOTS;
      atomicMin(&firsts[slot], row);
    }
    __syncthreads();
    Group found{block ? firsts[slot] : row, 0, 0, 0};
    leads[row] = row < num_rows ? found.lead : -1;
    if (!__syncthreads_or(found.lead != row)) break;
    for (int i = 0; i < num_rows; ++i) {
      const bool is_same = leads[i] == found.lead;
      found.count += is_same;
      found.rank += is_same && i < row;
    }
    if (found.lead != row)
      atomicMin(&depths[found.lead],
                common_blocks(table, tables + (i64)found.lead * stride_table, common + 1, whole));
    __syncthreads();
    found.blocks = depths[found.lead];
    if (level == 0) top = found.lead;
    lead = found.lead;
    common = found.blocks;
    if (found.blocks * BLOCK_SIZE < LEAST_SHARED) found = alone;
    if (found.rank > 0) atomicAdd(&saved[top], found.blocks);
    __syncthreads();
    if (saved[top] > most) {
      most = saved[top];
      best = found;
    }
    __syncthreads();
  }
  if (!__syncthreads_or(best.count > 1)) return alone;
  const bool is_spared = best.is_shared() && best.rank != best.first();
  const int tokens = sum_and_max(len, 0).x, spared = sum_and_max(is_spared ? best.blocks * BLOCK_SIZE : 0, 0).x;
  return 100ll * spared >= (i64)SAVED_PERCENT * tokens && spared >= SAVED_STEPS * STEP * num_ranges ? best : alone;
}

// A program plans 32 ranges. All programs count all rows, and write the same segments.
extern "C" __global__ void __launch_bounds__(1024, 1)
plan_decode(const int *lens, const int *tables, int *memory, int stride_table, int num_rows, int num_ranges,
            int window) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  __shared__ int bases[MOST_ROWS], num_of_prefix[MOST_ROWS];
  const Plan plan(memory, num_ranges, num_rows);
  Group group{(int)threadIdx.x, 0, 1, 0};
  if (!window && num_rows <= MOST_ROWS && num_ranges >= 4 * WARPS)
    group = find_group(lens, tables, stride_table, num_rows, num_ranges);
  const bool is_shared = group.is_shared(), opens_team = is_shared && group.rank == group.first();
  const bool has_groups = __syncthreads_or(is_shared);
  const int prefix_len = is_shared ? group.blocks * BLOCK_SIZE : 0;
  const int prefix_steps = opens_team ? steps_of(0, prefix_len) : 0;
  int all = 0, longest = 0, after = 0, steps = 0, len = 0;
  for (int begin = 0; begin < num_rows; begin += 1024) {
    const int row = begin + threadIdx.x;
    len = row < num_rows ? lens[row] : 0;
    const int first = is_shared ? prefix_len : first_token(len, window);
    steps = row < num_rows ? steps_of(first, len) : 0;
    int sums[1] = {steps}, totals[1];
    sum_up_to(sums, totals);
    after = all + sums[0];
    if (row < num_rows && !has_groups) plan.segments[row] = Segment{after, first, len, 0};
    all += totals[0];
    longest = max(longest, steps);
  }
  const int most = MOST_PARTIALS - 2;
  Header header{0, 1, 0, max(max(LEAST_STEPS, divide_up(sum_and_max(0, longest).y, most)), divide_up(all, num_ranges))};
  const int first_range = 32 * blockIdx.x, last_range = min(first_range + 32, num_ranges) - 1;
  if (has_groups) {
    const int row = threadIdx.x;
    const bool is_wide = divide_up(group.num_rows(), WARPS) * QUERY_HEADS > 8;
    // Steps of prefixes, their time, teams, rows of groups.
    int sums[4] = {prefix_steps, prefix_steps * (is_wide ? WIDE_PREFIX_TIME : PREFIX_TIME), opens_team,
                   is_shared && group.rank == 0 ? group.count : 0}, totals[4];
    sum_up_to(sums, totals);
    // One range of prefixes is lost by rounding up at most, and one of suffixes.
    const i64 suffix_time = 8 * (i64)all + ROW_TIME * num_rows;
    const i64 prefix_time = totals[1] + QUEUE_TIME * (i64)totals[0] * all / (all + WARPS * (i64)totals[0]);
    const i64 time = (WARPS * prefix_time + suffix_time) / (num_ranges - WARPS - 1) + 1;
    header.prefix_steps = max((int)(totals[0] * time / prefix_time) + 1,
                              divide_up(sum_and_max(0, prefix_steps).y, most));
    header.num_prefixes = divide_up(totals[0], header.prefix_steps);
    header.suffix_steps = max(divide_up(longest, most), divide_up(all, max(1, (int)(suffix_time / time))));
    header.suffix_steps = sum_and_max(0, header.suffix_steps).y;
    if (is_shared && group.rank == 0) bases[row] = sums[3] - group.count;
    __syncthreads();
    const int base = is_shared ? bases[group.lead] : 0, start = sums[0] - prefix_steps;
    if (opens_team) {
      num_of_prefix[base + group.rank] = (sums[0] - 1) / header.prefix_steps - start / header.prefix_steps + 1;
      const int team = sums[2] - 1, index = num_rows + team;
      const Segment segment{sums[0], 0, prefix_len, row};
      plan.segments[index] = segment;
      plan.teams[team] = Team{base + group.rank, group.num_rows()};
      for (int range = divide_up(start, header.prefix_steps); range * header.prefix_steps < sums[0]; ++range)
        for (int at = max(first_range, range * WARPS); at <= min(last_range, range * WARPS + WARPS - 1); ++at) {
          plan.begins[at] = Begin{index, start, range * header.prefix_steps,
                                  min((range + 1) * header.prefix_steps, totals[0])};
          plan.firsts[at] = segment;
        }
    }
    __syncthreads();
    const int num_own = (after - 1) / header.suffix_steps - (after - steps) / header.suffix_steps + 1;
    const int count = is_shared ? num_own + num_of_prefix[base + group.first()] : 0;
    int partials[1] = {count}, all_partials[1];
    sum_up_to(partials, all_partials);
    const int first_partial = 2 * num_ranges + partials[0] - count;
    if (is_shared) plan.members[base + group.rank] = Member{row, first_partial + num_own, count, first_partial};
    if (row < num_rows)
      plan.segments[row] = Segment{after, prefix_len, len, is_shared ? first_partial | count << 24 : 0};
  }
  const int first_suffix = WARPS * header.num_prefixes;
  header.end = first_suffix + divide_up(all, header.suffix_steps);
  if (threadIdx.x == 0) *plan.header = header;
  __syncthreads();
  for (int row = threadIdx.x; row < num_rows; row += 1024) {
    const Segment segment = plan.segments[row];
    const int start = row ? plan.segments[row - 1].after : 0;
    for (int range = max(first_range - first_suffix, divide_up(start, header.suffix_steps));
         range + first_suffix <= last_range && range * header.suffix_steps < segment.after; ++range) {
      plan.begins[first_suffix + range] =
          Begin{row, start, range * header.suffix_steps, min((range + 1) * header.suffix_steps, all)};
      plan.firsts[first_suffix + range] = segment;
    }
  }
  __syncthreads();
  const int range = first_range + threadIdx.x / 32;
  if (range <= last_range && range < header.end) {
    const Begin begin = plan.begins[range];
    const Segment segment = plan.firsts[range];
    const int block = (segment.first / STEP + begin.at - begin.start) * STEP / BLOCK_SIZE + threadIdx.x % 32;
    const int row = range < first_suffix ? segment.more : begin.segment;
    plan.blocks[range * 32 + threadIdx.x % 32] =
        block * BLOCK_SIZE < segment.len ? tables[(i64)row * stride_table + block] : 0;
  }
}

// A range as the plan has it.
struct Range {
  Header header;
  Begin begin;
  Segment first;
  int held;  // one of its first 32 block numbers in each thread
  __device__ Range(const Params &params, int range) {
    const Plan plan(params.plan, params.num_ranges, params.num_rows);
    const int4 all = __ldcg(reinterpret_cast<const int4 *>(plan.header));
    const int4 steps = __ldcg(reinterpret_cast<const int4 *>(plan.begins + range));
    const int4 segment = __ldcg(reinterpret_cast<const int4 *>(plan.firsts + range));
    held = __ldcg(plan.blocks + range * 32 + threadIdx.x % 32);
    header = Header{all.x, all.y, all.z, all.w};
    begin = Begin{steps.x, steps.y, steps.z, steps.w};
    first = Segment{segment.x, segment.y, segment.z, segment.w};
  }
};

// Prefetches the first step of a range into the L2 cache. An earlier kernel may still write what this reads: block
// numbers may be anything then, and keys and values are read again.
__device__ __forceinline__ void prefetch(const Params &params, const Range &range, int warp, int num_blocks) {
  constexpr int LINES = HEAD_BYTES / 128;
  const bool is_prefix = warp / KV_HEADS < WARPS * range.header.num_prefixes;
  if (is_prefix && warp % WARPS) return;
  const int head = is_prefix ? warp / WARPS % KV_HEADS : warp % KV_HEADS;
  const u32 block = min((u32)__shfl_sync(~0u, range.held, 0), (u32)num_blocks - 1);
  const u32 first = (u32)(range.first.first / STEP + range.begin.at - range.begin.start) * STEP % BLOCK_SIZE;
  for (int i = threadIdx.x % 32; i < 2 * LINES * STEP; i += 32) {
    const u8 *cache = i % 2 ? params.v_cache : params.k_cache;
    const u32 token = min(first + i / (2 * LINES), (u32)BLOCK_SIZE - 1);
    const u8 *at = cache + ((i64)block * BLOCK_SIZE + token) * ROW_BYTES + head * HEAD_BYTES + i / 2 % LINES * 128;
    prefetch_line(at);
  }
}

// The position of a warp in its range: a step of a segment. The block numbers of a segment that comes next are read
// ahead.
template <bool IS_PREFIX> struct Cursor {
  const Params &params;
  int at, end;              // steps of all segments
  int index, start, after;  // of the segment; steps before it, and before the next
  int token, first, len;    // of the step, of the segment
  int more;                 // of the segment
  int held_from, held;      // block numbers from that one on, one in each thread
  int next_held;            // the first ones of the next segment, from the last step on

  __device__ Cursor(const Params &params, const Range &range) : params(params) {
    index = range.begin.segment;
    start = range.begin.start;
    at = range.begin.at;
    end = range.begin.end;
    enter(range.first, range.held);
  }
  __device__ bool is_done() const { return at >= end; }
  // Whether the segment has the step's token `n`, and whether it has all of them.
  __device__ bool has(int n) const { return token + n >= first && token + n < len; }
  __device__ bool is_whole() const { return token >= first && token + STEP <= len; }
  __device__ Segment segment(int index) const {
    const int4 found = reinterpret_cast<const int4 *>(
        Plan(params.plan, params.num_ranges, params.num_rows).segments)[index];
    return Segment{found.x, found.y, found.z, found.w};
  }
  // This thread's block number of a segment, from place `from` of its table on.
  __device__ int read_block(int index, int from, int len, int more) const {
    const int mine = from + threadIdx.x % 32, row = IS_PREFIX ? more : index;
    return mine * BLOCK_SIZE < len ? params.tables[(i64)row * params.stride_table + mine] : 0;
  }
  __device__ void enter(const Segment &segment, int its_held) {
    after = segment.after;
    first = segment.first;
    len = segment.len;
    more = segment.more;
    token = (first / STEP + at - start) * STEP;
    held_from = token / BLOCK_SIZE;
    held = its_held;
    look_ahead();
  }
  __device__ void look_ahead() {
    if (at + 1 != after || after >= end) return;
    const Segment next = segment(index + 1);
    next_held = read_block(index + 1, next.first / STEP * STEP / BLOCK_SIZE, next.len, next.more);
  }
  __device__ void next() {
    ++at;
    token += STEP;
    if (at == after && at < end) {
      ++index;
      start = after;
      enter(segment(index), next_held);
    } else {
      look_ahead();
    }
  }
  // The bytes from the start of the cache to a tile.
  __device__ i64 place(int tile) {
    const int at = token + tile * TILE, in_table = at / BLOCK_SIZE;
    if (in_table >= held_from + 32) {
      held_from = in_table;
      held = read_block(index, in_table, len, more);
    }
    const int block = __shfl_sync(~0u, held, in_table - held_from);
    return ((i64)block * BLOCK_SIZE + at % BLOCK_SIZE) * ROW_BYTES;
  }
  __device__ void find(i64 (&places)[PLACES]) {
#pragma unroll
    for (int i = 0; i < PLACES; ++i) places[i] = place(i);
  }
};
