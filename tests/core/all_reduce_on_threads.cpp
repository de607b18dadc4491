// Runs npu_runner/platforms/cuda/all_reduce.cu on threads of the host: a thread per thread of each block of each rank.
// Calls of all kinds follow one another; ranks are delayed at random. Words of a vector arrive one by one.
//
// Prints the values that differ from float32 sums in rank order, rounded once, and the words of staging memory that the
// calls have not emptied. Built with RANKS, THREADS, BLOCKS, CHUNK, BATCH, CALLS and SOURCE, the kernel's path.

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#define ON_HOST
#define MOST_RANKS 8
#define MOST_PIECES 4
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__
#define of_warps own_block->sums  // shared memory

struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
struct Block { pthread_barrier_t barrier; float lanes[THREADS], sums[THREADS / 32]; };
static thread_local Index threadIdx, blockIdx, gridDim;
static thread_local Block *own_block;
static thread_local unsigned seed;

static bool one_in(int count) { return rand_r(&seed) % count == 0; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static void __syncthreads() { pthread_barrier_wait(&own_block->barrier); }
static float __shfl_xor_sync(unsigned, float x, int lanes) {
  own_block->lanes[threadIdx.x] = x;
  __syncthreads();
  x = own_block->lanes[threadIdx.x ^ lanes];
  __syncthreads();
  return x;
}
static void wait_for_earlier_kernels() {}
static unsigned load_epoch(const unsigned *from) { return *from; }
static void store_to_peer(uint4 *to, const uint4 &piece) {
  const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w}, first = rand_r(&seed);
  for (int i = 0; i < 4; ++i) {
    if (one_in(8)) sched_yield();
    __atomic_store_n((unsigned *)to + (first + i) % 4, words[(first + i) % 4], __ATOMIC_RELAXED);
  }
}
static uint4 load_staged(const uint4 *from) {
  sched_yield();
  unsigned words[4];
  for (int i = 0; i < 4; ++i) words[i] = __atomic_load_n((const unsigned *)from + i, __ATOMIC_RELAXED);
  return {words[0], words[1], words[2], words[3]};
}
static float to_float(unsigned short half) { _Float16 x; memcpy(&x, &half, 2); return x; }
static unsigned short float16_bits(float x) { _Float16 y = x; unsigned short bits; memcpy(&bits, &y, 2); return bits; }
static unsigned bfloat16_bits(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static unsigned pack_float16(float low, float high) { return float16_bits(low) | (unsigned)float16_bits(high) << 16; }
static unsigned pack_bfloat16(float low, float high) { return bfloat16_bits(low) | bfloat16_bits(high) << 16; }

#include SOURCE

enum Kind { ONE_SHOT, TWO_SHOTS, NORM, NUM_KINDS };
using Vectors = std::vector<uint4>;
struct Step {
  int kind, dtype;
  unsigned vectors, blocks, row_vectors;
  Vectors given[RANKS], found[RANKS], normed[RANKS], total[RANKS], residual, weight;
};
static const void *const KERNELS[NUM_KINDS][3] = {
    {(void *)one_shot_float32, (void *)one_shot_bfloat16, (void *)one_shot_float16},
    {(void *)two_shots_float32, (void *)two_shots_bfloat16, (void *)two_shots_float16},
    {(void *)norm_float32, (void *)norm_bfloat16, (void *)norm_float16}};
static std::vector<Step> steps(CALLS);
static Vectors staging[RANKS];
static u32 epochs[RANKS][BLOCKS];
static Block blocks[RANKS][BLOCKS];
static pthread_barrier_t kernel_ends[RANKS];

static void run_thread(int rank, unsigned block, unsigned thread) {
  threadIdx.x = thread, blockIdx.x = block, own_block = &blocks[rank][block];
  seed = 1 + (rank * BLOCKS + block) * THREADS + thread;
  for (Step &step : steps) {
    gridDim.x = step.blocks;
    Params params = {{}, epochs[rank], step.found[rank].data(), (u32)rank, step.vectors};
    for (int peer = 0; peer < RANKS; ++peer) params.staging[peer] = staging[peer].data();
    const NormParams norm = {params, step.residual.data(), step.weight.data(), step.normed[rank].data(),
                             step.total[rank].data(), step.row_vectors, 1e-6f};
    const void *kernel = KERNELS[step.kind][step.dtype];
    if (block < step.blocks && step.kind == NORM) ((void (*)(NormParams))kernel)(norm);
    if (block < step.blocks && step.kind != NORM) ((void (*)(Params))kernel)(params);
    pthread_barrier_wait(&kernel_ends[rank]);
    if (one_in(512)) usleep(rand_r(&seed) % 2000);
  }
}

static int num_values(const Step &step) { return step.dtype == 0 ? 1 : 2; }
static float value(const Step &step, u32 bits, int k) {
  return step.dtype == 0 ? __uint_as_float(bits) : step.dtype == 1 ? __uint_as_float(bits >> 16 * k << 16)
                                                                   : to_float(bits >> 16 * k);
}
static u32 pack(const Step &step, float low, float high) {
  return step.dtype == 0 ? __float_as_uint(low) : step.dtype == 1 ? pack_bfloat16(low, high) : pack_float16(low, high);
}
static bool equals(const Step &step, u32 a, u32 b) {
  for (int k = 0; k < num_values(step); ++k) {
    const float x = value(step, a, k), y = value(step, b, k);
    if (x != y && (x == x || y == y)) return false;
  }
  return true;
}
static u32 expected_sum(const Step &step, unsigned vector, int i) {
  float sum[2] = {};
  for (int k = 0; k < num_values(step); ++k)
    for (int rank = 0; rank < RANKS; ++rank) {
      const float x = value(step, word(step.given[rank][vector], i), k);
      sum[k] = rank ? sum[k] + x : x;
    }
  return pack(step, sum[0], sum[1]);
}
static double square_sum(const Step &step, int rank, unsigned row) {
  double sum = 0;
  for (unsigned vector = row * step.row_vectors; vector < (row + 1) * step.row_vectors; ++vector)
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < num_values(step); ++k) sum += pow(value(step, word(step.total[rank][vector], i), k), 2);
  return sum;
}
static long num_wrong(const Step &step, int rank) {
  const double bounds[] = {4e-6, 0.016, 0.002};
  long wrong = 0;
  double scale = 0;
  for (unsigned vector = 0; vector < step.vectors; ++vector) {
    if (step.kind == NORM && vector % step.row_vectors == 0)
      scale = 1 / sqrt(square_sum(step, rank, vector / step.row_vectors) / (4 * num_values(step) * step.row_vectors) + 1e-6);
    for (int i = 0; i < 4; ++i) {
      const u32 sum = expected_sum(step, vector, i);
      if (step.kind != NORM) {
        wrong += !equals(step, sum, word(step.found[rank][vector], i));
        continue;
      }
      float total[2] = {};
      for (int k = 0; k < num_values(step); ++k)
        total[k] = value(step, sum, k) + value(step, word(step.residual[vector], i), k);
      const u32 found = word(step.total[rank][vector], i);
      wrong += !equals(step, pack(step, total[0], total[1]), found);
      for (int k = 0; k < num_values(step); ++k) {
        const double exact = value(step, found, k) * scale
                             * value(step, word(step.weight[vector % step.row_vectors], i), k);
        const double normed = value(step, word(step.normed[rank][vector], i), k);
        wrong += !(fabs(normed - exact) <= bounds[step.dtype] * fabs(exact) + 1e-6);
      }
    }
  }
  return wrong;
}

