// All-reduce over the ranks of one host. Each rank stores into staging memory of its peers, and polls only its own.
// Sums are float32 in rank order and rounded once, so that one shot and two shots give the same bits.
//
// A 32-bit word of staging memory is EMPTY until a peer's data arrives, so each word is its own flag: no fence, and no
// round trip, stands between data and flag. The thread that reads a word makes it EMPTY again.
//
// Why two buffers are enough: a block counts its calls (`epochs`) and takes the buffers in turn. It stores call n + 2
// into a peer's buffer only after its own call n + 1 is complete. For that it had data of call n + 1 from that peer,
// whose kernel of call n, which read and emptied the buffer, was complete before (dependent_launch.py). A block waits
// only for the block of the same number in other ranks; a thread for the thread. Nothing bounds the wait: jobs are
// suspended, and the engine ends the ranks where one has died.
//
// RANKS: ranks. THREADS, BLOCKS: threads of a block, most blocks. CHUNK: vectors of 16 bytes that a block may get from
// one rank in one call. BATCH: vectors that a thread has under way. MOST_PIECES: vectors of a normed row per thread.
// EMPTY is a NaN in each dtype. Arithmetic makes 0x7FFF... of any NaN, and `valid` replaces EMPTY in the input.

typedef unsigned short u16;
typedef unsigned int u32;

#define EMPTY 0xFFFFFFFFu

struct Params {
  uint4 *staging[MOST_RANKS];  // of each rank, as mapped here: [buffer][source rank][block][CHUNK]
  u32 *epochs;                 // of each block; only this rank's
  uint4 *x;
  u32 rank, vectors;
};

#ifndef ON_HOST  // tests run the rest on threads of the host (tests/core/all_reduce_on_threads.cpp)
__shared__ float of_warps[THREADS / 32];

