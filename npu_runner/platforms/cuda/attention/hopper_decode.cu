// Attention of decode steps: one query per row, over a paged cache of 128 dims per head, in 16 bits or e4m3.
//
// A warp has one kv head with all its query heads, and a range of the step's context tokens. Ranges are equally long,
// whatever the lengths of the rows (hopper_decode_plan.cu). Keys, and values by columns, are the left operand of a
// warp's MMAs, query heads the right one, so an MMA has 8 columns of heads. A thread multiplies the 16-byte pieces that
// it reads: nothing goes through shared memory. Online softmax (arXiv 2205.14135), in base 2. e4m3 is multiplied in
// float16, which holds it exactly. A row that lies in several ranges has partial accumulators from each. The last warp
// to finish adds them in the order of the ranges.
//
// Blocks with which the tables of several rows begin are read once for a team of rows, by a program whose warps have
// different rows. They come to shared memory by asynchronous copies, STAGES steps deep.
//
// Constants of the host, beside those of hopper_decode_plan.cu: IS_BFLOAT16 (queries and results), PROGRAMS on a
// multiprocessor, STAGES.

#ifndef ON_HOST  // tests run the rest on the CPU (tests/cuda/decode_on_cpu.cpp)
__device__ __forceinline__ uint4 read(const u8 *from) {
  uint4 piece;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(from));
  return piece;
}
// 0 where `is_there` is false.
__device__ __forceinline__ uint4 read_if(bool is_there, const u8 *from) {
  uint4 piece;
  asm volatile(
      "{\n.reg .pred is_there;\nsetp.ne.b32 is_there, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@is_there ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(piece.x), "=&r"(piece.y), "=&r"(piece.z), "=&r"(piece.w) : "l"(from), "r"((int)is_there));
  return piece;
}
__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float low_of(u32 pair) {
  float x;
  if (IS_BFLOAT16) return __uint_as_float(pair << 16);
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(x) : "r"(pair));
  return x;
}
__device__ __forceinline__ void mma(float (&acc)[4], const u32 (&left)[4], u32 right_0, u32 right_1) {
  if (IS_BFLOAT16 && !IS_FP8) MMA(asm volatile, "bf16"); else MMA(asm volatile, "f16");
}
// Returns the count before. Later counters see what this warp, and all earlier counters, have written.
__device__ __forceinline__ u32 count_up(u32 *counter) {
  u32 count;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(counter) : "memory");
  return count;
}
__device__ __forceinline__ u32 shared_memory() {
  extern __shared__ unsigned char memory[];
  return (u32)__cvta_generic_to_shared(memory);
}
// Copies 16 bytes to shared memory; 0 where `is_there` is false.
__device__ __forceinline__ void copy_async(u32 to, const u8 *from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's copies, but for its MOST newest groups.
template <int MOST> __device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(MOST) : "memory");
}
#endif

