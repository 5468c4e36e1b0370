// How blocks anywhere on the device hand h(t) to each other: packets in global memory that say themselves whether they
// are new. No flag, no fence, no reset, and no bound on h.
//
// A packet is one aligned 64-bit word: four neighbouring units of a row of the batch, rounded. |h| < 2 leaves bit 14,
// the top of the exponent, of each of the four free, in float16 and bfloat16. In the first one it holds the phase,
// which tells h(t) from h(t - 2) in the same slot; in the second one it says that the packet is long: some value is
// beyond 2, infinite or NaN. The values of a long packet follow in a place of their own, each word of two with the step
// in a 64-bit word. Two slots take turns, and the memory is zero when a launch starts: h(1) and h(2) have phase 1.
//
// Why this is right, by the memory consistency model of PTX (docs/design.md has it at length):
// - Packets are written and read by relaxed operations of 64 bits at gpu scope (a vector of two is two of them), so a
//   value and its phase arrive together.
// - One thread writes a packet's place in every step, hence in the order zero, h(t), h(t + 2), ... A reader that has
//   seen h(t) cannot see what was before it again (SC per location). It waits for the other phase, which only
//   h(t + 2) has.
// - h(t + 4), of the phase of h(t), cannot be there yet, nor h(t + 2) where h(t) is awaited: its sums need all of
//   h(t + 1), which needs what this reader still waits for. No value comes out of thin air.
#pragma once

#include "blocks.cuh"

namespace flashrnn::cuda {

inline constexpr std::uint32_t kPhaseBit = 1u << 14, kLongBit = 1u << 30, kTopBits = kPhaseBit | kLongBit;

template <class C>
struct Packets {
  // Of one head and tile of the batch, by 32 units, row, 8 units: two packets. Copies spread the polls over L2.
  static constexpr int kCopyBytes = C::kD * C::kRows * 2;
  static constexpr int kSlotBytes = C::kReplicas * kCopyBytes;
  static constexpr int kLong = 2 * kSlotBytes, kLongSlotBytes = 2 * kCopyBytes;
  static constexpr int kGroupBytes = kLong + 2 * kLongSlotBytes;
  static constexpr int kPairBytes = C::kRows * 64;  // 32 units: two k-steps
  static constexpr int kPairs = C::kKSteps / 2;
  static_assert(kMessages<C> * C::kReplicas <= 32, "a lane sends one message to one copy");
  static_assert(C::kD <= kLargestGridHead && kGroupBytes <= kGridBytesPerUnit * C::kD, "config.h bounds the memory");

  char* group;        // the memory of this head and tile of the batch; bytes from there, in the first slot, of
  int from;           // this lane's two packets of the first pair of k-steps, in the first copy
  int copy;           // the copy that this block reads
  int to[C::kOwned];  // this lane's message of a group, in the copy it writes
  int message;
  bool reads, sends, sends_long;

  __device__ __forceinline__ Packets(const Tensors& t, const Place& place, const Lane<C>& lane)
      : message(lane.lane % kMessages<C>) {
    const int block = static_cast<int>(blockIdx.x);
    group = static_cast<char*>(t.workspace) + static_cast<std::int64_t>(block / C::kBlocks) * kGroupBytes;
    from = lane.k_warp * kPairs * kPairBytes + lane.source_row() * 64 + lane.q * 16;
    copy = block % C::kReplicas * kCopyBytes;
    // Only the lanes whose column has a row: the others' requests would be as many.
    reads = C::kColumns == 2 || (lane.g % 2 == 0 && lane.g / 2 < C::kRows);
    const int written = lane.lane / kMessages<C>;
    sends = written < C::kReplicas, sends_long = written == 0;
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) {
      const int unit = place.first_unit + message_unit<C>(lane, message) + i * WxStream<C>::kUnitsApart;
      to[i] = written * kCopyBytes + unit / 32 * kPairBytes + message_row<C>(lane, message) * 64 + unit % 32 * 2;
    }
  }

