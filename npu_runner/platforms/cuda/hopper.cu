// Hopper's instructions as functions: barriers in shared memory, TMA copies, warpgroup MMAs, and conversions to the
// 16-bit type that IS_BFLOAT16 names. Knows no kernel. Addresses of shared memory are 32 bits.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct alignas(64) TensorMap { unsigned char bytes[128]; };

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void tma_load(u32 to, const TensorMap &map, u32 barrier, int column, int row, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "l"(policy) : "memory");
}
__device__ __forceinline__ void tma_load(u32 to, const TensorMap &map, u32 barrier, int dim, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(dim), "r"(head), "r"(token) : "memory");
}
__device__ __forceinline__ void tma_load(u32 to, const TensorMap &map, u32 barrier, int dim, int head, int token,
                                         int block) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(dim), "r"(head), "r"(token), "r"(block) : "memory");
}
// The stage of a ring that comes next, and the parity of its barriers.
template <u32 COUNT> struct Ring {
  u32 stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == COUNT) { stage = 0; parity ^= 1; }
  }
};
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#if IS_BFLOAT16
#define DTYPE "bf16"
#else
#define DTYPE "f16"
#endif
#define REGISTERS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS_56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_16 REGISTERS_0 ", " REGISTERS_8
#define LIST_32 REGISTERS_0 ", " REGISTERS_8 ", " REGISTERS_16 ", " REGISTERS_24
#define LIST_36 LIST_32 ", %32, %33, %34, %35"
#define LIST_40 LIST_32 ", " REGISTERS_32
#define LIST_48 LIST_40 ", " REGISTERS_40
#define LIST_56 LIST_48 ", " REGISTERS_48
#define LIST_64 LIST_56 ", " REGISTERS_56
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 4)
#define ALL_16(d) EIGHT(d, 0), EIGHT(d, 8)
#define ALL_32(d) EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24)
#define ALL_36(d) ALL_32(d), FOUR(d, 32)
#define ALL_40(d) ALL_32(d), EIGHT(d, 32)
#define ALL_48(d) ALL_40(d), EIGHT(d, 40)
#define ALL_56(d) ALL_48(d), EIGHT(d, 48)
#define ALL_64(d) ALL_56(d), EIGHT(d, 56)

// A warpgroup MMA: 64 rows, `columns`, K of 16. A thread has half as many accumulators as there are columns; the
// register names of the operands behind them follow. `right` is K-major.
#define WGMMA(columns, count, left_name, right_name, adds_name)                                                        \
  __device__ __forceinline__ void wgmma(float (&acc)[count], u64 left, u64 right, int adds) {                          \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_name ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." DTYPE "." DTYPE " {" LIST_##count "}, " left_name \
                 ", " right_name ", adds, 1, 1, 0, 0;\n}" : ALL_##count(acc) : "l"(left), "l"(right), "r"(adds));      \
  }                                                                                                                    \
  __device__ __forceinline__ void fence_registers(float (&acc)[count]) { asm volatile("" : ALL_##count(acc)::"memory"); }
WGMMA("128", 64, "%64", "%65", "%66")
WGMMA("112", 56, "%56", "%57", "%58")
WGMMA("96", 48, "%48", "%49", "%50")

// The same with `left` in 4 registers, whose names are given. `right` is N-major.
#define WGMMA_REGISTERS(columns, count, left_names, right_name, adds_name)                                             \
  __device__ __forceinline__ void wgmma(float (&acc)[count], const u32 *left, u64 right, int adds) {                   \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_name ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." DTYPE "." DTYPE " {" LIST_##count "}, {"       \
                 left_names "}, " right_name ", adds, 1, 1, 1;\n}"                                                     \
                 : ALL_##count(acc)                                                                                    \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(adds));                     \
  }
WGMMA_REGISTERS("128", 64, "%64, %65, %66, %67", "%68", "%69")
WGMMA_REGISTERS("80", 40, "%40, %41, %42, %43", "%44", "%45")
WGMMA_REGISTERS("72", 36, "%36, %37, %38, %39", "%40", "%41")
WGMMA_REGISTERS("64", 32, "%32, %33, %34, %35", "%36", "%37")
// Code that reads `acc` must stay behind the wait for it.
__device__ __forceinline__ void fence_registers(float (&acc)[40]) { asm volatile("" : ALL_40(acc)::"memory"); }
__device__ __forceinline__ void fence_registers(float (&acc)[36]) { asm volatile("" : ALL_36(acc)::"memory"); }
__device__ __forceinline__ void fence_registers(float (&acc)[16]) { asm volatile("" : ALL_16(acc)::"memory"); }
__device__ __forceinline__ void fence_registers(float (&acc)[32]) { asm volatile("" : ALL_32(acc)::"memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `MOST` groups of MMAs run. `fence_registers` must follow.
template <int MOST> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(MOST) : "memory");
}

// Computes what `x`, never negative, depends on before the code that follows: the assembler keeps the order of a store,
// which is never made, and of a wait. Without it the assembler would wait for the MMAs first, with nothing to overlap
// them.
__device__ __forceinline__ void compute_first(float x, u32 nowhere) {
  asm volatile("{\n.reg .pred is_negative;\nsetp.lt.f32 is_negative, %0, 0f00000000;\n"
               "@is_negative st.volatile.shared.f32 [%1], %0;\n}" ::"f"(x), "r"(nowhere) : "memory");
}

// The descriptor of a matrix in shared memory: rows of BYTES bytes (128, 64), swizzled in groups of 8. Parts of BYTES
// bytes are `part` bytes apart, which matters for an N-major matrix.
template <u32 BYTES> __device__ __forceinline__ u64 smem_descriptor(u32 address, u32 part) {
  const u64 swizzle = BYTES == 128 ? 1 : 2;
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(part >> 4) << 16 | (u64)(8 * BYTES >> 4) << 32 | swizzle << 62;
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
#if IS_BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}
__device__ __forceinline__ float max_of_four_lanes(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float sum_of_four_lanes(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float to_float(u16 x) {
#if IS_BFLOAT16
  return __uint_as_float((u32)x << 16);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#endif
}
// Four e4m3 numbers as two pairs in float16.
__device__ __forceinline__ void widen(u32 four, u32 &low, u32 &high) {
  asm("{\n.reg .b16 first, second;\nmov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\ncvt.rn.f16x2.e4m3x2 %1, second;\n}" : "=r"(low), "=r"(high) : "r"(four));
}
__device__ __forceinline__ u32 word(const uint4 &piece, int i) {
  return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}
__device__ __forceinline__ uint4 read_shared(u32 from) {
  uint4 piece;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "r"(from));
  return piece;
}
// Transposes 8 x 8 of 16 bits: a thread has two neighbours of a row, and then of a column.
__device__ __forceinline__ u32 transpose(u32 pair) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}
// The body of a warp's MMA: 16 rows, 8 columns, K of 16. `statement` is asm or asm volatile.
#define MMA(statement, type)                                                                                           \
  statement("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "         \
            "{%8, %9}, {%0, %1, %2, %3};" : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                     \
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1))