// Two numbers in the MMA's type.
__device__ __forceinline__ u32 as_operand(float low, float high) {
  return IS_FP8 ? half_pair(low, high) : pack(low, high);
}
__device__ __forceinline__ float high_of(u32 pair) {
  return IS_BFLOAT16 ? __uint_as_float(pair & 0xFFFF0000) : low_of(pair >> 16);
}
// Reduces over the 8 threads that have the same columns of heads.
__device__ __forceinline__ float max_of_rows(float x) {
  for (int apart = 4; apart < 32; apart *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
  return x;
}
__device__ __forceinline__ float sum_of_rows(float x) {
  for (int apart = 4; apart < 32; apart *= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

// A stage of shared memory: the keys of a step, then its values, a row for each token. Its pieces of 16 bytes are
// swizzled so that a warp's reads have no bank conflicts.
constexpr u32 VALUES_AT = STEP * HEAD_BYTES, STAGE_BYTES = 2 * VALUES_AT;
__device__ __forceinline__ u32 key_at(int token, int piece) {
  return token * HEAD_BYTES + (piece ^ token % 2 * 4) * 16;
}
__device__ __forceinline__ u32 value_at(int token, int piece) {
  return VALUES_AT + token * HEAD_BYTES + (piece ^ token / 2 % 4 * 2) * 16;
}

// What a warp computes: attention of a row to its suffix, or of some rows to a prefix. A column of `scores` and `acc` is
// a query head of one of the rows.
template <bool IS_PREFIX> struct Attention {
  static constexpr int COLUMNS = IS_PREFIX ? PREFIX_COLUMNS : 1;
  using Cursor = ::Cursor<IS_PREFIX>;

  const Params &params;
  const int head, lane, group, member;  // kv head; thread = 4 * group + member
  u32 stage;  // of a prefix: where its step lies
  u32 queries[COLUMNS][16];
  uint4 keys[TILES][2][KEY_PIECES], values[TILES][4][VALUE_PIECES];  // of a suffix
  float acc[COLUMNS][8][4], row_max[COLUMNS][2], row_sum[COLUMNS][2], factors[COLUMNS][2];
  int num_rows;  // of the warp
  int4 mine;     // in thread m: Member m of the warp

  __device__ Attention(const Params &params, int head)
      : params(params), head(head), lane(threadIdx.x % 32), group(lane / 4), member(lane % 4) {}

  // The offset of tile `i`, before its rows and heads.
  __device__ static i64 tile_at(const i64 (&places)[PLACES], int i) {
    return PLACES == 1 ? places[0] + i * TILE * ROW_BYTES : places[i % PLACES];
  }
  // Reads tokens `group` and 8 behind it of each tile; 0 where the row has none.
  template <bool IS_WHOLE> __device__ void read_keys_of(const Cursor &cursor, const i64 (&places)[PLACES]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const u8 *from = params.k_cache + tile_at(places, i) + head * HEAD_BYTES + group * ROW_BYTES + member * 16;
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int piece = 0; piece < KEY_PIECES; ++piece) {
          const u8 *at = from + 8 * t * ROW_BYTES + 64 * piece;
          keys[i][t][piece] = IS_WHOLE ? read(at) : read_if(cursor.has(i * TILE + group + 8 * t), at);
        }
    }
  }
  __device__ void read_keys(const Cursor &cursor, const i64 (&places)[PLACES]) {
    if (cursor.is_whole()) read_keys_of<true>(cursor, places); else read_keys_of<false>(cursor, places);
  }
  // Reads tokens 2 * member, the next, and those 8 behind them of each tile.
  template <bool IS_WHOLE> __device__ void read_values_of(const Cursor &cursor, const i64 (&places)[PLACES]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const u8 *from = params.v_cache + tile_at(places, i) + head * HEAD_BYTES + 2 * member * ROW_BYTES + group * 16;
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int piece = 0; piece < VALUE_PIECES; ++piece) {
          const int behind = t % 2 + t / 2 * 8;
          const u8 *at = from + behind * ROW_BYTES + 128 * piece;
          values[i][t][piece] = IS_WHOLE ? read(at) : read_if(cursor.has(i * TILE + 2 * member + behind), at);
        }
    }
  }
  __device__ void read_values(const Cursor &cursor, const i64 (&places)[PLACES]) {
    if (cursor.is_whole()) read_values_of<true>(cursor, places); else read_values_of<false>(cursor, places);
  }
  // Copies a step of a prefix to a stage, with all threads of the program.
  __device__ void copy_step(u32 to, const Cursor &cursor, const i64 (&places)[PLACES]) {
    constexpr int PIECES = HEAD_BYTES / 16, TOKENS = 32 * WARPS / PIECES;
    const int token = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
#pragma unroll
    for (int i = 0; i < STEP / TOKENS; ++i) {
      const int at = i * TOKENS + token;
      const i64 from = tile_at(places, i * TOKENS / TILE) + (i * TOKENS % TILE + token) * ROW_BYTES + head * HEAD_BYTES +
                       piece * 16;
      const bool is_there = cursor.has(at);
      copy_async(to + key_at(at, piece), params.k_cache + from, is_there);
      copy_async(to + value_at(at, piece), params.v_cache + from, is_there);
    }
  }
  // The row of the warp that has a column, and whether there is one.
  __device__ static int member_of(int column) { return IS_PREFIX ? column / QUERY_HEADS : 0; }
  __device__ bool has_column(int column) const { return column < (IS_PREFIX ? num_rows : 1) * QUERY_HEADS; }
  // Finds the warp's rows of a team, and loads their queries.
  __device__ void start_team(const Cursor &cursor) {
    const Plan plan(params.plan, params.num_ranges, params.num_rows);
    const Team team = plan.teams[cursor.index - params.num_rows];
    const int most = divide_up(team.num_rows, WARPS), first = threadIdx.x / 32 * most;
    num_rows = max(0, min(most, team.num_rows - first));
    mine = make_int4(0, 0, 0, 0);
    if (lane < num_rows) mine = reinterpret_cast<const int4 *>(plan.members)[team.first_member + first + lane];
    start(mine.x);
  }
  // Loads the queries of each column `group`: the dims that this thread has of keys. `row`: that of a suffix, or in
  // thread m row m of the warp. For e4m3 a column is divided by the power of 2 that scales the largest to between 1
  // and 2.
  __device__ void start(int row) {
    constexpr int A_PIECE = 16 / ITEM;  // dims
    float factor = params.factor;
    if (params.scales) factor *= params.scales[0];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = 8 * n + group, its_row = IS_PREFIX ? __shfl_sync(~0u, row, member_of(column)) : row;
      const u16 *from = params.q + (i64)its_row * params.stride_q +
                        (head * QUERY_HEADS + (IS_PREFIX ? column % QUERY_HEADS : column)) * DIMS;
#pragma unroll
      for (int piece = 0; piece < KEY_PIECES; ++piece)
#pragma unroll
        for (int i = 0; i < A_PIECE / 8; ++i) {
          const uint4 eight = read_if(has_column(column), reinterpret_cast<const u8 *>(
                                          from + (member + 4 * piece) * A_PIECE + 8 * i));
#pragma unroll
          for (int w = 0; w < 4; ++w) queries[n][piece * A_PIECE / 2 + 4 * i + w] = word(eight, w);
        }
      factors[n][0] = factors[n][1] = factor;
      if (IS_FP8) {
        float most = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i)
          most = fmaxf(most, fmaxf(fabsf(low_of(queries[n][i])), fabsf(high_of(queries[n][i]))));
        most = max_of_four_lanes(most);
        // The exponent's bits are the power of 2. Values without one, or with the highest one, stay as they are.
        const u32 exponent = __float_as_uint(most) & 0x7F800000;
        const bool is_usual = exponent > (2u << 23) && exponent < (252u << 23);
        const float unit = is_usual ? __uint_as_float(exponent) : 1, inverse = 1 / unit;
#pragma unroll
        for (int i = 0; i < 16; ++i)
          queries[n][i] = as_operand(low_of(queries[n][i]) * inverse, high_of(queries[n][i]) * inverse);
#pragma unroll
        for (int i = 0; i < 2; ++i) factors[n][i] *= __shfl_sync(~0u, unit, 4 * (2 * member + i));
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) acc[n][i / 4][i % 4] = 0;
      row_max[n][0] = row_max[n][1] = -INFINITE;
      row_sum[n][0] = row_sum[n][1] = 0;
    }
  }
  // Element 2 * t + i of a tile's scores belongs to token group + 8 * t and column 2 * member + i.
  template <int COLUMNS> __device__ void multiply_keys(float (&scores)[COLUMNS][TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      uint4 tile[2][KEY_PIECES];
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int piece = 0; piece < KEY_PIECES; ++piece)
          tile[t][piece] = IS_PREFIX ? read_shared(stage + key_at(i * TILE + group + 8 * t, member + 4 * piece))
                                     : keys[i][t][piece];
      float chains[COLUMNS][2][4] = {};
#pragma unroll
      for (int piece = 0; piece < KEY_PIECES; ++piece)
#pragma unroll
        for (int w = 0; w < 4; w += IS_FP8 ? 1 : 2) {
          u32 left[4];
          const int first = IS_FP8 ? 8 * piece + 2 * w : 4 * piece + w;
          if (IS_FP8) {
            widen(word(tile[0][piece], w), left[0], left[2]);
            widen(word(tile[1][piece], w), left[1], left[3]);
          } else {
            left[0] = word(tile[0][piece], w);
            left[1] = word(tile[1][piece], w);
            left[2] = word(tile[0][piece], w + 1);
            left[3] = word(tile[1][piece], w + 1);
          }
#pragma unroll
          for (int n = 0; n < COLUMNS; ++n)
            mma(chains[n][first / 2 % 2], left, queries[n][first], queries[n][first + 1]);
        }
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[n][i][e] = chains[n][0][e] + chains[n][1][e];
    }
  }
  // Turns scores into weights.
  template <int COLUMNS> __device__ void weigh(float (&all_scores)[COLUMNS][TILES][4], const Cursor &cursor) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      auto &scores = all_scores[n];
      if (!cursor.is_whole()) {
#pragma unroll
        for (int e = 0; e < 4 * TILES; ++e)
          if (!cursor.has(e / 4 * TILE + group + e % 4 / 2 * 8)) scores[e / 4][e % 4] = -INFINITE;
      }
      float rescale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor = factors[n][i];
        float top = scores[0][i];
