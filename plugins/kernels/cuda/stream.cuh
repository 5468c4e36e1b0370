// A lane's way through wx and y: from one time step to the next, forward or backward.
//
// kWide, here and in the kernels: vectors are aligned. Kernels hold both loops, since a branch in every step costs
// more.
#pragma once

#include "tile.cuh"

namespace flashrnn::cuda {

template <class C>
struct WxStream {
  const char* at[C::kOwnedColumns];  // wx of the lane's first unit and of column e, at the time to be read next
  std::int64_t stride;               // bytes
  bool active[C::kOwned][C::kOwnedColumns];
  int units;  // of the head, from the lane's first one on

  __device__ __forceinline__ WxStream(const Tensors& t, const Place& place, const Lane<C>& lane) {
    const bool backward = runs_backward(t, place.part / t.H);
    const int unit = place.first_unit + lane.unit(lane.owned_group(0));
    units = t.D - unit;
    stride = (backward ? -2 : 2) * t.wx_step;
#pragma unroll
    for (int e = 0; e < C::kOwnedColumns; ++e) {
      const int row = place.first_row + lane.row(e);
      at[e] = static_cast<const char*>(t.wx) + 2 * ((backward ? t.T - 1 : 0) * t.wx_step + row * t.wx_row +
                                                    (static_cast<std::int64_t>(place.part) * t.D + unit) * C::kGates);
#pragma unroll
      for (int i = 0; i < C::kOwned; ++i) {
        active[i][e] = lane.owns(i) && lane.has_row() && row < t.B && units > i * kUnitsApart;
      }
    }
  }

  __device__ __forceinline__ const char* piece(int i, int e, int p) const {
    return at[e] + i * kUnitsApart * C::kGates * 2 + p * C::kPieceBytes;
  }
  // One 4-byte word from single elements, where head_dim is odd or wx is misaligned.
  __device__ __forceinline__ std::uint32_t narrow_word(int i, int e, int word) const {
    const std::uint16_t* elements = reinterpret_cast<const std::uint16_t*>(piece(i, e, 0)) + 2 * word;
    const int inside = (units - i * kUnitsApart) * C::kGates - 2 * word;
    const std::uint32_t low = inside > 0 ? __ldg(elements) : 0u, high = inside > 1 ? __ldg(elements + 1) : 0u;
    return low | high << 16;
  }
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int e = 0; e < C::kOwnedColumns; ++e) at[e] += stride;
  }

  static constexpr int kUnitsApart = C::kKWarps * C::kPacked * C::Tile::kUnits;  // from one owned group to the next
};

template <class C>
struct YStream {
  std::uint16_t* at[C::kOwnedColumns];
  std::int64_t stride;  // elements
  bool active[C::kOwnedColumns];
  int units;

  __device__ __forceinline__ YStream(const Tensors& t, const Place& place, const Lane<C>& lane) {
    const bool backward = runs_backward(t, place.part / t.H);
    const int unit = place.first_unit + lane.unit(lane.owned_group(0));
    units = static_cast<int>(ptx::opaque(static_cast<std::uint32_t>(t.D - unit)));
    stride = (backward ? -1 : 1) * t.y_step;
#pragma unroll
    for (int e = 0; e < C::kOwnedColumns; ++e) {
      const int row = place.first_row + lane.row(e);
      active[e] = lane.has_row() && row < t.B && lane.owns(0);
      at[e] = static_cast<std::uint16_t*>(t.y) + (backward ? t.T - 1 : 0) * t.y_step + row * t.y_row +
              static_cast<std::int64_t>(place.part) * t.D + unit;
    }
  }

  // h of group i, rounded, its lane's units packed in a word; 0 behind the row's end.
  template <bool kWide>
  __device__ __forceinline__ void store(int i, int e, std::uint32_t word, bool valid) const {
    const int left = units - i * WxStream<C>::kUnitsApart;
    std::uint16_t* const to = at[e] + i * WxStream<C>::kUnitsApart;
    word = valid ? word : 0u;
    if constexpr (kWide && C::kUnitsPerLane == 2) {
      ptx::store_global_4_if(active[e] && left > 0, to, word);
    } else {
      ptx::store_global_2_if(active[e] && left > 0, to, static_cast<std::uint16_t>(word));
      if (C::kUnitsPerLane == 2) {
        ptx::store_global_2_if(active[e] && left > 1, to + 1, static_cast<std::uint16_t>(word >> 16));
      }
    }
  }
  // The same, by predicates in place of two loops.
  __device__ __forceinline__ void store_any(bool wide, int i, int e, std::uint32_t word, bool valid) const {
    const int left = units - i * WxStream<C>::kUnitsApart;
    std::uint16_t* const to = at[e] + i * WxStream<C>::kUnitsApart;
    const bool pair = C::kUnitsPerLane == 2 && wide;
    word = valid ? word : 0u;
    if (C::kUnitsPerLane == 2) ptx::store_global_4_if(active[e] && left > 0 && pair, to, word);
    ptx::store_global_2_if(active[e] && left > 0 && !pair, to, static_cast<std::uint16_t>(word));
    if (C::kUnitsPerLane == 2) {
      ptx::store_global_2_if(active[e] && left > 1 && !pair, to + 1, static_cast<std::uint16_t>(word >> 16));
    }
  }
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int e = 0; e < C::kOwnedColumns; ++e) at[e] += stride;
  }
};

// The words of wx that a lane needs in a step.
template <class C>
using WxWords = std::uint32_t[C::kOwned][C::kOwnedColumns][C::kWords];

// From shared memory; at(i, e, p) is the address of piece p of group i and column e.
template <class C, class Address>
__device__ __forceinline__ void load_wx(WxWords<C>& words, Address&& at) {
#pragma unroll
  for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
    for (int e = 0; e < C::kOwnedColumns; ++e) {
#pragma unroll
      for (int p = 0; p < C::kPieces; ++p) {
        if constexpr (C::kPieceBytes == 8) {
          const uint2 v = ptx::load_shared_8(at(i, e, p));
          words[i][e][2 * p] = v.x, words[i][e][2 * p + 1] = v.y;
        } else {
          words[i][e][p] = ptx::load_shared_4(at(i, e, p));
        }
      }
    }
  }
}

// Rounded h of group i and column e, the lane's units in one word.
template <class C>
__device__ __forceinline__ std::uint32_t hidden_word(const Owned<C>& owned, int i, int e) {
  return pack<C::kType>(owned.state[i][0][e][0],
                        C::kUnitsPerLane == 2 ? owned.state[i][C::kUnitsPerLane - 1][e][0] : 0.0f);
}

}  // namespace flashrnn::cuda
