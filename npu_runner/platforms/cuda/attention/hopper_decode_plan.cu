// Plans where the warps of a decode step read. A kernel computes the plan on the device, once for all layers, so that
// graphs follow the lengths of contexts and the block tables.
//
// Rows whose block tables begin with the same blocks form a group. The blocks that all its rows read whole are its
// prefix, and the rest of each row is the row's suffix; a row without a group is all suffix. Keys and values of a
// prefix are read once for a team of 1, 2 or 4 warps of one program, each with the query heads of some rows. Prefixes
// are concatenated by the size of their teams, suffixes likewise, and each concatenation is cut into ranges of equal
// length.
//
// Constants of the host: QUERY_HEADS of a kv head (up to 8), KV_HEADS, BLOCK_SIZE (a multiple of 16), IS_FP8 (the
// cache), WARPS of a program (4), LEAST_STEPS of a range. A warp reads TILES of 16 tokens at once (a step) of a suffix,
// and PREFIX_TILES of a prefix, for 8 columns of query heads, and 8 * PREFIX_COLUMNS.

constexpr int TILE = 16, DIMS = 128;
constexpr int ITEM = IS_FP8 ? 1 : 2, HEAD_BYTES = DIMS * ITEM, ROW_BYTES = KV_HEADS * HEAD_BYTES;
// The 16-byte pieces that a thread reads of a token: a quarter of its keys, and an eighth of its values.
constexpr int KEY_PIECES = HEAD_BYTES / 64, VALUE_PIECES = HEAD_BYTES / 128;
// Accumulators of all heads, then the highest score and the total of each head.
constexpr int PARTIAL = (QUERY_HEADS * (DIMS + 2) + 3) / 4 * 4;
// The most ranges of a suffix or a prefix: one warp adds up their accumulators.
constexpr int MOST_PARTIALS = 64;
#define INFINITE __int_as_float(0x7F800000)

// Tiles of a step, columns (8 query heads each) and rows of a warp, and the blocks that a step's tiles may lie in.
template <int TILES_, int COLUMNS_, bool IS_PREFIX_> struct Kind {
  static constexpr int TILES_OF = TILES_, STEP = TILES_ * TILE, COLUMNS = COLUMNS_;
  static constexpr bool IS_PREFIX = IS_PREFIX_;
  static constexpr int ROWS = IS_PREFIX_ ? 8 * COLUMNS_ / QUERY_HEADS : 1;
  static constexpr int PLACES = BLOCK_SIZE % (TILES_ * TILE) == 0 ? 1 : TILES_;
};
using Suffix = Kind<TILES, 1, false>;
using Prefix = Kind<PREFIX_TILES, PREFIX_COLUMNS, true>;
constexpr int TEAM_ROWS = WARPS * Prefix::ROWS;  // of the largest team

// Groups: a thread has a row, so larger steps have none. A group's prefix has at least LEAST_SHARED tokens, and all
// groups together save at least 1 of LEAST_SAVED tokens. A prefix is looked for at LEVELS forks of the block tables.
constexpr int MOST_ROWS = 1024, LEAST_SHARED = 128, LEAST_SAVED = 8, LEVELS = 3;
// Ranges lost at most by rounding up for teams of 4, 2 and 1 warps, and for suffixes.
constexpr int ROUNDED = 8;
// The time of a warp's step of a prefix, and of going on to the next row, in eighths of the time of a suffix's step.
constexpr int PREFIX_TIME = 8, ROW_TIME = 8;

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

// The ends of the ranges of teams of 4, of 2 and of 1 warps, and of suffixes. A team of n warps has n ranges, whose
// warps (one for each kv head) it shares out anew.
struct Header { int end_of_4, end_of_2, end_of_1, end; };
// Of a range: its first segment, the steps before that segment, and the range's own steps.
struct Begin { int segment, start, at, end; };
// A suffix, or a prefix of a team: the steps up to its end, its tokens from `first` to `len`, and whose table it has.
struct Segment { int after, first, len, row; };
// The rows of a team's prefix.
struct Team { int first_member, num_rows; };
// The partial accumulators of a row in a group: the first, those of the prefix, all.
struct Pieces { int first, num_prefix, num_all, unused; };

