// Hopper's instructions as functions: barriers in shared memory, copies by tensor maps, products of warpgroups, and
// conversions to the 16-bit kind that IS_BFLOAT16 names. Knows no kernel. Addresses of shared memory are 32 bits.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) Map { unsigned char bytes[128]; };

__device__ __forceinline__ void make_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void bring(u32 to, const Map &map, u32 barrier, int dim, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(dim), "r"(head), "r"(token) : "memory");
}
__device__ __forceinline__ void bring(u32 to, const Map &map, u32 barrier, int dim, int head, int token, int block) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(dim), "r"(head), "r"(token), "r"(block) : "memory");
}
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#if IS_BFLOAT16
#define KIND "bf16"
#else
#define KIND "f16"
#endif
#define SUMS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define SUMS_40 "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
#define SUMS_56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define ALL_32(d) SIXTEEN(d, 0), SIXTEEN(d, 16)
#define ALL_40(d) ALL_32(d), FOUR(d, 32), FOUR(d, 36)
#define ALL_64(d) ALL_32(d), SIXTEEN(d, 32), SIXTEEN(d, 48)
#define PRODUCT(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." KIND "." KIND " {" SUMS_0 ", " SUMS_16

// Products of a warpgroup: 64 rows, 16 terms; `right` is rows of terms for `left` in shared memory, and rows of columns
// for `left` in registers. 128 columns are 64 sums of a thread, 80 are 40, and 64 are 32.
__device__ __forceinline__ void multiply(float (&sums)[64], u64 left, u64 right, int adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n" PRODUCT("128") ", " SUMS_32 ", " SUMS_40 ", " SUMS_56
               "}, %64, %65, adds, 1, 1, 0, 0;\n}" : ALL_64(sums) : "l"(left), "l"(right), "r"(adds));
}
#define LEFT(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
__device__ __forceinline__ void multiply(float (&sums)[64], const u32 *left, u64 right, int adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n" PRODUCT("128") ", " SUMS_32 ", " SUMS_40 ", " SUMS_56
               "}, {%64, %65, %66, %67}, %68, adds, 1, 1, 1;\n}" : ALL_64(sums) : LEFT(left), "l"(right), "r"(adds));
}
__device__ __forceinline__ void multiply(float (&sums)[40], const u32 *left, u64 right, int adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %45, 0;\n" PRODUCT("80") ", " SUMS_32
               "}, {%40, %41, %42, %43}, %44, adds, 1, 1, 1;\n}" : ALL_40(sums) : LEFT(left), "l"(right), "r"(adds));
}
__device__ __forceinline__ void multiply(float (&sums)[32], const u32 *left, u64 right, int adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n" PRODUCT("64")
               "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 1;\n}" : ALL_32(sums) : LEFT(left), "l"(right), "r"(adds));
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `MOST` groups of products run; what reads `sums` comes behind it.
template <int MOST> __device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(MOST) : "memory");
}
__device__ __forceinline__ void read_behind(float (&sums)[64]) { asm volatile("" : ALL_64(sums)::"memory"); }
__device__ __forceinline__ void read_behind(float (&sums)[40]) { asm volatile("" : ALL_40(sums)::"memory"); }
__device__ __forceinline__ void read_behind(float (&sums)[32]) { asm volatile("" : ALL_32(sums)::"memory"); }

// What `x`, never negative, depends on is computed before what follows: the assembler keeps the order of a store, which
// is never made, and of a wait. Else it would wait for products first, and have nothing to do beside them.
__device__ __forceinline__ void compute_first(float x, u32 nowhere) {
  asm volatile("{\n.reg .pred is_negative;\nsetp.lt.f32 is_negative, %0, 0f00000000;\n"
               "@is_negative st.volatile.shared.f32 [%1], %0;\n}" ::"f"(x), "r"(nowhere) : "memory");
}

// A matrix in shared memory as products take it: rows of BYTES bytes (128, 64), swizzled, 8 a group. Parts of BYTES
// bytes are `part` bytes apart, which counts where rows are terms.
template <u32 BYTES> __device__ __forceinline__ u64 matrix(u32 address, u32 part) {
  const u64 swizzle = BYTES == 128 ? 1 : 2;
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(part >> 4) << 16 | (u64)(8 * BYTES >> 4) << 32 | swizzle << 62;
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 packed(float low, float high) {
  u32 pair;
#if IS_BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}
__device__ __forceinline__ float highest_of_four_lanes(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float sum_of_four_lanes(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
