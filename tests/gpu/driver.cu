// C functions over the kernels, for ctypes: what launch.h and kernel.h offer, and no more.
#include "../../plugins/kernels/cuda/kernel.h"
#include "../../plugins/kernels/cuda/launch.h"

#define FLASHRNN_TEST_API extern "C" __attribute__((visibility("default")))

using flashrnn::Params;

FLASHRNN_TEST_API std::size_t params_bytes() { return sizeof(Params); }
FLASHRNN_TEST_API int num_kernels() { return flashrnn::cuda::num_kernels(); }
FLASHRNN_TEST_API int choose_kernel(const Params* params) { return flashrnn::cuda::choose_kernel(*params); }
FLASHRNN_TEST_API std::size_t workspace_bytes(const Params* params) { return flashrnn::cuda::workspace_bytes(*params); }
FLASHRNN_TEST_API std::size_t max_workspace_bytes(const Params* params) {
  return flashrnn::cuda::max_workspace_bytes(*params);
}
FLASHRNN_TEST_API int launch(const Params* params, void* workspace, cudaStream_t stream) {
  return flashrnn::cuda::launch(*params, workspace, stream);
}
FLASHRNN_TEST_API int launch_row(int row, const Params* params, void* workspace, cudaStream_t stream) {
  return flashrnn::cuda::launch_row(row, *params, workspace, stream);
}
// Heads' tiles of a row that the device holds at once, or minus the error.
FLASHRNN_TEST_API int resident(int row) {
  int count = 0;
  const cudaError_t error = flashrnn::cuda::kernel_row(row).prepare(count);
  return error == cudaSuccess ? count : -static_cast<int>(error);
}
FLASHRNN_TEST_API const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
