// How a call of the alternating mode is divided over the device, and its launches.
#pragma once

#include <cmath>

#include "alternating.h"
#include "alternating_kernel.cuh"
#include "launch.h"

namespace flashrnn::cuda {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// Blocks share the units of a head first, which divides R too, and then the batch.
template <class C>
Share share_of(const Tensors& t, const Device& device) {
  Share share{};
  const std::int64_t heads = static_cast<std::int64_t>(t.N) * t.H;
  const int unit_groups = ceil_div(t.D, kHalfUnits), tiles = ceil_div(t.B, C::kRows);
  const auto places = [&](std::int64_t taken) { return static_cast<int>(device.processors / taken); };
  const int each = ceil_div(unit_groups, clamp(places(heads), 1, unit_groups));
  share.units = each * kHalfUnits;
  share.unit_blocks = ceil_div(unit_groups, each);
  const int tiles_each = ceil_div(tiles, clamp(places(heads * share.unit_blocks), 1, tiles));
  share.ranges = ceil_div(tiles, tiles_each);
  share.range_rows = tiles_each * C::kRows < t.B ? tiles_each * C::kRows : t.B;
  return share;
}

// Slices of D of one warp.
template <class C>
std::int64_t num_slices(const Tensors& t) {
  constexpr int kBytes = C::kWarps * kSliceBytes;
  return (static_cast<std::int64_t>(t.D) * static_cast<int>(sizeof(Element<C::kType>)) + kBytes - 1) / kBytes;
}

// Whether a step is faster than by one kernel per step, which reads R from memory but has all rows of the batch in
// flight. Both sides are us on an H200, fitted to two dozen layers within a third; a block takes its tiles of the batch
// and its passes one after the other, each with the latency of h from L2 for every slice.
template <class C>
bool pays(const Tensors& t, const Share& share, const Device& device) {
  const int passes = ceil_div(share.units / kHalfUnits, C::kGroups), tiles = ceil_div(share.range_rows, C::kRows);
  const double groups = static_cast<double>(t.N) * t.H * share.ranges;
  const double launches = ceil(groups * share.unit_blocks / device.processors);
  const double ours = 1.5 + launches * tiles * passes * (1.0 + 0.7 * static_cast<double>(num_slices<C>(t)));
  const double weights = static_cast<double>(t.N) * t.H * t.D * t.D * C::kGates * 132 / device.processors;
  const double arithmetic = weights * t.B / 8e6, memory = weights * sizeof(Element<C::kType>) / 4e6;
  return ours < 4.0 + (arithmetic > memory ? arithmetic : memory);
}

// Bytes of shared memory with so many stages of each warp that stay.
template <class C>
std::size_t shared_bytes(const Share& share, int resident) {
  return AlternatingShared<C>::bytes(share.range_rows < C::kRows ? share.range_rows : C::kRows, share.units, resident);
}

// Stages of a warp that stay in shared memory, negative where not even the rest fits.
template <class C>
int resident_stages(const Tensors& t, const Share& share, const Device& device) {
  const std::int64_t slices = num_slices<C>(t);
  std::int64_t all = 0;
  for (int groups = share.units / kHalfUnits; groups > 0; groups -= C::kGroups) {
    all += slices * ceil_div((groups < C::kGroups ? groups : C::kGroups) * C::kGates, 2);
  }
  const std::int64_t left = device.shared_bytes - static_cast<std::int64_t>(shared_bytes<C>(share, 0));
  const std::int64_t fit = left < 0 ? -1 : left / (C::kWarps * kStageBytes);
  return static_cast<int>(all < fit ? all : fit);
}

// The rounded initial h, the running states in their place, and nobody has arrived.
template <class E>
__global__ void start(Tensors t, int states, E* h, std::uint32_t* arrivals, int groups) {
  const std::int64_t width = static_cast<std::int64_t>(t.H) * t.D, all = t.N * t.B * width;
  const std::int64_t first = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (first < groups) arrivals[first * kArrivalStride] = 0;
  for (std::int64_t i = first; i < all; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const std::int64_t unit = i % t.D, head = i / t.D % t.H, row = i / width % t.B, n = i / width / t.B;
    h[((n * t.H + head) * t.B + row) * t.D + unit] = from_float<E>(t.initial_states[i]);
    for (int s = 0; s < states; ++s) t.final_states[s * all + i] = t.initial_states[s * all + i];
  }
}

template <class C>
cudaError_t launch_streaming(const Params& params, const Device& device, void* workspace, cudaStream_t stream) {
  using E = Element<C::kType>;
  Tensors t = tensors_of(params, kSpinLimit);
  Share share = share_of<C>(t, device);
  share.resident = resident_stages<C>(t, share, device);
  if (share.resident < 0 || !pays<C>(t, share, device)) return cudaErrorInvalidConfiguration;
  share.arrivals = static_cast<std::uint32_t*>(workspace);
  for (int i = 0; i < 2; ++i) {
    share.hidden[i] = static_cast<char*>(workspace) + kArrivalBytes + i * hidden_bytes(params);
  }
  const std::size_t shared = shared_bytes<C>(share, share.resident);
  const auto kernel = alternating_kernel<C>;
  const int bytes = static_cast<int>(shared);
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
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
  const std::int64_t elements = params.N * params.B * params.H * params.D;
  const unsigned start_blocks =
      static_cast<unsigned>(clamp(static_cast<int>(elements / 256 < 1024 ? elements / 256 : 1024), 2, 1024));
  for (std::int64_t first = 0; first < groups; first += most) {
    const int count = static_cast<int>(groups - first < most ? groups - first : most);
    if (first == 0) {
      start<E><<<start_blocks, 256, 0, stream>>>(t, num_states(C::kCell), static_cast<E*>(share.hidden[0]),
                                                 share.arrivals, kMostGroups);
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

// More rows of the batch in a tile read R fewer times, and take the registers and the shared memory that could hold R.
template <Cell kCell, DType kType>
cudaError_t launch_streaming(const Params& p, const Device& device, void* workspace, cudaStream_t stream) {
  if constexpr (kType == DType::kFloat32) {
    if (p.B == 1) return launch_streaming<Streaming<kCell, kType, 8, 1, 5>>(p, device, workspace, stream);
    if (p.B <= 4) return launch_streaming<Streaming<kCell, kType, 8, 4, 1>>(p, device, workspace, stream);
    return launch_streaming<Streaming<kCell, kType, 4, 8, 0>>(p, device, workspace, stream);
  } else {
    constexpr int kHeld = num_gates(kCell) == 1 ? 3 : 5;  // as many as registers hold
    if (p.B <= 8) return launch_streaming<Streaming<kCell, kType, 8, 8, kHeld>>(p, device, workspace, stream);
    if (p.B <= 16) return launch_streaming<Streaming<kCell, kType, 8, 16, 0>>(p, device, workspace, stream);
    return launch_streaming<Streaming<kCell, kType, 4, 32, 0>>(p, device, workspace, stream);
  }
}

template <DType kType>
cudaError_t launch_streaming(const Params& p, const Device& device, void* workspace, cudaStream_t stream) {
  switch (p.cell) {
    case Cell::kLstm:
      return launch_streaming<Cell::kLstm, kType>(p, device, workspace, stream);
    case Cell::kGru:
      return launch_streaming<Cell::kGru, kType>(p, device, workspace, stream);
    case Cell::kElman:
      return launch_streaming<Cell::kElman, kType>(p, device, workspace, stream);
    case Cell::kSlstm:
      return launch_streaming<Cell::kSlstm, kType>(p, device, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flashrnn::cuda
