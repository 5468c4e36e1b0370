// Products of a warpgroup from shared memory, compute capability 9.0a: 64 rows of R, 16 of D, the rows of a tile of the
// batch.
//
// Both operands lie with D innermost, 128 bytes of it in a row, the 16-byte pieces of each 8 rows exchanged among
// themselves (the hardware's swizzle of 128 bytes): piece p of row r is at p ^ (r % 8).
#pragma once

#include <cstdint>

#include "../op.h"

namespace flashrnn::cuda::ptx {

// Where an operand begins; its groups of 8 rows follow each other.
__device__ __forceinline__ std::uint64_t operand(std::uint32_t shared_address) {
  constexpr std::uint64_t kSwizzle128 = 1, kGroupBytes = 8 * 128;
  return kSwizzle128 << 62 | kGroupBytes / 16 << 32 | 1 << 16 | (shared_address & 0x3ffff) / 16;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// What this thread's copies wrote is seen by the products of those that it meets at a barrier afterwards.
__device__ __forceinline__ void fence_shared_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define FLASHRNN_SUMS_8(c, n)                                                                                          \
  "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]), "+f"(c[n + 1][0]), "+f"(c[n + 1][1]), "+f"(c[n + 1][2]), \
      "+f"(c[n + 1][3])
#define FLASHRNN_WGMMA_16(types)                                                                           \
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32." types \
               " {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0;}"                                       \
               : FLASHRNN_SUMS_8(c, 0)                                                                     \
               : "l"(a), "l"(b), "r"(adds))
#define FLASHRNN_WGMMA_32(types)                                                                           \
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." types \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;}"       \
               : FLASHRNN_SUMS_8(c, 0), FLASHRNN_SUMS_8(c, 2)                                              \
               : "l"(a), "l"(b), "r"(adds))
#define FLASHRNN_WGMMA_64(types)                                                                                      \
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." types            \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
               "%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;}"                                                      \
               : FLASHRNN_SUMS_8(c, 0), FLASHRNN_SUMS_8(c, 2), FLASHRNN_SUMS_8(c, 4), FLASHRNN_SUMS_8(c, 6)           \
               : "l"(a), "l"(b), "r"(adds))

// c += a b, or c = a b where `adds` is 0, for 8 kSets rows of the batch. Lane 4g + q of warp w holds rows 16w + g and
// 16w + g + 8 and, of each 8 columns, 2q and 2q + 1. Runs on until wgmma_wait().
template <DType kType, int kSets>
__device__ __forceinline__ void wgmma(float (&c)[kSets][4], std::uint64_t a, std::uint64_t b, int adds) {
  static_assert(kSets == 2 || kSets == 4 || kSets == 8, "16, 32 or 64 rows of the batch");
  if constexpr (kType == DType::kBfloat16) {
    if constexpr (kSets == 2) FLASHRNN_WGMMA_16("bf16.bf16");
    if constexpr (kSets == 4) FLASHRNN_WGMMA_32("bf16.bf16");
    if constexpr (kSets == 8) FLASHRNN_WGMMA_64("bf16.bf16");
  } else {
    if constexpr (kSets == 2) FLASHRNN_WGMMA_16("f16.f16");
    if constexpr (kSets == 4) FLASHRNN_WGMMA_32("f16.f16");
    if constexpr (kSets == 8) FLASHRNN_WGMMA_64("f16.f16");
  }
}
#undef FLASHRNN_SUMS_8
#undef FLASHRNN_WGMMA_16
#undef FLASHRNN_WGMMA_32
#undef FLASHRNN_WGMMA_64

}  // namespace flashrnn::cuda::ptx
