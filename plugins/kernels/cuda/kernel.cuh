// Kernel<Config>: from a configuration to a launch. A generated source file per line of kernel_configs.inc says
// FLASHRNN_INSTANTIATE(...) with that line's values.
#pragma once

#include "cluster.cuh"
#include "fma_grid.cuh"
#include "grid.cuh"
#include "kernel.h"
#include "local.cuh"

namespace flashrnn::cuda {

// Heads' tiles of the batch: clusters, or blocks of the local mode.
template <class C>
std::int64_t num_groups(const Tensors& t) {
  return static_cast<std::int64_t>(t.N) * t.H * ((t.B + C::kRows - 1) / C::kRows);
}

// The kernel of a configuration, its threads and bytes of shared memory.
template <class C, Mode kMode, bool kFma>
struct Entry {
  using Exchange = FmaExchange<C, kMode>;
  static constexpr auto kernel = fma_kernel<C>;
  static constexpr int kThreads = C::kThreads, kShared = Fma<C>::kBytes;
};
template <class C>
struct Entry<C, Mode::kLocal, false> {
  static constexpr auto kernel = local_kernel<C>;
  static constexpr int kThreads = C::kThreads + 32, kShared = LocalShared<C>::kBytes;
};
template <class C>
struct Entry<C, Mode::kCluster, false> {
  static constexpr auto kernel = cluster_kernel<C>;
  static constexpr int kThreads = C::kThreads, kShared = ClusterShared<C>::kBytes;
};
template <class C>
struct Entry<C, Mode::kGrid, false> {
  using Exchange = Packets<C>;
  static constexpr auto kernel = grid_kernel<C>;
  static constexpr int kThreads = C::kThreads, kShared = GridShared<C>::kBytes;
};
template <class C>
using EntryOf = Entry<C, C::kMode, C::kFma>;

template <class C, Mode kMode>
struct Launcher;

template <class C>
struct Launcher<C, Mode::kLocal> : EntryOf<C> {
  using EntryOf<C>::kernel, EntryOf<C>::kThreads, EntryOf<C>::kShared;
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
struct Launcher<C, Mode::kCluster> : EntryOf<C> {
  using EntryOf<C>::kernel, EntryOf<C>::kThreads, EntryOf<C>::kShared;
  struct Shape {
    cudaLaunchAttribute attribute{};
    cudaLaunchConfig_t config{};
    Shape(unsigned blocks, cudaStream_t stream) {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = C::kClusterSize;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      config.gridDim = blocks;
      config.blockDim = kThreads;
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

// Blocks wait for each other, so all of a launch are resident at once: a cooperative launch, which is refused
// otherwise. Groups of blocks do not, so a call of more groups than fit is several launches.
template <class C>
struct Launcher<C, Mode::kGrid> : EntryOf<C> {
  using EntryOf<C>::kernel, EntryOf<C>::kThreads, EntryOf<C>::kShared;
  using Exchange = typename EntryOf<C>::Exchange;
  static constexpr std::int64_t kMostGroups = kLargestGridUnits / C::kD;
  static cudaError_t prepare(int& resident) {
    int device = 0, processors = 0, cooperative = 0, per_processor = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device)) return error;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
      return error;
    }
    const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, kThreads, kShared);
    resident = cooperative != 0 ? per_processor * processors / C::kBlocks : 0;
    return error;
  }
  static std::int64_t groups_at_once(const Tensors& t) {
    return num_groups<C>(t) < kMostGroups ? num_groups<C>(t) : kMostGroups;
  }
  static cudaError_t launch(const Tensors& given, int resident, cudaStream_t stream) {
    const std::int64_t groups = num_groups<C>(given);
    const std::int64_t most = resident < groups_at_once(given) ? resident : groups_at_once(given);
    if (groups > INT_MAX) return cudaErrorInvalidValue;
    for (std::int64_t first = 0; first < groups; first += most) {
      const std::int64_t count = groups - first < most ? groups - first : most;
      Tensors t = given;
      t.first_group = static_cast<int>(first);
      if (t.T > 1) {  // the first step exchanges nothing
        const std::size_t bytes = static_cast<std::size_t>(count) * Exchange::kGroupBytes;
        if (cudaError_t error = cudaMemsetAsync(t.workspace, 0, bytes, stream)) return error;
      }
      void* arguments[] = {&t};
      const unsigned blocks = static_cast<unsigned>(count) * C::kBlocks;
      if (cudaError_t error = cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), blocks, kThreads,
                                                          arguments, kShared, stream)) {
        return error;
      }
    }
    return cudaSuccess;
  }
};

template <class C>
cudaError_t Kernel<C>::prepare(int& resident) {
  return Launcher<C, C::kMode>::prepare(resident);
}

template <class C>
std::size_t Kernel<C>::workspace_bytes(const Tensors& t) {
  if constexpr (C::kMode == Mode::kGrid) {
    return static_cast<std::size_t>(Launcher<C, C::kMode>::groups_at_once(t)) *
           Launcher<C, C::kMode>::Exchange::kGroupBytes;
  } else {
    (void)t;
    return 0;
  }
}

template <class C>
cudaError_t Kernel<C>::launch(const Tensors& t, int resident, cudaStream_t stream) {
  if constexpr (C::kMode == Mode::kGrid) {
    return Launcher<C, C::kMode>::launch(t, resident, stream);
  } else {
    (void)resident;
    const std::int64_t blocks = num_groups<C>(t) * C::kBlocks;
    if (blocks > INT_MAX) return cudaErrorInvalidValue;
    return Launcher<C, C::kMode>::launch(t, static_cast<unsigned>(blocks), stream);
  }
}

}  // namespace flashrnn::cuda

#define FLASHRNN_INSTANTIATE(cell, dtype, capability, min_batch, max_batch, clips, mode, ...)                 \
  template struct flashrnn::cuda::Kernel<flashrnn::cuda::Config<flashrnn::Cell::cell, flashrnn::DType::dtype, \
                                                                clips != 0, flashrnn::cuda::Mode::mode, __VA_ARGS__>>;
