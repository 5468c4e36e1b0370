// What kernels that share a head among blocks have in common: the ring of wx, the sums of warps that split D, and the
// messages that carry h.
#pragma once

#include "stream.cuh"

namespace flashrnn::cuda {

// wx in shared memory, kRing steps deep: a lane's own copies, which no other lane reads.
template <class C>
struct WxRing {
  static constexpr int kPieceStride = C::kThreads * C::kPieceBytes;
  static constexpr int kStageBytes = C::kOwned * C::kOwnedColumns * C::kPieces * kPieceStride;
  static constexpr int kBytes = C::kRing * kStageBytes;
  std::uint32_t base, fill = 0, read = 0;

  // `shared` is the address of kBytes bytes.
  __device__ __forceinline__ WxRing(std::uint32_t shared, const Lane<C>& lane)
      : base(ptx::opaque(shared + static_cast<std::uint32_t>(lane.thread) * C::kPieceBytes)) {
    for (int p = 0; p < kBytes / kPieceStride; ++p) {  // rows and units outside the tensors
      for (int w = 0; w < C::kPieceBytes / 4; ++w) ptx::store_shared_4(base + p * kPieceStride + 4 * w, 0);
    }
  }
  __device__ __forceinline__ static std::uint32_t slot(int i, int e, int p) {
    return static_cast<std::uint32_t>(((i * C::kOwnedColumns + e) * C::kPieces + p) * kPieceStride);
  }
  __device__ __forceinline__ static void next(std::uint32_t& stage) {
    stage += kStageBytes;
    if (stage == C::kRing * kStageBytes) stage = 0;
  }

  template <bool kWide>
  __device__ __forceinline__ void fill_next(WxStream<C>& wx, bool wanted) {
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
      for (int e = 0; e < C::kOwnedColumns; ++e) {
        const bool active = wanted && wx.active[i][e];
        if constexpr (kWide) {
#pragma unroll
          for (int p = 0; p < C::kPieces; ++p) {
            ptx::copy_async_if<C::kPieceBytes>(active, base + fill + slot(i, e, p), wx.piece(i, e, p));
          }
        } else if (active) {
#pragma unroll
          for (int w = 0; w < C::kWords; ++w) {
            constexpr int kPieceWords = C::kPieceBytes / 4;
            ptx::store_shared_4(base + fill + slot(i, e, w / kPieceWords) + w % kPieceWords * 4,
                                wx.narrow_word(i, e, w));
          }
        }
      }
    }
    wx.advance();
    next(fill);
    ptx::commit_copies();
  }

  __device__ __forceinline__ void take(WxWords<C>& words) {
    ptx::wait_copies<C::kRing - 1>();
    load_wx<C>(words, [&](int i, int e, int p) { return base + read + slot(i, e, p); });
    next(read);
  }
};

// Partial sums where D is split: per row warp, part (a group, or a column of one) and source, in vectors of kVector
// floats per lane. Warp p % kKWarps does the pointwise part of part p.
template <class C>
struct Parts {
  static constexpr int kParts = C::kGroups * C::kSplit;  // the groups' first columns, then the second ones
  static constexpr int kFloats = 2 * C::kTiles * C::kOwnedColumns;
  static constexpr int kVector = kFloats % 4 == 0 ? 4 : 2;
  static constexpr int kBytes = C::kKWarps > 1 ? C::kRowWarps* kParts* C::kKWarps* kFloats * 128 : 0;
};

// Adds up the parts of D that the warps of one row share; each ends up with the sums of the parts it owns.
template <class C>
__device__ __forceinline__ void reduce_parts(float (&own)[C::kOwned][C::kTiles][4], const Sums<C>& sums, char* parts,
                                             const Lane<C>& lane) {
  using S = Parts<C>;
  constexpr int kVectors = S::kFloats / S::kVector;
  struct __align__(4 * S::kVector) Vector {
    float v[S::kVector];
  };
  Vector* const mine = reinterpret_cast<Vector*>(parts) + lane.row_warp * S::kParts * C::kKWarps * kVectors * 32;
  const auto at = [](int i) { return C::kOwnedColumns == 2 ? i : 2 * i; };  // the i-th float in use of 4 * kTiles
#pragma unroll
  for (int p = 0; p < S::kParts; ++p) {
    const bool owned = p % C::kKWarps == lane.k_warp;
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      Vector out;
#pragma unroll
      for (int i = 0; i < S::kVector; ++i) {
        const int f = at(n * S::kVector + i);
        out.v[i] = sums[p % C::kGroups][f / 4][f % 4 + p / C::kGroups];
        if (owned) own[p / C::kKWarps][f / 4][f % 4] += out.v[i];
      }
      if (!owned) mine[((p * C::kKWarps + lane.k_warp) * kVectors + n) * 32 + lane.lane] = out;
    }
  }
  ptx::named_barrier<32 * C::kKWarps>(1 + lane.row_warp);