// The plan: lengths of ranges (of suffixes, of prefixes), then what the structs say. Segments of suffixes come first.
struct Plan {
  Header *header;
  int *lengths, *blocks, *members;
  Begin *begins;
  Segment *firsts, *segments;
  Pieces *pieces;
  Team *teams;
  __device__ Plan(int *at, int num_ranges, int num_rows)
      : header(reinterpret_cast<Header *>(at)), lengths(at + 4), blocks(at + 8 + 8 * num_ranges),
        members(at + 8 + 40 * num_ranges + 14 * num_rows), begins(reinterpret_cast<Begin *>(at + 8)),
        firsts(reinterpret_cast<Segment *>(at + 8 + 4 * num_ranges)),
        segments(reinterpret_cast<Segment *>(at + 8 + 40 * num_ranges)),
        pieces(reinterpret_cast<Pieces *>(at + 8 + 40 * num_ranges + 8 * num_rows)),
        teams(reinterpret_cast<Team *>(at + 8 + 40 * num_ranges + 12 * num_rows)) {}
};

__device__ __forceinline__ int divide_up(int x, int by) { return (x + by - 1) / by; }
// The first context token that a row reads. Steps of a row are counted from a multiple of STEP on; at least one.
__device__ __forceinline__ int first_token(int len, int window) { return window > 0 ? max(len - window, 0) : 0; }
template <class Kind> __device__ __forceinline__ int steps_of(int first, int len) {
  return max(1, divide_up(len, Kind::STEP) - first / Kind::STEP);
}

