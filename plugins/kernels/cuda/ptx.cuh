// Instructions that CUDA C++ has no name for. Nothing here knows about cells.
#pragma once

#include <cstdint>

#include "../op.h"

// nvcc before 11.7 has no such word: its kernels copy a parameter whose address they take.
#if __CUDACC_VER_MAJOR__ == 11 && __CUDACC_VER_MINOR__ < 7
#define __grid_constant__
#endif

namespace flashrnn::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Hides where a value comes from. The compiler otherwise computes addresses again after each wait, on the critical
// path.
__device__ __forceinline__ std::uint32_t opaque(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// c += a b for 16 rows, 8 columns and 16 of the inner dimension. Lane 4g + q holds rows g, g + 8 and columns 2q, 2q
// + 1.
template <DType kType>
__device__ __forceinline__ void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (kType == DType::kBfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The transpose of an 8 x 8 matrix of 16-bit elements; a lane holds two neighbours of row lane / 4.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ uint4 load_shared_16(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared_8(std::uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t load_shared_4(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_4(std::uint32_t address, std::uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_2(std::uint32_t address, std::uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

// Predicated, not branched around: a divergent branch costs more than the store.
__device__ __forceinline__ void store_global_2_if(bool wanted, void* p, std::uint16_t v) {
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.u16 [%1], %2;}" ::"r"(static_cast<int>(wanted)),
               "l"(p), "h"(v)
               : "memory");
}
__device__ __forceinline__ void store_global_4_if(bool wanted, void* p, std::uint32_t v) {
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.u32 [%1], %2;}" ::"r"(static_cast<int>(wanted)),
               "l"(p), "r"(v)
               : "memory");
}
template <int kBytes>
__device__ __forceinline__ void copy_async_if(bool wanted, std::uint32_t to, const void* from) {
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p cp.async.ca.shared.global [%1], [%2], %3;}" ::"r"(
                   static_cast<int>(wanted)),
               "r"(to), "l"(from), "n"(kBytes)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 16 bytes in global memory as two words of 64 bits, each of which is read or written whole, at gpu scope and in no
// order.
// Leaves `low` and `high` alone where `wanted` is 0.
__device__ __forceinline__ void load_relaxed_16_if(std::uint32_t wanted, std::uint64_t& low, std::uint64_t& high,
                                                   const void* p) {
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%3];}"
               : "+l"(low), "+l"(high)
               : "r"(wanted), "l"(p)
               : "memory");
}
__device__ __forceinline__ void store_relaxed_16_if(bool wanted, void* p, uint4 v) {
  asm volatile(
      "{.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.u32 p, %0, 0;\n"
      "mov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\n@p st.relaxed.gpu.global.v2.b64 [%1], {a, b};}" ::"r"(
          static_cast<int>(wanted)),
      "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
__device__ __forceinline__ void store_relaxed_8_if(bool wanted, void* p, std::uint32_t low, std::uint32_t high) {
  asm volatile(
      "{.reg .pred p;\n.reg .b64 a;\nsetp.ne.u32 p, %0, 0;\nmov.b64 a, {%2, %3};\n"
      "@p st.relaxed.gpu.global.b64 [%1], a;}" ::"r"(static_cast<int>(wanted)),
      "l"(p), "r"(low), "r"(high)
      : "memory");
}
__device__ __forceinline__ void prefetch_if(bool wanted, const void* p) {
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p prefetch.global.L2 [%1];}" ::"r"(static_cast<int>(wanted)),
               "l"(p));
}

template <int kThreads>
__device__ __forceinline__ void named_barrier(int name) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

// --- Clusters, from compute capability 9.0 on ---

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The address in block `rank` of the cluster that corresponds to a shared address of this block.
__device__ __forceinline__ std::uint32_t map_shared(std::uint32_t address, int rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ void init_barrier(std::uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// 16 bytes to a block of the cluster; its barrier counts them when they are there.
__device__ __forceinline__ void send_16_if(bool wanted, std::uint32_t to, uint4 v, std::uint32_t barrier) {
  asm volatile(
      "{.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n"
      "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%1], {%2,%3,%4,%5}, [%6];}" ::"r"(
          static_cast<int>(wanted)),
      "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}
// Gives up, which ends the kernel with an error, after `limit` failed polls. A poll sleeps in hardware.
//
// The default semantics, as everywhere that bytes arrive in this block's own shared memory: the barrier counts them
// once they are there. `.acquire.cluster` adds an invalidation of the whole L1 cache (CCTL.IVALL) to every step.
__device__ __forceinline__ void wait_barrier(std::uint32_t barrier, std::uint32_t parity, std::uint32_t limit) {
  std::uint32_t done, polls = 0;
  do {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (++polls > limit) __trap();
  } while (done == 0);
}

}  // namespace flashrnn::cuda::ptx
