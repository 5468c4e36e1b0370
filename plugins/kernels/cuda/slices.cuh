// float32 on the FMA units: where a lane stands, its part of R, and the product.
//
// A lane multiplies kUnits units, all gates, with one of kSlices interleaved slices of D. Two units to a lane: h is
// read from shared memory once for every eight products of an LSTM, half of what the memory could deliver. In the grid
// mode, where D is large and a block has few units, all lanes of a warp share D.
#pragma once

#include "config.h"
#include "ptx.cuh"
#include "tensors.cuh"
#include "tile.cuh"

namespace flashrnn::cuda {

template <class C>
struct Fma {
  static constexpr int kUnits = C::kMode == Mode::kGrid ? C::kUnitsPerBlock / C::kWarps : fma_units(C::kGates);
  static constexpr int kSlices = C::kThreads * kUnits / C::kUnitsPerBlock;
  static constexpr int kWeightRows = kUnits * C::kGates;
  static constexpr int kItems = kUnits * C::kRows;      // (unit, row) pairs of the lanes that share D
  static constexpr int kCopies = kSlices / kItems;      // lanes that end up with the same pair
  static constexpr int kVectors = C::kD / kSlices / 4;  // of 4 floats, of one row of R, of one lane
  static constexpr int kHeld = C::kRegisterKSteps * 4 / kSlices;
  static constexpr int kRest = kVectors - kHeld;
  static constexpr int kWarpUnits = 32 / kSlices * kUnits;

  static constexpr int kSlotBytes = C::kGates * 4;  // of wx
  static constexpr int kStageBytes = C::kThreads * kSlotBytes;
  static constexpr int kHidden = 0;
  static constexpr int kRing = kHidden + 2 * C::kHiddenBytes;
  static constexpr int kWeights = kRing + C::kRing * kStageBytes;
  static constexpr int kBarriers = kWeights + kWeightRows * kRest * C::kThreads * 16;
  static constexpr int kBytes = kBarriers + 16;

  static_assert(32 % kSlices == 0 && kSlices * C::kUnitsPerBlock == C::kThreads * kUnits, "D is split inside a warp");
  static_assert(kItems <= kSlices, "one lane, one (unit, row) pair");
  static_assert(kVectors * kSlices * 4 == C::kD && kHeld * kSlices == C::kRegisterKSteps * 4, "vectors of 4 floats");
  static_assert(C::kMode != Mode::kCluster || kWarpUnits % 4 == 0, "h is sent in pieces of 16 bytes");
  static_assert(C::kRing >= 2, "wx is copied at least one step ahead");
};

// A lane's place: its slice of D and first unit in the product, and the pair whose step it computes.
template <class C>
struct FmaLane {
  using F = Fma<C>;
  int thread = static_cast<int>(ptx::opaque(threadIdx.x));
  int lane = thread % 32, warp = thread / 32;
  int slice = lane % F::kSlices;
  int first_unit = thread / F::kSlices * F::kUnits;
  int item = slice / F::kCopies, row = item % C::kRows, unit = first_unit + item / C::kRows;
  bool stores = slice % F::kCopies == 0;  // one of the lanes with the same pair
};

// Vector i of a row of R is elements 4 (i kSlices + slice) to + 3: neighbouring lanes read neighbouring vectors of h.
template <class C>
struct FmaWeights {
  using F = Fma<C>;
  float4 held[F::kWeightRows][F::kHeld > 0 ? F::kHeld : 1];
  std::uint32_t rest;  // shared address of this lane's part, [row][vector][thread]

  __device__ __forceinline__ FmaWeights(const Tensors& t, const Place& place, const FmaLane<C>& lane, char* shared) {
    float4* const to = reinterpret_cast<float4*>(shared) + lane.thread;
    rest = ptx::shared_address(to);
#pragma unroll
    for (int row = 0; row < F::kWeightRows; ++row) {
      const int unit = place.first_unit + lane.first_unit + row / C::kGates;
      const float* const from =
          static_cast<const float*>(t.r) + weight_offset(t, C::kGates, row % C::kGates, place.part, unit);
#pragma unroll
      for (int i = 0; i < F::kVectors; ++i) {
        const float4 v = unit < t.D ? read(t, from, 4 * (i * F::kSlices + lane.slice)) : float4{};
        if (i < F::kHeld) {
          held[row][i < F::kHeld ? i : 0] = v;
        } else {
          to[(row * F::kRest + i - F::kHeld) * C::kThreads] = v;
        }
      }
    }
  }

  __device__ __forceinline__ float4 at(int row, int i) const {
    if (i < F::kHeld) return held[row][i < F::kHeld ? i : 0];
    return load_floats(rest + (row * F::kRest + i - F::kHeld) * C::kThreads * 16);
  }

  __device__ __forceinline__ static float4 load_floats(std::uint32_t address) {
    const uint4 v = ptx::load_shared_16(address);
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
  }

 private:
  // Elements k to k + 3 of a row; zeros behind its end.
  __device__ __forceinline__ static float4 read(const Tensors& t, const float* from, int k) {
    if (t.wide_r) return k < t.D ? __ldg(reinterpret_cast<const float4*>(from + k)) : float4{};
    const auto element = [&](int i) { return k + i < t.D ? __ldg(from + k + i) : 0.0f; };
    return {element(0), element(1), element(2), element(3)};
  }
};

template <class C>
using FmaSums = float[Fma<C>::kItems][C::kGates];

// R h for the lane's units and slice of D; `hidden` is the address of its first vector.
template <class C>
__device__ __forceinline__ void multiply_slice(FmaSums<C>& sums, const FmaWeights<C>& weights, std::uint32_t hidden) {
  using F = Fma<C>;
#pragma unroll
  for (int i = 0; i < F::kVectors; ++i) {
    float4 h[C::kRows];
#pragma unroll
    for (int b = 0; b < C::kRows; ++b) {
      h[b] = FmaWeights<C>::load_floats(hidden + b * C::kPitch + i * F::kSlices * 16);
    }
#pragma unroll
    for (int row = 0; row < F::kWeightRows; ++row) {
      const float4 w = weights.at(row, i);
#pragma unroll
      for (int b = 0; b < C::kRows; ++b) {
        float& sum = sums[row / C::kGates * C::kRows + b][row % C::kGates];
        sum = fmaf(w.x, h[b].x, sum);
        sum = fmaf(w.y, h[b].y, sum);
        sum = fmaf(w.z, h[b].z, sum);
        sum = fmaf(w.w, h[b].w, sum);
      }
    }
  }
}

}  // namespace flashrnn::cuda
