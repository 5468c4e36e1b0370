// The exchange of h inside a cluster: a message of 16 bytes goes to all blocks by st.async.
#pragma once

#include "ptx.cuh"

namespace flashrnn::cuda {

// Sends the messages of one warp to every block: lane l sends message l % kMessages to blocks l / kMessages, and so on.
template <int kMessages, int kClusterSize>
struct Fanout {
  static constexpr int kBlocksAtOnce = 32 / kMessages;
  static constexpr int kRounds = (kClusterSize + kBlocksAtOnce - 1) / kBlocksAtOnce;
  std::uint32_t at[kRounds];        // at the receiver, of the lane's message in the first buffer of h
  std::uint32_t barriers[kRounds];  // at the receiver
  bool active[kRounds];

  // Offsets in shared memory: of the lane's message in the first buffer, and of the two barriers.
  __device__ __forceinline__ Fanout(std::uint32_t shared, int lane, int offset, int barrier) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int block = lane / kMessages + i * kBlocksAtOnce;
      active[i] = block < kClusterSize;
      const std::uint32_t base = ptx::map_shared(shared, active[i] ? block : 0);
      at[i] = ptx::opaque(base + static_cast<std::uint32_t>(offset));
      barriers[i] = ptx::opaque(base + static_cast<std::uint32_t>(barrier));
    }
  }

  // `offset` from the first buffer's message; `buffer` is a constant.
  __device__ __forceinline__ void send(uint4 v, int offset, int buffer, bool wanted) const {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      ptx::send_16_if(wanted && active[r], at[r] + static_cast<std::uint32_t>(offset), v, barriers[r] + 8 * buffer);
    }
  }
};

}  // namespace flashrnn::cuda