__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void store_to_peer(uint4 *to, const uint4 &piece) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(piece.x), "r"(piece.y), "r"(piece.z), "r"(piece.w) : "memory");
}
__device__ __forceinline__ uint4 load_staged(const uint4 *from) {
  uint4 piece;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(from) : "memory");
  return piece;
}
__device__ __forceinline__ u32 load_epoch(const u32 *from) {
  u32 epoch;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(epoch) : "l"(from) : "memory");
  return epoch;
}
__device__ __forceinline__ float to_float(u16 half) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
}
__device__ __forceinline__ u32 pack_float16(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ u32 pack_bfloat16(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#endif

__device__ __forceinline__ bool has_arrived(const uint4 &piece) {
  return piece.x != EMPTY && piece.y != EMPTY && piece.z != EMPTY && piece.w != EMPTY;
}
__device__ __forceinline__ u32 valid(u32 word) { return word == EMPTY ? 0x7FFFFFFFu : word; }
__device__ __forceinline__ uint4 valid(const uint4 &piece) {
  return {valid(piece.x), valid(piece.y), valid(piece.z), valid(piece.w)};
}

// The values of a 32-bit word, and back.
struct Float32 {
  static constexpr int COUNT = 1;
  __device__ static float value(u32 word, int) { return __uint_as_float(word); }
  __device__ static u32 round(const float *sum) { return __float_as_uint(sum[0]); }
};
struct Bfloat16 {
  static constexpr int COUNT = 2;
  __device__ static float value(u32 word, int k) { return __uint_as_float(k ? word & 0xFFFF0000u : word << 16); }
  __device__ static u32 round(const float *sum) { return pack_bfloat16(sum[0], sum[1]); }
};
struct Float16 {
  static constexpr int COUNT = 2;
  __device__ static float value(u32 word, int k) { return to_float(k ? word >> 16 : word & 0xFFFF); }
  __device__ static u32 round(const float *sum) { return pack_float16(sum[0], sum[1]); }
};
template <class Dtype> __device__ __forceinline__ void set(float *sum, u32 word) {
#pragma unroll
  for (int k = 0; k < Dtype::COUNT; ++k) sum[k] = Dtype::value(word, k);
}
template <class Dtype> __device__ __forceinline__ void add(float *sum, u32 word) {
#pragma unroll
  for (int k = 0; k < Dtype::COUNT; ++k) sum[k] += Dtype::value(word, k);
}

__device__ __forceinline__ u32 word(const uint4 &piece, int i) {
  return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}
template <class Dtype> __device__ __forceinline__ uint4 sum_in_rank_order(const uint4 (&pieces)[RANKS]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum[Dtype::COUNT];
    set<Dtype>(sum, word(pieces[0], i));
#pragma unroll
    for (int source = 1; source < RANKS; ++source) add<Dtype>(sum, word(pieces[source], i));
    words[i] = Dtype::round(sum);
  }
  return {words[0], words[1], words[2], words[3]};
}

// This block's part of a call. `slot` counts its vectors: a thread has every THREADS-th of them.
struct Call {
  const Params &params;
  const u32 parity, stride;

  __device__ Call(const Params &params)
      : params(params), parity(load_epoch(params.epochs + blockIdx.x) & 1), stride(gridDim.x * THREADS) {}
  __device__ u32 vector_of(u32 slot) const { return slot / THREADS * stride + blockIdx.x * THREADS + slot % THREADS; }
  // The place in the memory of rank `in` for what `source` stores.
  __device__ uint4 *place(u32 in, u32 source, u32 slot) const {
    return params.staging[in] + ((parity * RANKS + source) * BLOCKS + blockIdx.x) * (size_t)CHUNK + slot;
  }
  __device__ bool is_own(u32 rank) const { return rank == params.rank; }
  __device__ void push(u32 to, u32 slot, const uint4 &piece) const {
    store_to_peer(place(to, params.rank, slot), valid(piece));
  }
  __device__ void push_to_peers(u32 slot, const uint4 &piece) const {
#pragma unroll
    for (u32 peer = 0; peer < RANKS; ++peer)
      if (!is_own(peer)) push(peer, slot, piece);
  }
  // Waits for what `source` stores there; `piece` is what a first load returned.
  __device__ uint4 await(u32 source, u32 slot, uint4 piece) const {
    uint4 *from = place(params.rank, source, slot);
    while (!has_arrived(piece)) piece = load_staged(from);
    *from = {EMPTY, EMPTY, EMPTY, EMPTY};
    return piece;
  }
  // A vector of all ranks: this rank's own, and what has arrived of the others' by now.
  __device__ __forceinline__ void load(uint4 (&pieces)[RANKS], u32 slot, u32 vector) const {
#pragma unroll
    for (u32 source = 0; source < RANKS; ++source)
      pieces[source] = is_own(source) ? params.x[vector] : load_staged(place(params.rank, source, slot));
  }
  // Awaits what `load` has not found, and sums.
  template <class Dtype> __device__ __forceinline__ uint4 sum(uint4 (&pieces)[RANKS], u32 slot) const {
#pragma unroll
    for (u32 source = 0; source < RANKS; ++source)
      if (!is_own(source)) pieces[source] = await(source, slot, pieces[source]);
    return sum_in_rank_order<Dtype>(pieces);
  }
  __device__ void end() const {
    __syncthreads();
    if (threadIdx.x == 0) ++params.epochs[blockIdx.x];
  }
  // Awaits the contributions of all peers to vectors `first`, `first` + stride, ... and calls `use(slot, vector, sum)`.
  template <class Dtype, class Use>
  __device__ __forceinline__ void reduce(u32 slot, u32 first, u32 limit, Use use) const {
    uint4 pieces[BATCH][RANKS];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const u32 vector = first + vector_of(slot + j * THREADS);
      if (vector < limit) load(pieces[j], slot + j * THREADS, vector);
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const u32 vector = first + vector_of(slot + j * THREADS);
      if (vector < limit) use(slot + j * THREADS, vector, sum<Dtype>(pieces[j], slot + j * THREADS));
    }
  }
};

// Every rank gets all of x from every other rank.
template <class Dtype> __device__ __forceinline__ void one_shot(const Params &params) {
  wait_for_earlier_kernels();
  const Call call(params);
  for (u32 slot = threadIdx.x; call.vector_of(slot) < params.vectors; slot += BATCH * THREADS) {
    uint4 pieces[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const u32 vector = call.vector_of(slot + j * THREADS);
      if (vector < params.vectors) pieces[j] = params.x[vector];
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j)
      if (call.vector_of(slot + j * THREADS) < params.vectors) call.push_to_peers(slot + j * THREADS, pieces[j]);
  }
  for (u32 slot = threadIdx.x; call.vector_of(slot) < params.vectors; slot += BATCH * THREADS)
    call.reduce<Dtype>(slot, 0, params.vectors, [&](u32, u32 vector, const uint4 &sum) { params.x[vector] = sum; });
  call.end();
}

