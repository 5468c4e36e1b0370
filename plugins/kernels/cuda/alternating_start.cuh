// What comes before the first step in the alternating mode.
#pragma once

#include "alternating.h"
#include "elements.cuh"
#include "tensors.cuh"

namespace flashrnn::cuda {

// Writes the rounded initial h to the workspace, copies the initial states to where the running ones live, and sets the
// counters of so many groups of blocks to 0.
template <class E>
__global__ void start(Tensors t, int states, E* h, std::uint32_t* arrivals, int groups) {
  const std::int64_t width = static_cast<std::int64_t>(t.H) * t.D, all = t.N * t.B * width;
  const std::int64_t pitch = hidden_pitch(t.D, sizeof(E));
  const std::int64_t first = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (first < groups) arrivals[first * kArrivalStride] = 0;
  for (std::int64_t i = first; i < all; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const std::int64_t unit = i % t.D, head = i / t.D % t.H, row = i / width % t.B, n = i / width / t.B;
    h[((n * t.H + head) * t.B + row) * pitch + unit] = from_float<E>(t.initial_states[i]);
    for (int s = 0; s < states; ++s) t.final_states[s * all + i] = t.initial_states[s * all + i];
  }
}

template <class E>
void launch_start(const Tensors& t, int states, void* h, std::uint32_t* arrivals, int groups, cudaStream_t stream) {
  constexpr int kThreads = 256, kMostBlocks = 1024;
  static_assert(kThreads * 2 >= kMostGroups, "two blocks set all counters");
  const std::int64_t blocks = (static_cast<std::int64_t>(t.N) * t.B * t.H * t.D + kThreads - 1) / kThreads;
  const unsigned grid = static_cast<unsigned>(blocks < 2 ? 2 : blocks < kMostBlocks ? blocks : kMostBlocks);
  start<E><<<grid, kThreads, 0, stream>>>(t, states, static_cast<E*>(h), arrivals, groups);
}

}  // namespace flashrnn::cuda
