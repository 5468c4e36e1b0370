// The local mode: a block keeps one head's R in registers and a tile of the batch to itself; one barrier per step.
//
// The feed of wx decides the speed. Registers filled kRing steps ahead, behind prefetches into L2: 0.17 to 0.21 us per
// step at D = 64. Tried and lost: cp.async of the lane's own pieces 0.33.
#pragma once

#include "stream.cuh"

namespace flashrnn::cuda {

inline constexpr int kPrefetchSteps = 12;  // of wx into L2, ahead of the registers

template <class C>
struct LocalShared {
  static constexpr int kBytes = 2 * C::kHiddenBytes;
};

template <class C>
using WxWords = std::uint32_t[C::kOwned][C::kColumns][C::kWords];

template <bool kWide, class C>
__device__ __forceinline__ void load_wx(WxWords<C>& words, const WxStream<C>& wx, bool wanted) {
#pragma unroll
  for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
    for (int e = 0; e < C::kColumns; ++e) {
      const bool active = wanted && wx.active[i][e];
      if constexpr (kWide) {
#pragma unroll
        for (int p = 0; p < C::kPieces; ++p) {
          if constexpr (C::kPieceBytes == 8) {
            ptx::load_global_8_if(active, words[i][e][2 * p], words[i][e][2 * p + 1], wx.piece(i, e, p));
          } else {
            ptx::load_global_4_if(active, words[i][e][p], wx.piece(i, e, p));
          }
        }
      } else if (active) {
#pragma unroll
        for (int w = 0; w < C::kWords; ++w) words[i][e][w] = wx.narrow_word(i, e, w);
      }
    }
  }
}

// Touches every 32-byte sector of the tile's wx, one per thread and round.
template <class C>
struct WxPrefetch {
  static constexpr int kSectors = C::kD * C::kGates * 2 / 32;  // of a row
  static constexpr int kRounds = (C::kRows * kSectors + C::kThreads - 1) / C::kThreads;
  const char* at[kRounds];
  bool active[kRounds];
  std::int64_t stride;

  __device__ __forceinline__ WxPrefetch(const Tensors& t, const Place& place) {
    const bool backward = runs_backward(t, place.part / t.H);
    stride = (backward ? -2 : 2) * t.wx_step;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int sector = static_cast<int>(threadIdx.x) + i * C::kThreads;
      const int row = place.first_row + sector / kSectors, byte = sector % kSectors * 32;
      active[i] = sector < C::kRows * kSectors && row < t.B && byte < t.D * C::kGates * 2;
      at[i] = static_cast<const char*>(t.wx) +
              2 * ((backward ? t.T - 1 : 0) * t.wx_step + row * t.wx_row +
                   static_cast<std::int64_t>(place.part) * t.D * C::kGates) + byte;
    }
  }
  __device__ __forceinline__ void touch_and_advance(bool wanted) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (wanted && active[i]) ptx::prefetch_l2(at[i]);
      at[i] += stride;
    }
  }
};

template <bool kWide, class C>
__device__ __forceinline__ void local_loop(const Tensors& t, char* shared) {
  const Lane<C> lane;
  const Place place = place_of<C>(t);
  const std::uint32_t hidden = ptx::shared_address(shared);
  const std::uint32_t from = ptx::opaque(hidden + hidden_offset<C>(lane));
  const std::uint32_t to = ptx::opaque(hidden + lane.row(0) * C::kPitch + lane.unit(0) * 2);

  WxPrefetch<C> prefetch(t, place);
  for (int s = 0; s < kPrefetchSteps; ++s) prefetch.touch_and_advance(s < t.T);
  WxStream<C> wx(t, place, lane);
  WxWords<C> words[C::kRing] = {};  // 0 for rows and units outside the tensors
#pragma unroll
  for (int r = 0; r < C::kRing; ++r) {
    load_wx<kWide, C>(words[r], wx, r < t.T);
    wx.advance();
  }
  Weights<C> weights;
  load_weights<C>(weights, t, place, lane, nullptr);
  Owned<C> owned;
  owned.load(t, place, lane);
  store_initial_hidden<C>(t, place, shared);
  YStream<C> y(t, place, lane);
  const bool backward = runs_backward(t, place.part / t.H);
  __syncthreads();

  const auto step = [&](int s, int slot) {  // slot = s % kRing, a constant
    const int time = backward ? t.T - 1 - s : s;
    Sums<C> sums;
#pragma unroll
    for (int i = 0; i < C::kGroups; ++i) owned.start(sums[i], words[slot][i], i);
    Hidden<C> h;
    load_hidden<C>(h, from + slot % 2 * C::kHiddenBytes, lane);
    multiply<C>(sums, weights, h);
    std::uint32_t rounded[C::kGroups][C::kColumns];
#pragma unroll
    for (int i = 0; i < C::kGroups; ++i) {
      owned.advance(sums[i], words[slot][i], i, time, t.options);
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) {
        rounded[i][e] = hidden_word<C>(owned, i, e);
        const std::uint32_t at = to + (1 - slot % 2) * C::kHiddenBytes + e * C::kPitch + i * C::Tile::kUnits * 2;
        if (!lane.has_row()) continue;
        if (C::kUnitsPerLane == 2) {
          ptx::store_shared_4(at, rounded[i][e]);
        } else {
          ptx::store_shared_2(at, static_cast<std::uint16_t>(rounded[i][e]));
        }
      }
    }
    load_wx<kWide, C>(words[slot], wx, s + C::kRing < t.T);
    wx.advance();
    prefetch.touch_and_advance(s + kPrefetchSteps < t.T);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < C::kGroups; ++i) {
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) y.template store<kWide>(i, e, rounded[i][e], time < owned.length[e]);
    }
    y.advance();
  };
  for (int s = 0; s < t.T; s += C::kRing) {
#pragma unroll
    for (int slot = 0; slot < C::kRing; ++slot) {
      if (s + slot < t.T) step(s + slot, slot);
    }
  }
  owned.store(t, place, lane);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) local_kernel(const __grid_constant__ Tensors t) {
  static_assert(C::kKWarps == 1 && C::kRegisterKSteps == C::kKSteps, "all of R in registers, D not split");
  static_assert(C::kRing == 2 || C::kRing == 4, "ring_depth is 2 or 4 in the local mode");
  extern __shared__ __align__(16) char shared[];
  if (t.wide_wx && t.wide_y) {
    local_loop<true, C>(t, shared);
  } else {
    local_loop<false, C>(t, shared);
  }
}

}  // namespace flashrnn::cuda