#pragma unroll
        for (int e = 1; e < 2 * TILES; ++e) top = fmaxf(top, scores[e / 2][e % 2 * 2 + i]);
        top = fmaxf(row_max[n][i], max_of_rows(top));
        const float base = top == -INFINITE ? 0 : top * factor;
        rescale[i] = fast_exp2(row_max[n][i] * factor - base);
        row_max[n][i] = top;
        float sum = 0;
#pragma unroll
        for (int e = 0; e < 2 * TILES; ++e) {
          float &score = scores[e / 2][e % 2 * 2 + i];
          score = fast_exp2(score * factor - base);
          sum += score;
        }
        row_sum[n][i] = row_sum[n][i] * rescale[i] + sum;
      }
      if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
        for (int i = 0; i < 32; ++i) acc[n][i / 4][i % 4] *= rescale[i % 2];
      }
    }
  }
  template <int COLUMNS> __device__ void multiply_values(const float (&weights)[COLUMNS][TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      uint4 tile[4][VALUE_PIECES];
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int piece = 0; piece < VALUE_PIECES; ++piece)
          tile[t][piece] = IS_PREFIX ? read_shared(stage + value_at(i * TILE + 2 * member + t % 2 + t / 2 * 8,
                                                                    group + 8 * piece))
                                     : values[i][t][piece];
      u32 right[COLUMNS][2];
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int k = 0; k < 2; ++k)
          right[n][k] = transpose(as_operand(weights[n][i][2 * k], weights[n][i][2 * k + 1]));
