// Decode attention for Hopper on the CPU. Built with PLAN and ATTENTION, the paths of the kernels' sources, and with
// their constants. Here are the instructions that those have as PTX, and hopper.cu's that they use.

#include "cuda_on_cpu.h"

static void let_next_kernel_start() {}
static void wait_for_earlier_kernels() {}
static void prefetch_line(const u8 *) {}

static uint4 read(const u8 *from) {
  uint4 piece;
  memcpy(&piece, from, sizeof piece);
  return piece;
}
static uint4 read_if(bool is_there, const u8 *from) { return is_there ? read(from) : uint4{0, 0, 0, 0}; }
static uint4 read_shared(u32 from) { return read(shared_at(from)); }
static u32 shared_memory() { return 0; }
static u32 count_up(u32 *counter) { return (*counter)++; }

static u32 word(const uint4 &piece, int i) { return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w; }
static float fast_exp2(float x) { return exp2f(x); }
static u32 half_pair(float low, float high) { return float16_bits(low) | (u32)float16_bits(high) << 16; }
static u32 pack(float low, float high) {
  return IS_BFLOAT16 ? bfloat16_bits(low) | (u32)bfloat16_bits(high) << 16 : half_pair(low, high);
}
static float low_of(u32 pair) { return IS_BFLOAT16 ? from_bfloat16(pair) : from_float16(pair); }
static void widen(u32 four, u32 &low, u32 &high) {
  low = half_pair(from_e4m3(four), from_e4m3(four >> 8));
  high = half_pair(from_e4m3(four >> 16), from_e4m3(four >> 24));
}
static float max_of_four_lanes(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// The layouts of operands are those of the PTX manual, "Matrix Fragments for mma.m16n8k16" and "movmatrix".
static u32 transpose(u32 pair) {
  const Slot *lanes = exchange(pair);
  const int group = threadIdx.x % LANES / 4, member = threadIdx.x % 4;
  auto element = [&](int row, int column) {
    return value<u32>(lanes[4 * row + column / 2]) >> 16 * (column % 2) & 0xFFFF;
  };
  return element(2 * member, group) | element(2 * member + 1, group) << 16;
}
static float operand(u32 pair, int half) {
  const u16 bits = pair >> 16 * half;
  return IS_BFLOAT16 && !IS_FP8 ? from_bfloat16(bits) : from_float16(bits);
}
static void mma(float (&acc)[4], const u32 (&left)[4], u32 right_0, u32 right_1) {
  Slot &own = own_slot();
  for (int k = 0; k < 4; ++k) {
    for (int row = 0; row < 2; ++row) own.left[row][k] = operand(left[row + k / 2 * 2], k % 2);
    own.right[k] = operand(k / 2 ? right_1 : right_0, k % 2);
  }
  const Slot *lanes = exchange();
  const int group = threadIdx.x % LANES / 4, member = threadIdx.x % 4;
  for (int e = 0; e < 4; ++e) {
    const Slot *row = lanes + 4 * group, *column = lanes + 4 * (2 * member + e % 2);
    for (int lane = 0; lane < 4; ++lane)
      for (int k = 0; k < 4; ++k) acc[e] += row[lane].left[e / 2][k] * column[lane].right[k];
  }
}

#include PLAN
#include ATTENTION

extern "C" bool launch_plan(const int *order, int num_programs, int count, u32 shared_bytes, void **arguments,
                            int num_arguments) {
  return launch(plan_decode, order, num_programs, count, shared_bytes, arguments, num_arguments);
}
extern "C" bool launch_attention(const int *order, int num_programs, int count, u32 shared_bytes, void **arguments,
                                 int num_arguments) {
  return launch(attend_decode, order, num_programs, count, shared_bytes, arguments, num_arguments);
}
