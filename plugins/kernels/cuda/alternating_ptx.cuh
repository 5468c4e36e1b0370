// Instructions of the alternating mode that CUDA C++ has no name for.
#pragma once

#include "ptx.cuh"

namespace flashrnn::cuda::ptx {

// 16 bytes past the L1 cache, or zeros.
__device__ __forceinline__ void copy_async_16_or_zero(bool inside, std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void store_shared_16(std::uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ std::int64_t load_shared_8_signed(std::uint32_t address) {
  std::int64_t v;
  asm volatile("ld.shared.s64 %0, [%1];" : "=l"(v) : "r"(address) : "memory");
  return v;
}

// 16 bytes past the L1 cache, which may hold what was there two steps ago.
__device__ __forceinline__ uint4 load_l2_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ void add_release(std::uint32_t* p, std::uint32_t x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

}  // namespace flashrnn::cuda::ptx