#pragma unroll
      for (int d = 0; d < 8; ++d) {
        u32 left[4];
        if (IS_FP8) {
          const u32 order = d % 2 ? 0x7362 : 0x5140;
          widen(__byte_perm(word(tile[0][0], d / 2), word(tile[1][0], d / 2), order), left[0], left[1]);
          widen(__byte_perm(word(tile[2][0], d / 2), word(tile[3][0], d / 2), order), left[2], left[3]);
        } else {
          const int piece = d / 4 % VALUE_PIECES;
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const u32 first = word(tile[2 * k][piece], d % 4), second = word(tile[2 * k + 1][piece], d % 4);
            left[2 * k] = __byte_perm(first, second, 0x5410);
            left[2 * k + 1] = __byte_perm(first, second, 0x7632);
          }
        }
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n)
          mma(acc[n][d], left, right[n][0], right[n][1]);
      }
    }
  }
  // Computes the step in `stage` for the first COLUMNS of the warp.
  template <int COLUMNS> __device__ void compute(const Cursor &cursor) {
    float scores[COLUMNS][TILES][4];
    multiply_keys(scores);
    weigh(scores, cursor);
    multiply_values(scores);
  }
  // The first of two dims: element 2 * r + i of acc[n][tile] is r behind it, of column 8 * n + 2 * member + i.
  __device__ int dim_of(int tile) const {
    return IS_FP8 ? 16 * group + 2 * tile : 8 * group + tile / 4 * 64 + tile % 4 * 2;
  }
  __device__ void store(int row) {
    const float scale = params.scales ? params.scales[1] : 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int member_head = 2 * member + i;
      const float share = row_sum[0][i] > 0 || row_sum[0][i] != row_sum[0][i] ? scale / row_sum[0][i] : 0;
      if (member_head >= QUERY_HEADS) continue;
      u16 *to = params.out + (((i64)row * KV_HEADS + head) * QUERY_HEADS + member_head) * DIMS;
#pragma unroll
      for (int tile = 0; tile < 8; tile += 4) {
        u32 piece[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) piece[t] = pack(acc[0][tile + t][i] * share, acc[0][tile + t][2 + i] * share);
        *reinterpret_cast<uint4 *>(to + dim_of(tile)) = make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
    }
  }
  __device__ float *partial_at(int index) const { return params.partials + ((i64)index * KV_HEADS + head) * PARTIAL; }
  // `index`: of the partial accumulators of a suffix, or in thread m of row m of the warp.
  __device__ void store_partials(int index) {
    const float scale = params.scales ? params.scales[1] : 1;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * n + 2 * member + i, member_head = IS_PREFIX ? column % QUERY_HEADS : column;
        float *partial = partial_at(IS_PREFIX ? __shfl_sync(~0u, index, member_of(column)) : index);
        if (!has_column(column)) continue;
        float *to = partial + member_head * DIMS;
#pragma unroll
        for (int tile = 0; tile < 8; tile += 2)
          *reinterpret_cast<float4 *>(to + dim_of(tile)) =
              make_float4(acc[n][tile][i] * scale, acc[n][tile][2 + i] * scale, acc[n][tile + 1][i] * scale,
                          acc[n][tile + 1][2 + i] * scale);
        if (group == 0)
          *reinterpret_cast<float2 *>(partial + QUERY_HEADS * DIMS + 2 * member_head) =
              make_float2(row_max[n][i] * factors[n][i], row_sum[n][i]);
      }
    __syncwarp();
  }
  // Adds a row's `count` partial accumulators in their order: the first, and those `skipped` and more behind it. A
  // thread has 16 dims of a head.
  __device__ void combine(int row, int first, int skipped, int count) {
    for (int member_head = lane / 8; member_head < QUERY_HEADS; member_head += 4) {
      float top = -INFINITE, all = 0, sum[16] = {};
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const float *partial = partial_at(first + i + (i ? skipped : 0));
        const float2 weight = __ldcg(reinterpret_cast<const float2 *>(partial + QUERY_HEADS * DIMS + 2 * member_head));
        float4 four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          four[i] = __ldcg(reinterpret_cast<const float4 *>(partial + member_head * DIMS + lane % 8 * 4 + 32 * i));
        const float higher = fmaxf(top, weight.x), base = higher == -INFINITE ? 0 : higher;
        const float rescale = fast_exp2(top - base), share = fast_exp2(weight.x - base);
        top = higher;
        all = all * rescale + weight.y * share;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[4 * i] = sum[4 * i] * rescale + four[i].x * share;
          sum[4 * i + 1] = sum[4 * i + 1] * rescale + four[i].y * share;
          sum[4 * i + 2] = sum[4 * i + 2] * rescale + four[i].z * share;
          sum[4 * i + 3] = sum[4 * i + 3] * rescale + four[i].w * share;
        }
      }
      const float inverse = all > 0 || all != all ? 1 / all : 0;
      u16 *out = params.out + (((i64)row * KV_HEADS + head) * QUERY_HEADS + member_head) * DIMS + lane % 8 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<uint2 *>(out + 32 * i) =
            make_uint2(pack(sum[4 * i] * inverse, sum[4 * i + 1] * inverse),
                       pack(sum[4 * i + 2] * inverse, sum[4 * i + 3] * inverse));
    }
  }
  __device__ void end_sums() {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) row_sum[n][i] = sum_of_rows(row_sum[n][i]);
  }
  // Ends the team that `cursor` is in, after its last step in range `range` of `a_range` steps.
  __device__ void end_team(const Cursor &cursor, int range, int a_range) {
    end_sums();
    store_partials(mine.y + range - cursor.start / a_range);
    u32 *counter = params.counters + mine.x * KV_HEADS + head;
    const bool is_last = lane < num_rows && count_up(counter) + 1 == mine.z;
    if (is_last) *counter = 0;
    for (u32 left = __ballot_sync(~0u, is_last); left; left &= left - 1) {
      const int m = __ffs(left) - 1;
      combine(__shfl_sync(~0u, mine.x, m), __shfl_sync(~0u, mine.w, m), 0, __shfl_sync(~0u, mine.z, m));
    }
  }
  // Ends the row that `cursor` is in, likewise.
  __device__ void end_row(const Cursor &cursor, int range, int a_range) {
    end_sums();
    const int from = cursor.start / a_range, to = (cursor.after - 1) / a_range;
    if (from == to && cursor.more == 0) {
      store(cursor.index);
      return;
    }
    // Without a group, a range has the partials of a row that begins in it, and those of one that began before.
    int first = from, skipped = params.num_ranges, count = to - from + 1;
    if (cursor.more) {
      first = cursor.more & 0xFFFFFF;
      skipped = 0;
      count = cursor.more >> 24;
    }
    store_partials(first + range - from + (range > from ? skipped : 0));
    u32 *counter = params.counters + cursor.index * KV_HEADS + head;
    if (__shfl_sync(~0u, lane == 0 ? count_up(counter) : 0, 0) + 1 != count) return;
    if (lane == 0) *counter = 0;
    combine(cursor.index, first, skipped, count);
  }
};

