// Kernel<Config>: from a configuration to a launch. A generated source file per line of kernel_configs.inc says
// FLASHRNN_INSTANTIATE(...) with that line's values.
#pragma once

#include "cluster.cuh"
#include "kernel.h"
#include "local.cuh"

namespace flashrnn::cuda {

template <class C>
std::int64_t num_blocks(const Tensors& t) {
  return static_cast<std::int64_t>(t.N) * t.H * ((t.B + C::kRows - 1) / C::kRows) * C::kClusterSize;
}

template <class C, Mode kMode>
struct Launcher;

template <class C>
struct Launcher<C, Mode::kLocal> {
  static constexpr auto kernel = local_kernel<C>;
  static constexpr int kThreads = C::kThreads + 32;
  static constexpr int kShared = LocalShared<C>::kBytes;
  static cudaError_t prepare(int& resident) {
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
      return error;
    }
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, kShared);
  }
  static cudaError_t launch(const Tensors& t, unsigned blocks, cudaStream_t stream) {
    kernel<<<blocks, kThreads, kShared, stream>>>(t);
    return cudaPeekAtLastError();
  }
};

#if CUDART_VERSION >= 11080
template <class C>
struct Launcher<C, Mode::kCluster> {
  static constexpr auto kernel = cluster_kernel<C>;
  static constexpr int kShared = ClusterShared<C>::kBytes;
  struct Shape {
    cudaLaunchAttribute attribute{};
    cudaLaunchConfig_t config{};
    Shape(unsigned blocks, cudaStream_t stream) {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = C::kClusterSize;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      config.gridDim = blocks;
      config.blockDim = C::kThreads;
      config.dynamicSmemBytes = kShared;
      config.stream = stream;
      config.attrs = &attribute;
      config.numAttrs = 1;
    }
  };
  // A cluster is placed as a whole or not at all, so kernels of any grid make progress: one has to fit.
  static cudaError_t prepare(int& resident) {
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
      return error;
    }
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) {
      return error;
    }
    const Shape shape(C::kClusterSize, nullptr);
    return cudaOccupancyMaxActiveClusters(&resident, kernel, &shape.config);
  }
  static cudaError_t launch(const Tensors& t, unsigned blocks, cudaStream_t stream) {
    const Shape shape(blocks, stream);
    return cudaLaunchKernelEx(&shape.config, kernel, t);
  }
};
#endif

template <class C>
cudaError_t Kernel<C>::prepare(int& resident) {
  return Launcher<C, C::kMode>::prepare(resident);
}

template <class C>
cudaError_t Kernel<C>::launch(const Tensors& t, cudaStream_t stream) {
  const std::int64_t blocks = num_blocks<C>(t);
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  return Launcher<C, C::kMode>::launch(t, static_cast<unsigned>(blocks), stream);
}

}  // namespace flashrnn::cuda

#define FLASHRNN_INSTANTIATE(cell, dtype, capability, min_batch, max_batch, clips, mode, ...)                 \
  template struct flashrnn::cuda::Kernel<flashrnn::cuda::Config<flashrnn::Cell::cell, flashrnn::DType::dtype, \
                                                                clips != 0, flashrnn::cuda::Mode::mode, __VA_ARGS__>>;