  // 8 units of a row of h(s), as `gather` gives them, for group i of the warp.
  __device__ __forceinline__ void send(uint4 v, int i, int s, bool wanted) const {
    const std::uint32_t phase = phase_of(s), step = static_cast<std::uint32_t>(s);
    const bool low = ((v.x | v.y) & kTopBits) != 0, high = ((v.z | v.w) & kTopBits) != 0;
    const uint4 packets = {low ? phase | kLongBit : v.x | phase, low ? 0 : v.y,  //
                           high ? phase | kLongBit : v.z | phase, high ? 0 : v.w};
    ptx::store_relaxed_16_if(wanted && sends, group + (to[i] + (s & 1) * kSlotBytes), packets);
    char* const at = group + (kLong + 2 * to[i] + (s & 1) * kLongSlotBytes);  // of the first copy
    ptx::store_relaxed_16_if(wanted && sends_long && low, at, {v.x, step, v.y, step});
    ptx::store_relaxed_16_if(wanted && sends_long && high, at + 16, {v.z, step, v.w, step});
  }

  // This lane's part of h(s), not 0 where a packet is long. Ends the kernel with an error after `limit` polls. Lanes of
  // a warp may leave it apart.
  //
  // A packet is polled until it is there, one pass over all that are missing after the other. The registers of a packet
  // are those of its load from the first pass on: where the compiler has to move them, each load is waited for before
  // the next (0.13 us for each of them).
  __device__ __forceinline__ std::uint32_t receive(Hidden<C>& h, int s, std::uint32_t limit) const {
    const std::uint32_t phase = reads ? phase_of(s) : 0;
    const char* const at = group + (from + copy + (s & 1) * kSlotBytes);
    std::uint64_t packets[kPairs][2];
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      packets[p][0] = packets[p][1] = 0;
      ptx::load_relaxed_16_if(reads, packets[p][0], packets[p][1], at + p * kPairBytes);
    }
    std::uint32_t all, polls = 0;
    do {
      if (++polls > limit) __trap();
      all = 0;
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const std::uint32_t both = (low_word(packets[p][0]) ^ phase) | (low_word(packets[p][1]) ^ phase);
        ptx::load_relaxed_16_if(both & kPhaseBit, packets[p][0], packets[p][1], at + p * kPairBytes);
        all |= both;
      }
    } while ((all & kPhaseBit) != 0);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      h[p] = {low_word(packets[p][0]) ^ phase, high_word(packets[p][0]), low_word(packets[p][1]) ^ phase,
              high_word(packets[p][1])};
    }
    return all & kLongBit;
  }

  // The values of long packets in place of what said that they are long.
  __device__ __forceinline__ void receive_long(Hidden<C>& h, int s, std::uint32_t limit) const {
    const char* const at = group + (kLong + 2 * from + (s & 1) * kLongSlotBytes);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      if ((h[p].x & kLongBit) != 0) receive_long(h[p].x, h[p].y, at + 2 * p * kPairBytes, s, limit);
      if ((h[p].z & kLongBit) != 0) receive_long(h[p].z, h[p].w, at + 2 * p * kPairBytes + 16, s, limit);
    }
  }

 private:
  __device__ __forceinline__ static std::uint32_t low_word(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
  __device__ __forceinline__ static std::uint32_t high_word(std::uint64_t x) {
    return static_cast<std::uint32_t>(x >> 32);
  }
  __device__ __forceinline__ static void receive_long(std::uint32_t& x, std::uint32_t& y, const char* at, int s,
                                                      std::uint32_t limit) {
    const std::uint32_t step = static_cast<std::uint32_t>(s);
    std::uint64_t low = 0, high = 0;
    for (std::uint32_t polls = 0; high_word(low) != step || high_word(high) != step; ++polls) {
      if (polls > limit) __trap();
      ptx::load_relaxed_16_if(1, low, high, at);
    }
    x = low_word(low), y = low_word(high);
  }
  // 1, 1, 0, 0, ... for h(1), h(2), ...
  __device__ __forceinline__ static std::uint32_t phase_of(int s) {
    return static_cast<std::uint32_t>(s + 1) << 13 & kPhaseBit;
  }
};

}  // namespace flashrnn::cuda
