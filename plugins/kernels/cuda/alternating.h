// The alternating mode: one kernel per time step, for every layer that no specialised kernel fits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../op.h"

namespace flashrnn::cuda {

std::size_t alternating_workspace_bytes(const Params& params);
cudaError_t launch_alternating(const Params& params, void* workspace, cudaStream_t stream);

}  // namespace flashrnn::cuda
