// Dequantizes integers of 4 and 8 bits to 16-bit floats, exactly, and has the copies that kernels of such weights
// share. Constants of the host: IS_BFLOAT16, BITS.

constexpr u32 ONES = IS_BFLOAT16 ? 0x3F803F80 : 0x3C003C00;
// Floats whose last mantissa bits count ones, and the offset that 4 bits are stored with where there are no zeros.
constexpr u32 BASE_BITS = IS_BFLOAT16 ? 0x43004300 : 0x64006400;
constexpr float BASE = IS_BFLOAT16 ? 128 : 1024, OFFSET = BITS == 4 ? 8 : 0;

__device__ __forceinline__ void bulk_load(u32 to, const void *from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ u32 fma16(u32 x, u32 y, u32 z) {
  u32 result;
#if IS_BFLOAT16
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
#endif
  return result;
}
__device__ __forceinline__ unsigned short load_shared_u16(u32 address) {
  unsigned short x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address));
  return x;
}
template <u32 MASK> __device__ __forceinline__ u32 or_base(u32 word) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "n"(MASK), "r"(BASE_BITS));
  return result;
}
// Two integers 16 bits apart, from bit SHIFT on, plus `negative`, which is minus their excess (above_zero); exact.
template <int SHIFT> __device__ __forceinline__ u32 dequantize(u32 word, u32 negative) {
#if BITS == 4
  return fma16(or_base<0x000F000F>(word >> SHIFT), ONES, negative);
#elif IS_BFLOAT16
  // 128 + the low 7 bits, minus 128, or minus 256 where the sign is set.
  const u32 low = or_base<0x007F007F>(word >> SHIFT), above = or_base<0x00800080>(word >> SHIFT);
  const u32 value = fma16(above, 0xBF80BF80, low);
  return HAS_ZEROS ? fma16(value, ONES, negative) : value;
#else
  return fma16(or_base<0x00FF00FF>((word ^ 0x80808080) >> SHIFT), ONES, negative);
#endif
}
// The excess of a dequantized integer over its value.
__device__ __forceinline__ float above_zero(float zero) {
  return zero + (BITS == 4 ? BASE : IS_BFLOAT16 ? 0 : BASE + 128);
}