// The prefix sums of `x`, and their totals over a program of 1024 threads.
template <int COUNT> __device__ __forceinline__ void sum_up_to(int (&x)[COUNT], int (&all)[COUNT]) {
  __shared__ int sums[COUNT][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < COUNT; ++n)
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, x[n], apart);
      if (lane >= apart) x[n] += other;
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < COUNT; ++n)
    if (lane == 31) sums[n][warp] = x[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    int total = sums[n][lane];
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, total, apart);
      if (lane >= apart) total += other;
    }
    all[n] = __shfl_sync(~0u, total, 31);
    const int before = __shfl_sync(~0u, total, max(warp - 1, 0));
    if (warp > 0) x[n] += before;
  }
}
template <bool IS_MAX> __device__ __forceinline__ int over_all(int x) {
  __shared__ int found[32];
  x = IS_MAX ? __reduce_max_sync(~0u, x) : __reduce_add_sync(~0u, x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = x;
  __syncthreads();
  x = found[threadIdx.x % 32];
  return IS_MAX ? __reduce_max_sync(~0u, x) : __reduce_add_sync(~0u, x);
}

// The group of a thread's row: its first row, the place of this one among `count`, and the blocks of its prefix.
struct Group {
  int lead, rank, count, blocks;
  // The rank of the first row of this row's team, and the team's rows. A row alone reads its blocks by itself.
  __device__ int first() const { return rank - rank % TEAM_ROWS; }
  __device__ int num_rows() const { return min(TEAM_ROWS, count - first()); }
  __device__ bool is_shared() const { return num_rows() > 1; }
};

// How many blocks two tables have in common. They have `common`, and this row has `whole`.
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

// Groups rows by the first block, then each class by the first block behind its common ones, LEVELS times. For the rows
// that share the first block it takes the level that saves the most blocks. Block 0 is the null block, and is shared by
// no rows; numbers behind a row's context are undefined, and not read.
__device__ __forceinline__ Group find_group(const int *lens, const int *tables, int stride_table, int num_rows) {
  __shared__ int2 keys[MOST_ROWS];
  __shared__ int depths[MOST_ROWS], saved[MOST_ROWS];
  const int row = threadIdx.x, len = row < num_rows ? lens[row] : 0, whole = max(len - 1, 0) / BLOCK_SIZE;
  const int *table = tables + (i64)row * stride_table;
  Group best{row, 0, 1, 0};
  int lead = 0, common = 0, top = row, most = 0;
  for (int level = 0; level < LEVELS; ++level) {
    const int block = common < whole ? max(table[common], 0) : 0;
    keys[row] = make_int2(block ? lead : -1, block);
    depths[row] = whole;
    saved[row] = 0;
    __syncthreads();
    Group found{row, 0, 0, 0};
    for (int i = 0; i < (block ? num_rows : 0); ++i)
      if (keys[i].x == lead && keys[i].y == block) {
        if (found.count == 0) found.lead = i;
        found.rank += i < row;
        ++found.count;
      }
    found.count = max(found.count, 1);
    if (!__syncthreads_or(found.count > 1)) break;
    if (found.lead != row)
      atomicMin(&depths[found.lead],
                common_blocks(table, tables + (i64)found.lead * stride_table, common + 1, whole));
    __syncthreads();
    found.blocks = depths[found.lead];
    if (level == 0) top = found.lead;
    if (found.blocks * BLOCK_SIZE < LEAST_SHARED) found = Group{found.lead, 0, 1, found.blocks};
    if (found.rank > 0) atomicAdd(&saved[top], found.blocks);
    __syncthreads();
    if (saved[top] > most) {
      most = saved[top];
      best = found;
    }
    lead = found.lead;
    common = found.blocks;
    __syncthreads();
  }
  const int shared = best.is_shared() && best.rank != best.first() ? best.blocks * BLOCK_SIZE : 0;
  const bool is_worth_it = (i64)over_all<false>(shared) * LEAST_SAVED >= over_all<false>(len);
  return is_worth_it ? best : Group{row, 0, 1, 0};
}

// A program plans 32 ranges. All programs count all rows, and write the same segments.
extern "C" __global__ void __launch_bounds__(1024, 1)
plan_decode(const int *lens, const int *tables, int *memory, int stride_table, int num_rows, int num_ranges,
            int window) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  __shared__ int bases[MOST_ROWS], starts[MOST_ROWS], afters[MOST_ROWS];
  const Plan plan(memory, num_ranges, num_rows);
  Group group{(int)threadIdx.x, 0, 1, 0};
  if (!window && num_rows <= MOST_ROWS && num_ranges >= 2 * ROUNDED)
    group = find_group(lens, tables, stride_table, num_rows);
  const bool is_shared = group.is_shared(), is_opener = is_shared && group.rank == group.first();
  // The team's size, as the index of its section, and its steps.
  const int num_tiles = divide_up(group.num_rows(), Prefix::ROWS), section = num_tiles > 2 ? 0 : num_tiles == 2 ? 1 : 2;
  const int prefix_len = group.blocks * BLOCK_SIZE, prefix_steps = is_opener ? steps_of<Prefix>(0, prefix_len) : 0;
  // Totals: steps of suffixes, and of teams of 4, 2 and 1 warps; their teams, 10 bits each; rows in groups.
  int before = 0, totals[6], sums[6], longest = 0;
  for (int begin = 0; begin < num_rows; begin += 1024) {
    const int row = begin + threadIdx.x, len = row < num_rows ? lens[row] : 0;
    const int first = is_shared ? prefix_len : first_token(len, window);
    const int steps = row < num_rows ? steps_of<Suffix>(first, len) : 0;
    sums[0] = steps;
    for (int i = 0; i < 3; ++i) sums[1 + i] = section == i ? prefix_steps : 0;
    sums[4] = is_opener << 10 * section;
    sums[5] = is_shared && group.rank == 0 ? group.count : 0;
    sum_up_to(sums, totals);
    if (row < num_rows) plan.segments[row] = Segment{before + sums[0], first, len, row};
    before += totals[0];
    longest = max(longest, steps);
  }
  longest = over_all<true>(longest);
  const int longest_prefix = over_all<true>(prefix_steps);
  const int team_steps = 4 * totals[1] + 2 * totals[2] + totals[3], most = MOST_PARTIALS - 2;
  int a_suffix = divide_up(before, num_ranges), a_prefix = 1;
  if (team_steps) {
    const i64 suffix_time = 8 * (i64)before + ROW_TIME * num_rows, time = suffix_time + PREFIX_TIME * (i64)team_steps;
    const int available = num_ranges - ROUNDED, num_suffix = max(1, (int)(suffix_time * available / time));
    a_suffix = divide_up(before, num_suffix);
    a_prefix = max(divide_up(longest_prefix, most),
                   (int)((time + PREFIX_TIME * available - 1) / (PREFIX_TIME * available)));
  }
  a_suffix = max(max(LEAST_STEPS, divide_up(longest, most)), a_suffix);
  // The first range of each section.
  int section_at[4] = {0};
  for (int i = 0; i < 3; ++i) section_at[i + 1] = section_at[i] + (4 >> i) * divide_up(totals[1 + i], a_prefix);
  if (threadIdx.x == 0) {
    *plan.header = Header{section_at[1], section_at[2], section_at[3], section_at[3] + divide_up(before, a_suffix)};
    plan.lengths[0] = a_suffix;
    plan.lengths[1] = a_prefix;
  }
  const int first = 32 * blockIdx.x, last = min(first + 32, num_ranges) - 1;
  if (team_steps) {
    const int row = threadIdx.x, own_start = sums[0] - steps_of<Suffix>(prefix_len, row < num_rows ? lens[row] : 0);
    const int after = section == 0 ? sums[1] : section == 1 ? sums[2] : sums[3], start = after - prefix_steps;
    if (is_shared && group.rank == 0) bases[row] = sums[5] - group.count;
    __syncthreads();
    const int base = is_shared ? bases[group.lead] : 0;
    if (is_shared) plan.members[base + group.rank] = row;
    if (is_opener) {
      const int place = base + group.rank;
      starts[place] = start;
      afters[place] = after;
      int number = sums[4] >> 10 * section & 1023;  // from 1 on, in its section
      for (int i = 0; i < section; ++i) number += totals[4] >> 10 * i & 1023;
      const int index = num_rows + number - 1;
      const Segment segment{after, 0, prefix_len, group.lead};
      plan.segments[index] = segment;
      plan.teams[number - 1] = Team{place, group.num_rows()};
      const int team = 4 >> section, end = section == 0 ? totals[1] : section == 1 ? totals[2] : totals[3];
      for (int range = divide_up(start, a_prefix); range * a_prefix < after; ++range)
        for (int i = 0; i < team; ++i) {
          const int at = section_at[section] + range * team + i;
          if (at < first || at > last) continue;
          plan.begins[at] = Begin{index, start, range * a_prefix, min((range + 1) * a_prefix, end)};
          plan.firsts[at] = segment;
        }
    }
    __syncthreads();
    int pieces[1] = {0}, all[1], num_prefix = 0;
    if (is_shared) {
      const int place = base + group.first();
      num_prefix = (afters[place] - 1) / a_prefix - starts[place] / a_prefix + 1;
      pieces[0] = num_prefix + (sums[0] - 1) / a_suffix - own_start / a_suffix + 1;
    }
    const int count = pieces[0];
    sum_up_to(pieces, all);
    if (is_shared) plan.pieces[row] = Pieces{2 * num_ranges + pieces[0] - count, num_prefix, count, 0};
  }
  __syncthreads();
  for (int row = threadIdx.x; row < num_rows; row += 1024) {
    const Segment segment = plan.segments[row];
    const int start = row ? plan.segments[row - 1].after : 0, at = section_at[3];
    for (int range = max(first - at, divide_up(start, a_suffix));
         range + at <= last && range * a_suffix < segment.after; ++range) {
      plan.begins[at + range] = Begin{row, start, range * a_suffix, min((range + 1) * a_suffix, before)};
      plan.firsts[at + range] = segment;
    }
  }
  __syncthreads();
  const int range = first + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (range <= last && range < section_at[3] + divide_up(before, a_suffix)) {
    const Begin begin = plan.begins[range];
    const Segment segment = plan.firsts[range];
    const int step = range < section_at[3] ? Prefix::STEP : Suffix::STEP;
    const int block = (segment.first / step + begin.at - begin.start) * step / BLOCK_SIZE + lane;
    plan.blocks[range * 32 + lane] =
        block * BLOCK_SIZE < segment.len ? tables[(i64)segment.row * stride_table + block] : 0;
  }
}