// Loads keys and values of the next step while this one is computed.
__device__ __forceinline__ void attend_suffixes(const Params &params, const Range &mine, int range, int head) {
  Cursor<false> next(params, mine);
  Attention<false> attention(params, head);
  i64 places[PLACES];
  next.find(places);
  attention.read_keys(next, places);
  attention.read_values(next, places);
  attention.start(next.index);
  while (true) {
    const Cursor<false> now = next;
    next.next();
    const bool has_more = !next.is_done();
    if (has_more) next.find(places);
    float scores[1][TILES][4];
    attention.multiply_keys(scores);
    if (has_more) attention.read_keys(next, places);
    attention.weigh(scores, now);
    attention.multiply_values(scores);
    if (has_more) attention.read_values(next, places);
    if (!has_more || next.index != now.index) {
      attention.end_row(now, range, mine.header.suffix_steps);
      if (!has_more) break;
      attention.start(next.index);
    }
  }
}

// Copies the steps that follow while one is computed.
__device__ __forceinline__ void attend_prefixes(const Params &params, const Range &mine, int range, int head) {
  const u32 memory = shared_memory();
  Cursor<true> now(params, mine), next = now;
  Attention<true> attention(params, head);
  u32 to = 0, from = 0;
  auto copy = [&] {
    if (!next.is_done()) {
      i64 places[PLACES];
      next.find(places);
      attention.copy_step(memory + to * STAGE_BYTES, next, places);
      next.next();
    }
    commit_copies();
    to = to + 1 == STAGES ? 0 : to + 1;
  };
  for (int i = 0; i < STAGES - 1; ++i) copy();
  attention.start_team(now);
  while (true) {
    await_copies<STAGES - 2>();
    __syncthreads();  // the step is there, and all warps are done with the one before, whose stage comes next
    copy();
    attention.stage = memory + from * STAGE_BYTES;
    if (attention.has_column(8)) attention.compute<2>(now);
    else if (attention.num_rows) attention.compute<1>(now);
    from = from + 1 == STAGES ? 0 : from + 1;
    const bool is_last = now.at + 1 == now.end;
    if (is_last || now.at + 1 == now.after) attention.end_team(now, range, mine.header.prefix_steps);
    if (is_last) break;
    const int index = now.index;
    now.next();
    if (now.index != index) attention.start_team(now);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, PROGRAMS)
attend_decode(const u16 *q, const u8 *k_cache, const u8 *v_cache, u16 *out, float *partials, const int *tables,
              int *plan, u32 *counters, const float *scales, float factor, int stride_q, int stride_table,
              int num_blocks, int num_rows, int num_ranges, int window) {
  let_next_kernel_start();
  const Params params{q, k_cache, v_cache, out, partials, tables, plan, counters, scales, factor, stride_q,
                  stride_table, num_rows, num_ranges, window};
  const int warp = blockIdx.x * WARPS + threadIdx.x / 32, range = warp / KV_HEADS;
  if (range >= num_ranges) return;
  prefetch(params, Range(params, range), warp, num_blocks);
  wait_for_earlier_kernels();
  const Range mine(params, range);
  const int first_suffix = WARPS * mine.header.num_prefixes;
  if (range >= mine.header.end) return;
  if (range < first_suffix) attend_prefixes(params, mine, blockIdx.x / KV_HEADS, blockIdx.x % KV_HEADS);
  else attend_suffixes(params, mine, range - first_suffix, warp % KV_HEADS);
}