#pragma unroll
  for (int i = 0; i < C::kOwned; ++i) {
    if (!lane.owns(i)) continue;
#pragma unroll
    for (int w = 1; w < C::kKWarps; ++w) {
      const int source = (lane.k_warp + w) % C::kKWarps;
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        const Vector in =
            mine[(((lane.k_warp + i * C::kKWarps) * C::kKWarps + source) * kVectors + n) * 32 + lane.lane];
#pragma unroll
        for (int k = 0; k < S::kVector; ++k) {
          const int f = at(n * S::kVector + k);
          own[i][f / 4][f % 4] += in.v[k];
        }
      }
    }
  }
}

// The rounded h of one group, the rows of one warp, as messages of 16 bytes: message m of kMessages is 8 units of the
// m % kOwnedRows-th of the rows.
template <class C>
inline constexpr int kMessages = C::kOwnedRows * C::kUnitsPerLane;

// Row of a message inside the tile, and its first unit inside the block, of the warp's first group.
template <class C>
__device__ __forceinline__ int message_row(const Lane<C>& lane, int message) {
  return lane.tile_row(message % C::kOwnedRows);
}
template <class C>
__device__ __forceinline__ int message_unit(const Lane<C>& lane, int message) {
  return lane.group_unit(lane.owned_group(0)) + message / C::kOwnedRows * 8;
}

// A message from the lanes that hold it, words[e] being what hidden_word gave.
template <class C>
__device__ __forceinline__ uint4 gather(const std::uint32_t (&words)[C::kOwnedColumns], int message) {
  const int row = message % C::kOwnedRows;
  std::uint32_t out[4];
  if constexpr (C::kUnitsPerLane == 1) {  // transposed, row g of the lanes is a column of the tile
    const std::uint32_t pair =
        C::kOwnedColumns == 2 ? __byte_perm(words[0], words[C::kOwnedColumns - 1], 0x5410) : words[0];
    const std::uint32_t units = ptx::transpose(pair);
    const int first = (C::kOwnedColumns == 1 ? 2 * row : row) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = __shfl_sync(~0u, units, first + i);
  } else {
    const int first = message / C::kOwnedRows * 16 + row / C::kOwnedColumns;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = __shfl_sync(~0u, words[0], first + 4 * i);
      if constexpr (C::kOwnedColumns == 2) {
        const std::uint32_t odd = __shfl_sync(~0u, words[1], first + 4 * i);
        out[i] = row % 2 != 0 ? odd : out[i];
      }
    }
  }
  return {out[0], out[1], out[2], out[3]};
}

// R h on top of what `own` starts from: the sums of the groups that a warp owns. `parts` is Parts<C>::kBytes of shared
// memory that no step before this one uses still.
template <class C>
__device__ __forceinline__ void add_products(float (&own)[C::kOwned][C::kTiles][4], const Weights<C>& weights,
                                             const Hidden<C>& h, char* parts, const Lane<C>& lane) {
  if constexpr (C::kKWarps == 1) {
    multiply<C>(own, weights, h);
  } else {
    Sums<C> sums = {};
    multiply<C>(sums, weights, h);
    reduce_parts<C>(own, sums, parts, lane);
  }
}

// The rest of step s: the cell, h as messages to send(message, i), then y by store(i, e, word, valid).
template <class C, class Send, class Store>
__device__ __forceinline__ void finish_step(Owned<C>& owned, float (&own)[C::kOwned][C::kTiles][4],
                                            const WxWords<C>& words, const Lane<C>& lane, int message, int s,
                                            const CellOptions& options, Send&& send, Store&& store) {
#pragma unroll
  for (int i = 0; i < C::kOwned; ++i) {
    if (!lane.owns(i)) continue;
    float apart[C::kUnitsPerLane][C::kOwnedColumns];
    owned.keep_apart(apart, words[i], i);
    owned.advance(own[i], apart, i, s, options);
    std::uint32_t rounded[C::kOwnedColumns];
#pragma unroll
    for (int e = 0; e < C::kOwnedColumns; ++e) rounded[e] = hidden_word<C>(owned, i, e);
    send(gather<C>(rounded, message), i);
#pragma unroll
    for (int e = 0; e < C::kOwnedColumns; ++e) store(i, e, rounded[e], owned.is_valid(e, s));
  }
}

}  // namespace flashrnn::cuda
