// The alternating mode: its memory, and which of its kernels serves a call on the current device.
#include "alternating.h"
#include "tensors.cuh"

namespace flashrnn::cuda {
namespace {

cudaError_t read(Device& found) {
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  const auto get = [&](int& value, cudaDeviceAttr name) { return cudaDeviceGetAttribute(&value, name, device); };
  if (cudaError_t error = get(found.processors, cudaDevAttrMultiProcessorCount)) return error;
  if (cudaError_t error = get(found.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin)) return error;
  if (cudaError_t error = get(found.major, cudaDevAttrComputeCapabilityMajor)) return error;
  return get(found.cooperative, cudaDevAttrCooperativeLaunch);
}

// Whole groups of 8 units, pieces of 16 bytes.
bool streams(const Params& p, const Device& device) {
  return device.major >= 8 && device.cooperative != 0 && p.D % kHalfUnits == 0 && is_aligned(p.r, 16);
}

}  // namespace

std::size_t hidden_bytes(const Params& p) {
  const int bytes = element_bytes(p.dtype);
  return static_cast<std::size_t>(p.N * p.H * p.B * hidden_pitch(p.D, bytes) * bytes);
}

std::size_t alternating_workspace_bytes(const Params& params) { return kArrivalBytes + 2 * hidden_bytes(params); }

cudaError_t launch_alternating(const Params& params, void* workspace, cudaStream_t stream) {
  if (workspace == nullptr || !is_aligned(workspace, 16)) return cudaErrorInvalidValue;
  Device device;
  if (cudaError_t error = read(device)) return error;
  cudaError_t error = cudaErrorInvalidConfiguration;
  if (streams(params, device)) {
    switch (params.dtype) {
      case DType::kFloat32:
        error = launch_all_steps<DType::kFloat32>(params, device, workspace, stream);
        break;
      case DType::kFloat16:
        error = launch_all_steps<DType::kFloat16>(params, device, workspace, stream);
        break;
      case DType::kBfloat16:
        error = launch_all_steps<DType::kBfloat16>(params, device, workspace, stream);
        break;
    }
  }
  return error == cudaErrorInvalidConfiguration ? launch_plain(params, workspace, stream) : error;
}

}  // namespace flashrnn::cuda
