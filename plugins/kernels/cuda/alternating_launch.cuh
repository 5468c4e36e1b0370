// How a call of the alternating mode is divided over the device, which kernel takes it, and its launches.
#pragma once

#include "alternating_choice.h"
#include "alternating_kernel.cuh"
#include "alternating_start.cuh"
#include "alternating_tiled.cuh"
#include "launch.h"

namespace flashrnn::cuda {

template <class C>
Division divide(const Tensors& t, const Device& device) {
  return divide(static_cast<std::int64_t>(t.N) * t.H, t.D, t.B, C::kRows, device.processors);
}

template <class C>
int turns(const Division& division) {
  return turns(division, C::kPassUnits, C::kRows);
}

// Slices of D of a warp or of a part of the block, each `stride` bytes behind the one before.
template <class C>
std::int64_t num_slices(const Tensors& t, int stride) {
  return ceil_div(static_cast<std::int64_t>(t.D) * static_cast<int>(sizeof(Element<C::kType>)), stride);
}

// Whether a step is faster than by one kernel per step.
template <class C>
bool pays(const Tensors& t, const Device& device, const Division& division, TurnCost turn, std::int64_t slices) {
  const std::int64_t heads = static_cast<std::int64_t>(t.N) * t.H;
  return all_steps_us(heads, division, turns<C>(division), turn, slices, device.processors) <
         per_step_us(heads, t.D, t.B, C::kGates, static_cast<int>(sizeof(Element<C::kType>)), device.processors);
}

// Launches `kernel` with so many bytes of shared memory over all groups of blocks, as many at a time as the device
// holds. cudaErrorInvalidConfiguration where it holds none, or the kernel is empty.
template <class C, class Kernel>
cudaError_t launch_groups(Kernel kernel, std::size_t shared, const Params& params, const Device& device, Tensors t,
                          Share share, void* workspace, cudaStream_t stream) {
  share.arrivals = static_cast<std::uint32_t*>(workspace);
  for (int i = 0; i < 2; ++i) {
    share.hidden[i] = static_cast<char*>(workspace) + kArrivalBytes + i * hidden_bytes(params);
  }
  // Code for devices before 8.0 has no such kernel; the driver of a newer one may have compiled it from PTX.
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
  if (attributes.ptxVersion < 80) return cudaErrorInvalidConfiguration;
  // The limit is the function's, not the call's: calls of other threads may want more than this one.
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes)) {
    return error;
  }
  int per_processor = 0;
  if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, C::kThreads, shared)) {
    return error;
  }
  if (per_processor < 1) return cudaErrorInvalidConfiguration;

  const std::int64_t groups = params.N * params.H * share.ranges;
  const std::int64_t most = clamp(device.processors / share.unit_blocks, 1, kMostGroups);
  if (groups > INT_MAX) return cudaErrorInvalidValue;
  for (std::int64_t first = 0; first < groups; first += most) {
    const int count = static_cast<int>(groups - first < most ? groups - first : most);
    if (first == 0) {
      launch_start<Element<C::kType>>(t, num_states(C::kCell), share.hidden[0], share.arrivals, kMostGroups, stream);
    } else if (cudaError_t error = cudaMemsetAsync(share.arrivals, 0, kArrivalBytes, stream)) {
      return error;
    }
    if (t.T == 0) break;
    share.first_group = static_cast<int>(first);
    void* arguments[] = {&t, &share};
    if (cudaError_t error = cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel),
                                                        static_cast<unsigned>(count * share.unit_blocks), C::kThreads,
                                                        arguments, shared, stream)) {
      return error;
    }
  }
  return cudaPeekAtLastError();
}

// Stages of a warp that stay in shared memory, negative where not even the rest fits.
template <class C>
int resident_stages(const Share& share, const Device& device, int rows, std::int64_t slices) {
  std::int64_t all = 0;
  for (int groups = share.units / kHalfUnits; groups > 0; groups -= C::kGroups) {
    all += slices * ceil_div((groups < C::kGroups ? groups : C::kGroups) * C::kGates, 2);
  }
  const auto needed = static_cast<std::int64_t>(AlternatingShared<C>::bytes(rows, share.units, 0));
  const std::int64_t left = device.shared_bytes - needed, fit = left < 0 ? -1 : left / (C::kWarps * kStageBytes);
  return static_cast<int>(all < fit ? all : fit);
}