// A warp's place in the plan: its range, its team's size (0: it has a suffix), its place in the team, its kv head.
struct Warp {
  int range, team, tile, head;
  __device__ Warp(const Header &header, int warp) : range(warp / KV_HEADS), tile(0), head(warp % KV_HEADS) {
    team = range < header.end_of_4 ? 4 : range < header.end_of_2 ? 2 : range < header.end_of_1 ? 1 : 0;
    if (team > 1) {
      const int inside = warp - range / team * team * KV_HEADS;
      head = inside / team;
      tile = inside % team;
    }
  }
};

// Prefetches the first step of a range into the L2 cache. An earlier kernel may still write what this reads: block
// numbers may be anything then, and keys and values are read again.
__device__ __forceinline__ void prefetch(const Params &params, int warp, int num_blocks) {
  constexpr int LINES = HEAD_BYTES / 128, STEP = Suffix::STEP;
  const int range = warp / KV_HEADS;
  const Plan plan(params.plan, params.num_ranges, params.num_rows);
  const int4 header = __ldcg(reinterpret_cast<const int4 *>(plan.header));
  const int4 begin = __ldcg(reinterpret_cast<const int4 *>(plan.begins + range));
  const int4 segment = __ldcg(reinterpret_cast<const int4 *>(plan.firsts + range));
  const u32 block = min((u32)__ldcg(plan.blocks + range * 32), (u32)num_blocks - 1);
  const Warp place(Header{header.x, header.y, header.z, header.w}, warp);
  if (place.tile) return;
  const u32 step = place.team ? Prefix::STEP : Suffix::STEP;
  const u32 first = (u32)(segment.y / (int)step + begin.z - begin.y) * step % BLOCK_SIZE;
  for (int i = threadIdx.x % 32; i < 2 * LINES * STEP; i += 32) {
    const u8 *cache = i % 2 ? params.v_cache : params.k_cache;
    const u32 token = min(first + i / (2 * LINES), (u32)BLOCK_SIZE - 1);
    const u8 *at = cache + ((i64)block * BLOCK_SIZE + token) * ROW_BYTES + place.head * HEAD_BYTES + i / 2 % LINES * 128;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  }
}

