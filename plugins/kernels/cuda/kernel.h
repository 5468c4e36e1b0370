// A specialised kernel as launch.cu sees it, and the table of those in this build.
#pragma once

#include <cuda_runtime_api.h>

#include "config.h"
#include "tensors.cuh"

namespace flashrnn::cuda {

// The functions of one configuration; kernel.cuh defines them, one source file per line instantiates them.
template <class C>
struct Kernel {
  // Sets the kernel's attributes on the current device; `resident` becomes how many heads' tiles run at once, 0 where
  // the device cannot hold one.
  static cudaError_t prepare(int& resident);
  static std::size_t workspace_bytes(const Tensors& tensors);
  // `resident` is what prepare() said on this device.
  static cudaError_t launch(const Tensors& tensors, int resident, cudaStream_t stream);
};

struct KernelRow {
  Cell cell;
  DType dtype;
  int compute_capability;  // 10 * major + minor
  int min_batch, max_batch;
  bool clips;
  Mode mode;
  int head_dim, cluster_size, units_per_block, batch_tile;
  cudaError_t (*prepare)(int& resident);
  std::size_t (*workspace_bytes)(const Tensors& tensors);
  cudaError_t (*launch)(const Tensors& tensors, int resident, cudaStream_t stream);
};

inline constexpr int kNone = -1;

int num_kernels();
const KernelRow& kernel_row(int index);

// The row for this call on the current device, or kNone: the alternating mode. Depends on no T.
int choose_kernel(const Params& params);

// Launches a given row, or the alternating mode for kNone. cudaErrorInvalidConfiguration: the row does not fit.
cudaError_t launch_row(int index, const Params& params, void* workspace, cudaStream_t stream);

}  // namespace flashrnn::cuda