template <class C>
cudaError_t launch_streaming(const Params& params, const Device& device, void* workspace, cudaStream_t stream) {
  const Tensors t = tensors_of(params, kSpinLimit);
  Share share{divide<C>(t, device)};
  const std::int64_t slices = num_slices<C>(t, C::kWarps * kSliceBytes);
  const int rows = share.range_rows < C::kRows ? share.range_rows : C::kRows;
  share.resident = resident_stages<C>(share, device, rows, slices);
  if (share.resident < 0 || !pays<C>(t, device, share, kStreamingCost, slices)) return cudaErrorInvalidConfiguration;
  const std::size_t shared = AlternatingShared<C>::bytes(rows, share.units, share.resident);
  return launch_groups<C>(alternating_kernel<C>, shared, params, device, t, share, workspace, stream);
}

template <class C>
cudaError_t launch_tiled(const Params& params, const Device& device, void* workspace, cudaStream_t stream) {
  const Tensors t = tensors_of(params, kSpinLimit);
  Share share{divide<C>(t, device)};
  const auto most = static_cast<std::size_t>(device.shared_bytes);
  share.slots = C::kMostSlots;
  while (share.slots > 1 && TiledShared<C>::bytes(share.slots, share.units) > most) --share.slots;
  const std::int64_t slices = num_slices<C>(t, C::kSliceStride);
  if (share.slots < 2 || !pays<C>(t, device, share, kTiledCost, slices)) return cudaErrorInvalidConfiguration;
  const std::size_t shared = TiledShared<C>::bytes(share.slots, share.units);
  return launch_groups<C>(tiled_kernel<C>, shared, params, device, t, share, workspace, stream);
}

// More rows of the batch in a tile read R fewer times, and take the registers and the shared memory that could hold R.
template <Cell kCell>
cudaError_t launch_float32(const Params& p, const Device& device, void* workspace, cudaStream_t stream) {
  constexpr DType kType = DType::kFloat32;
  if (p.B == 1) return launch_streaming<Streaming<kCell, kType, 8, 1, 5>>(p, device, workspace, stream);
  if (p.B <= 4) return launch_streaming<Streaming<kCell, kType, 8, 4, 1>>(p, device, workspace, stream);
  return launch_streaming<Streaming<kCell, kType, 4, 8, 0>>(p, device, workspace, stream);
}

// With few rows R is streamed by warps that each have a part of D for themselves. Where a block of theirs would run
// through D several times in a step, tiles that all warps share are faster.
template <Cell kCell, DType kType>
cudaError_t launch_16_bit(const Params& p, const Device& device, void* workspace, cudaStream_t stream) {
  constexpr int kHeld = num_gates(kCell) == 1 ? 3 : 5;  // as many as registers hold
  using Few = Streaming<kCell, kType, 8, 8, kHeld>;
  using Some = Streaming<kCell, kType, 8, 16, 0>;
  using Many = Streaming<kCell, kType, 4, 32, 0>;
  const Tensors t = tensors_of(p, kSpinLimit);
  cudaError_t error = cudaErrorInvalidConfiguration;
  if (p.B <= Few::kRows) return launch_streaming<Few>(p, device, workspace, stream);
  if (p.B <= Some::kRows) {
    if (turns<Some>(divide<Some>(t, device)) > 2) {
      error = launch_tiled<Tiled<kCell, kType, 16>>(p, device, workspace, stream);
    }
    return error == cudaErrorInvalidConfiguration ? launch_streaming<Some>(p, device, workspace, stream) : error;
  }
  if (turns<Many>(divide<Many>(t, device)) > 1) {
    if (p.B > 32) error = launch_tiled<Tiled<kCell, kType, 64>>(p, device, workspace, stream);
    if (error == cudaErrorInvalidConfiguration) {
      error = launch_tiled<Tiled<kCell, kType, 32>>(p, device, workspace, stream);
    }
  }
  return error == cudaErrorInvalidConfiguration ? launch_streaming<Many>(p, device, workspace, stream) : error;
}

template <Cell kCell, DType kType>
cudaError_t launch_all_steps(const Params& p, const Device& device, void* workspace, cudaStream_t stream) {
  if constexpr (kType == DType::kFloat32) {
    return launch_float32<kCell>(p, device, workspace, stream);
  } else {
    return launch_16_bit<kCell, kType>(p, device, workspace, stream);
  }
}

template <DType kType>
cudaError_t launch_all_steps(const Params& p, const Device& device, void* workspace, cudaStream_t stream) {
  switch (p.cell) {
    case Cell::kLstm:
      return launch_all_steps<Cell::kLstm, kType>(p, device, workspace, stream);
    case Cell::kGru:
      return launch_all_steps<Cell::kGru, kType>(p, device, workspace, stream);
    case Cell::kElman:
      return launch_all_steps<Cell::kElman, kType>(p, device, workspace, stream);
    case Cell::kSlstm:
      return launch_all_steps<Cell::kSlstm, kType>(p, device, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flashrnn::cuda