// The position of a warp in its range: a step of a segment.
template <class Kind> struct Cursor {
  static constexpr int STEP = Kind::STEP, PLACES = Kind::PLACES;

  const Params &params;
  int at, end;                // steps of all segments
  int index, start, after;    // steps before the segment, and before the next
  int token, first, len;      // of the step, of the segment
  int table;                  // whose it is
  int held_from, held;        // block numbers from that one on, one in each thread

  __device__ Cursor(const Params &params, int range) : params(params) {
    const Plan plan(params.plan, params.num_ranges, params.num_rows);
    const int4 begin = __ldcg(reinterpret_cast<const int4 *>(plan.begins + range));
    const int4 segment = __ldcg(reinterpret_cast<const int4 *>(plan.firsts + range));
    held = __ldcg(plan.blocks + range * 32 + threadIdx.x % 32);
    index = begin.x;
    start = begin.y;
    at = begin.z;
    end = begin.w;
    enter(segment);
    held_from = token / BLOCK_SIZE;
  }
  __device__ bool is_done() const { return at >= end; }
  // Whether the segment has the step's token `n`, and whether it has all of them.
  __device__ bool has(int n) const { return token + n >= first && token + n < len; }
  __device__ bool is_whole() const { return token >= first && token + STEP <= len; }
  __device__ int row() const { return Kind::IS_PREFIX ? table : index; }
  __device__ void enter(const int4 &segment) {
    after = segment.x;
    first = segment.y;
    len = segment.z;
    if (Kind::IS_PREFIX) table = segment.w;
    token = (first / STEP + at - start) * STEP;
    held_from = -32;
  }
  __device__ void next() {
    ++at;
    token += STEP;
    if (at == after && at < end) {
      ++index;
      start = after;
      enter(*reinterpret_cast<const int4 *>(Plan(params.plan, params.num_ranges, params.num_rows).segments + index));
    }
  }
  // The bytes from the start of the cache to a tile.
  __device__ i64 place(int tile) {
    const int at = token + tile * TILE, index = at / BLOCK_SIZE;
    if (index >= held_from + 32) {
      held_from = index;
      const int mine = index + threadIdx.x % 32;
      held = mine * BLOCK_SIZE < len ? params.tables[(i64)row() * params.stride_table + mine] : 0;
    }
    const int block = __shfl_sync(~0u, held, index - held_from);
    return ((i64)block * BLOCK_SIZE + at % BLOCK_SIZE) * ROW_BYTES;
  }
  __device__ void find(i64 (&places)[PLACES]) {
#pragma unroll
    for (int i = 0; i < PLACES; ++i) places[i] = place(i);
  }
};