static void fill(Step &step, std::mt19937 &random) {
  const unsigned room = BLOCKS * CHUNK;
  step.kind = random() % NUM_KINDS, step.dtype = random() % 3, step.row_vectors = 1;
  if (step.kind == NORM) {
    step.row_vectors = 1 + random() % (2 * THREADS);
    const unsigned rounds = (step.row_vectors + THREADS - 1) / THREADS;
    const unsigned rows = 1 + random() % (BLOCKS * (CHUNK / (rounds * THREADS)));
    step.vectors = rows * step.row_vectors, step.blocks = min(rows, BLOCKS);
  } else {
    const unsigned most = step.kind == ONE_SHOT ? room : RANKS * room / 2;
    step.vectors = 1 + random() % (random() % 4 ? 2 * THREADS : most);
    const unsigned per_rank = step.kind == ONE_SHOT ? step.vectors : (step.vectors + RANKS - 1) / RANKS;
    step.blocks = min((per_rank + THREADS - 1) / THREADS, BLOCKS);
  }
  std::normal_distribution<float> normal;
  auto make = [&](unsigned count, bool has_empty) {
    Vectors made(count);
    for (uint4 &piece : made)
      for (u32 *bits : {&piece.x, &piece.y, &piece.z, &piece.w})
        *bits = has_empty && random() % 97 == 0 ? EMPTY : pack(step, normal(random), normal(random));
    return made;
  };
  for (int rank = 0; rank < RANKS; ++rank) {
    step.found[rank] = step.given[rank] = make(step.vectors, step.kind != NORM);
    step.normed[rank].resize(step.vectors), step.total[rank].resize(step.vectors);
  }
  step.residual = make(step.vectors, false), step.weight = make(step.row_vectors, false);
}

int main() {
  std::mt19937 random(RANKS);
  for (Step &step : steps) fill(step, random);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < RANKS; ++rank) {
    staging[rank].assign(2 * RANKS * BLOCKS * CHUNK, {EMPTY, EMPTY, EMPTY, EMPTY});
    pthread_barrier_init(&kernel_ends[rank], nullptr, BLOCKS * THREADS);
    for (Block &block : blocks[rank]) pthread_barrier_init(&block.barrier, nullptr, THREADS);
  }
  for (int rank = 0; rank < RANKS; ++rank)
    for (unsigned block = 0; block < BLOCKS; ++block)
      for (unsigned thread = 0; thread < THREADS; ++thread) threads.emplace_back(run_thread, rank, block, thread);
  for (std::thread &thread : threads) thread.join();
  long wrong = 0, left = 0;
  for (int rank = 0; rank < RANKS; ++rank) {
    for (const Step &step : steps) wrong += num_wrong(step, rank);
    for (const uint4 &piece : staging[rank])
      for (int i = 0; i < 4; ++i) left += word(piece, i) != EMPTY;
  }
  printf("%ld wrong, %ld left\n", wrong, left);
}
