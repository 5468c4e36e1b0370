// The alternating mode: R comes from memory in every step, for every layer that no specialised kernel fits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../op.h"
#include "alternating_choice.h"

namespace flashrnn::cuda {

std::size_t alternating_workspace_bytes(const Params& params);
cudaError_t launch_alternating(const Params& params, void* workspace, cudaStream_t stream);

// --- Its kernels, for alternating.cu ---

// What of the current device a launch depends on.
struct Device {
  int processors = 0, shared_bytes = 0, major = 0, cooperative = 0;
};

// In the workspace counters come first, one of each group of blocks in a line of the cache of its own, then two buffers
// of h.
inline constexpr int kMostGroups = 512, kArrivalStride = 32;
inline constexpr std::size_t kArrivalBytes = kMostGroups * kArrivalStride * sizeof(std::uint32_t);
// Elements from one row of h in the workspace to the next: rows start at multiples of 16 bytes.
__host__ __device__ constexpr std::int64_t hidden_pitch(std::int64_t D, int element_bytes) {
  const std::int64_t vector = 16 / element_bytes;
  return (D + vector - 1) / vector * vector;
}
std::size_t hidden_bytes(const Params& params);

// One kernel that runs through all steps. cudaErrorInvalidConfiguration, with nothing launched: the other way is
// faster, or the device has too little shared memory.
template <DType kType>
cudaError_t launch_all_steps(const Params& params, const Device& device, void* workspace, cudaStream_t stream);

// One kernel per step, on any device, for any D and any address of R.
cudaError_t launch_plain(const Params& params, void* workspace, cudaStream_t stream);

}  // namespace flashrnn::cuda
