// The CUDA kernels: one function launches one call of the op on a stream.
//
// Nothing here allocates, synchronises, prints or throws. Every call can be captured in a CUDA graph, and any number of
// calls may be in flight on any number of streams, each with its own workspace.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../op.h"

namespace flashrnn::cuda {

// Failed polls of one wait after which a kernel gives up with cudaErrorLaunchFailure in place of hanging. Tools that
// slow polling down (compute-sanitizer) need no other value: a poll of a cluster sleeps in hardware, the others are
// loads.
inline constexpr std::uint32_t kSpinLimit = 1u << 26;

// Bytes of device memory that launch() needs for this call on the current device, 0 for most. Any 16-byte aligned
// address will do; the content on entry does not matter.
std::size_t workspace_bytes(const Params& params);

// The most that any batch of up to params.B needs on any device with any build's kernels: for engines that reserve
// memory when a plan is made, possibly elsewhere.
std::size_t max_workspace_bytes(const Params& params);

// Whether a kernel of this build is made for this call's layer and batch on the current device. Where none is, launch()
// takes the alternating kernel.
bool is_specialised(const Params& params);

// Launches the call on `stream`: a specialised kernel of this build where one fits the layer, the batch and the current
// device, else the alternating kernel, which fits anything. The choice does not depend on T: a sequence in chunks gives
// the bits of the whole sequence.
//
// cudaErrorInvalidValue: a size is negative or beyond 2^31 - 1, or `workspace` is null or misaligned where one is
// needed. All pointers of `params` are device memory.
cudaError_t launch(const Params& params, void* workspace, cudaStream_t stream);

}  // namespace flashrnn::cuda
