// Sums over lanes that share the inner dimension of a product on the FMA units.
#pragma once

namespace flashrnn::cuda {

// By value: of `upper ? sums[i] : sums[j]` the compiler makes a choice of addresses, and an array in local memory.
__device__ __forceinline__ float pick(bool first, float a, float b) { return first ? a : b; }

// One round: with kHalf > 0 the lanes kOffset apart hand each other half of the 2 kHalf items that each still holds.
// A template, since the compiler does not unroll a loop that halves its counter, and indexes memory in place of
// registers.
template <int kHalf, int kOffset, int kItems, int kGates>
__device__ __forceinline__ void reduce_round(float (&sums)[kItems][kGates], int lane) {
  if constexpr (kOffset > 0) {
    const bool upper = (lane & kOffset) != 0;
#pragma unroll
    for (int i = 0; i < (kHalf > 0 ? kHalf : 1); ++i) {
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        const float low = sums[i][g], high = sums[i + kHalf][g];
        sums[i][g] = pick(upper, high, low) + __shfl_xor_sync(~0u, pick(upper, low, high), kOffset);
      }
    }
    reduce_round<kHalf / 2, kOffset / 2>(sums, lane);
  }
}

// Adds up sums[item][gate] over kLanes neighbouring lanes and hands the items out: on return sums[0] is the total of
// item lane / (kLanes / kItems), counted inside the kLanes.
template <int kLanes, int kItems, int kGates>
__device__ __forceinline__ void reduce_items(float (&sums)[kItems][kGates], int lane) {
  static_assert(kItems <= kLanes && (kItems & (kItems - 1)) == 0, "a power of two of items, at most one a lane");
  reduce_round<kItems / 2, kLanes / 2>(sums, lane);
}

}  // namespace flashrnn::cuda