// Rank p sums the p-th part of x, and stores the result to every other rank.
template <class Dtype> __device__ __forceinline__ void two_shots(const Params &params) {
  wait_for_earlier_kernels();
  const Call call(params);
  const u32 part = (params.vectors + RANKS - 1) / RANKS, results = CHUNK / 2;
  const u32 own = params.rank * part, own_end = min(own + part, params.vectors);
  for (u32 slot = threadIdx.x; call.vector_of(slot) < part; slot += THREADS)
#pragma unroll
    for (u32 peer = 0; peer < RANKS; ++peer) {
      const u32 vector = peer * part + call.vector_of(slot);
      if (!call.is_own(peer) && vector < params.vectors) call.push(peer, slot, params.x[vector]);
    }
  for (u32 slot = threadIdx.x; own + call.vector_of(slot) < own_end; slot += BATCH * THREADS)
    call.reduce<Dtype>(slot, own, own_end, [&](u32 slot, u32 vector, const uint4 &sum) {
      params.x[vector] = sum;
      call.push_to_peers(results + slot, sum);
    });
  for (u32 slot = threadIdx.x; call.vector_of(slot) < part; slot += THREADS)
#pragma unroll
    for (u32 peer = 0; peer < RANKS; ++peer) {
      const u32 vector = peer * part + call.vector_of(slot);
      if (!call.is_own(peer) && vector < params.vectors)
        params.x[vector] = call.await(peer, results + slot, load_staged(call.place(params.rank, peer, results + slot)));
    }
  call.end();
}

struct NormParams {
  Params x;
  const uint4 *residual, *weight;
  uint4 *normed, *total;  // [rows][row_vectors], as x
  u32 row_vectors;
  float eps;
};

__device__ __forceinline__ float sum_of_block(float x) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  __syncthreads();  // all have read what the row before left
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warps[threadIdx.x % (THREADS / 32)];
#pragma unroll
  for (int lanes = THREADS / 64; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// One shot, then the operator add_rms_norm (platforms/ops.py). A block has whole rows, a thread MOST_PIECES vectors of
// a row at most, in slots of their own.
template <class Dtype> __device__ __forceinline__ void one_shot_norm(const NormParams &norm) {
  constexpr int VALUES = 4 * Dtype::COUNT;
  const Params &params = norm.x;
  const u32 row_vectors = norm.row_vectors, rounds = (row_vectors + THREADS - 1) / THREADS;
  wait_for_earlier_kernels();
  const Call call(params);
  u32 slot = threadIdx.x;
  for (u32 first = blockIdx.x * row_vectors; first < params.vectors; first += gridDim.x * row_vectors)
    for (u32 round = 0; round < rounds; ++round, slot += THREADS) {
      const u32 place = round * THREADS + threadIdx.x;
      if (place < row_vectors) call.push_to_peers(slot, params.x[first + place]);
    }
  slot = threadIdx.x;
  for (u32 first = blockIdx.x * row_vectors; first < params.vectors; first += gridDim.x * row_vectors) {
    float values[MOST_PIECES][VALUES], squares = 0;
#pragma unroll
    for (int round = 0; round < MOST_PIECES; ++round) {
      const u32 place = round * THREADS + threadIdx.x;
      if (round >= rounds || place >= row_vectors) continue;
      uint4 pieces[RANKS], total = norm.residual[first + place];
      call.load(pieces, slot + round * THREADS, first + place);
      const uint4 sum = call.template sum<Dtype>(pieces, slot + round * THREADS);
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float *both = values[round] + i * Dtype::COUNT;
        set<Dtype>(both, word(sum, i));
        add<Dtype>(both, word(total, i));
        words[i] = Dtype::round(both);
        set<Dtype>(both, words[i]);
#pragma unroll
        for (int k = 0; k < Dtype::COUNT; ++k) squares += both[k] * both[k];
      }
      norm.total[first + place] = {words[0], words[1], words[2], words[3]};
    }
    const float scale = rsqrtf(sum_of_block(squares) / (row_vectors * VALUES) + norm.eps);
#pragma unroll
    for (int round = 0; round < MOST_PIECES; ++round) {
      const u32 place = round * THREADS + threadIdx.x;
      if (round >= rounds || place >= row_vectors) continue;
      const uint4 weight = norm.weight[place];
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float *both = values[round] + i * Dtype::COUNT, of_weight[Dtype::COUNT];
#pragma unroll
        for (int k = 0; k < Dtype::COUNT; ++k) both[k] *= scale;
        set<Dtype>(both, Dtype::round(both));
        set<Dtype>(of_weight, word(weight, i));
#pragma unroll
        for (int k = 0; k < Dtype::COUNT; ++k) both[k] *= of_weight[k];
        words[i] = Dtype::round(both);
      }
      norm.normed[first + place] = {words[0], words[1], words[2], words[3]};
    }
    slot += rounds * THREADS;
  }
  call.end();
}

#define KERNELS(suffix, dtype)                                                                                         \
  extern "C" __global__ void __launch_bounds__(THREADS) one_shot_##suffix(const __grid_constant__ Params params) {     \
    one_shot<dtype>(params);                                                                                           \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS) two_shots_##suffix(const __grid_constant__ Params params) {    \
    two_shots<dtype>(params);                                                                                          \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS) norm_##suffix(const __grid_constant__ NormParams params) {     \
    one_shot_norm<dtype>(params);                                                                                      \
  }
KERNELS(float32, Float32)
KERNELS(bfloat16, Bfloat16)
KERNELS(float16, Float16)
