// The cluster mode: the blocks of a cluster share one head's R, and hand h to each other through shared memory.
//
// Every block has all of h twice. A finished 16-byte piece goes to all blocks by st.async, whose bytes the receiver's
// barrier of that buffer counts; there is no other barrier per step. Nobody overwrites h that is still read: h(t + 2)
// can only be sent by a block that has all of h(t + 1), hence after every warp has used h(t).
#pragma once

#include "stream.cuh"

namespace flashrnn::cuda {

template <class C>
struct ClusterShared {
  static constexpr int kPieceStride = C::kThreads * C::kPieceBytes;
  static constexpr int kStageBytes = C::kOwned * C::kColumns * C::kPieces * kPieceStride;
  // Partial sums where D is split: per row warp, group and source, in vectors of kVector floats per lane.
  static constexpr int kFloats = 2 * C::kTiles * C::kColumns;
  static constexpr int kVector = kFloats % 4 == 0 ? 4 : 2;
  static constexpr int kPartBytes = C::kKWarps > 1 ? C::kRowWarps * C::kGroups * C::kKWarps * kFloats * 128 : 0;

  static constexpr int kHidden = 0;
  static constexpr int kRing = kHidden + 2 * C::kHiddenBytes;
  static constexpr int kParts = (kRing + C::kRing * kStageBytes + 15) / 16 * 16;
  static constexpr int kWeights = kParts + 2 * kPartBytes;
  static constexpr int kBarriers = kWeights + Weights<C>::kSharedBytes;
  static constexpr int kBytes = kBarriers + 16;
};

// wx in shared memory, kRing steps deep: a lane's own copies, which no other lane reads.
template <class C>
struct WxRing {
  using S = ClusterShared<C>;
  std::uint32_t base, fill = 0, read = 0;

  __device__ __forceinline__ WxRing(std::uint32_t shared, const Lane<C>& lane)
      : base(ptx::opaque(shared + S::kRing + static_cast<std::uint32_t>(lane.thread) * C::kPieceBytes)) {
    for (int p = 0; p < C::kRing * (S::kStageBytes / S::kPieceStride); ++p) {  // rows and units outside the tensors
      for (int w = 0; w < C::kPieceBytes / 4; ++w) ptx::store_shared_4(base + p * S::kPieceStride + 4 * w, 0);
    }
  }
  __device__ __forceinline__ static std::uint32_t slot(int i, int e, int p) {
    return static_cast<std::uint32_t>(((i * C::kColumns + e) * C::kPieces + p) * S::kPieceStride);
  }
  __device__ __forceinline__ static void next(std::uint32_t& stage) {
    stage += S::kStageBytes;
    if (stage == C::kRing * S::kStageBytes) stage = 0;
  }

  template <bool kWide>
  __device__ __forceinline__ void fill_next(WxStream<C>& wx, bool wanted) {
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) {
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

  __device__ __forceinline__ void take(std::uint32_t (&words)[C::kOwned][C::kColumns][C::kWords]) {
    ptx::wait_copies<C::kRing - 1>();
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) {
#pragma unroll
        for (int p = 0; p < C::kPieces; ++p) {
          if constexpr (C::kPieceBytes == 8) {
            const uint2 v = ptx::load_shared_8(base + read + slot(i, e, p));
            words[i][e][2 * p] = v.x, words[i][e][2 * p + 1] = v.y;
          } else {
            words[i][e][p] = ptx::load_shared_4(base + read + slot(i, e, p));
          }
        }
      }
    }
    next(read);
  }
};

// Adds up the parts of D that the warps of one row share; each ends up with the sums of the groups it owns.
template <class C>
__device__ __forceinline__ void reduce_parts(float (&own)[C::kOwned][C::kTiles][4], const Sums<C>& sums, char* parts,
                                             const Lane<C>& lane) {
  using S = ClusterShared<C>;
  constexpr int kVectors = S::kFloats / S::kVector;
  struct __align__(4 * S::kVector) Vector {
    float v[S::kVector];
  };
  Vector* const mine = reinterpret_cast<Vector*>(parts) + lane.row_warp * C::kGroups * C::kKWarps * kVectors * 32;
  const auto at = [](int i) { return C::kColumns == 2 ? i : 2 * i; };  // the i-th float in use of 4 * kTiles
#pragma unroll
  for (int p = 0; p < C::kGroups; ++p) {
    const bool owned = p % C::kKWarps == lane.k_warp;
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      Vector out;
#pragma unroll
      for (int i = 0; i < S::kVector; ++i) {
        const int f = at(n * S::kVector + i);
        out.v[i] = sums[p][f / 4][f % 4];
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
        const Vector in = mine[((lane.owned_group(i) * C::kKWarps + source) * kVectors + n) * 32 + lane.lane];
#pragma unroll
        for (int k = 0; k < S::kVector; ++k) {
          const int f = at(n * S::kVector + k);
          own[i][f / 4][f % 4] += in.v[k];
        }
      }
    }
  }
}

// Sends the rounded h of one group to every block. Message m of kMessages is 8 units of row m % kRows; lane l sends
// message l % kMessages to blocks l / kMessages, and so on.
template <class C>
struct Sender {
  static constexpr int kMessages = C::kRows * C::kUnitsPerLane;
  static constexpr int kBlocksAtOnce = 32 / kMessages;
  static constexpr int kRounds = (C::kClusterSize + kBlocksAtOnce - 1) / kBlocksAtOnce;
  std::uint32_t at[kRounds];        // at the receiver, of the lane's message of group 0 in the first buffer of h
  std::uint32_t barriers[kRounds];  // at the receiver
  bool active[kRounds];
  int message;

  __device__ __forceinline__ Sender(std::uint32_t shared, const Place& place, const Lane<C>& lane)
      : message(lane.lane % kMessages) {
    const int unit = place.first_unit + lane.group_unit(lane.owned_group(0)) + message / C::kRows * 8;
    const int offset = ClusterShared<C>::kHidden + message % C::kRows * C::kPitch + unit * 2;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int block = lane.lane / kMessages + i * kBlocksAtOnce;
      active[i] = block < C::kClusterSize;
      const std::uint32_t base = ptx::map_shared(shared, active[i] ? block : 0);
      at[i] = ptx::opaque(base + static_cast<std::uint32_t>(offset));
      barriers[i] = ptx::opaque(base + ClusterShared<C>::kBarriers);
    }
  }

  // The message from the lanes that hold it, words[e] being what hidden_word gave.
  __device__ __forceinline__ uint4 gather(const std::uint32_t (&words)[C::kColumns]) const {
    const int row = message % C::kRows;
    std::uint32_t out[4];
    if constexpr (C::kUnitsPerLane == 1) {  // transposed, row g of the lanes is a column of the tile
      const std::uint32_t pair = C::kColumns == 2 ? __byte_perm(words[0], words[C::kColumns - 1], 0x5410) : words[0];
      const std::uint32_t units = ptx::transpose(pair);
      const int first = (C::kColumns == 1 ? 2 * row : row) * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = __shfl_sync(~0u, units, first + i);
    } else {
      const int first = message / C::kRows * 16 + row / C::kColumns;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[i] = __shfl_sync(~0u, words[0], first + 4 * i);
        if constexpr (C::kColumns == 2) {
          const std::uint32_t odd = __shfl_sync(~0u, words[1], first + 4 * i);
          out[i] = row % 2 != 0 ? odd : out[i];
        }
      }
    }
    return {out[0], out[1], out[2], out[3]};
  }

  // `buffer` and `i`, the warp's i-th group, are constants.
  __device__ __forceinline__ void send(uint4 v, int i, int buffer, bool wanted) const {
    const int offset = buffer * C::kHiddenBytes + i * WxStream<C>::kUnitsApart * 2;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      ptx::send_16_if(wanted && active[r], at[r] + static_cast<std::uint32_t>(offset), v, barriers[r] + 8 * buffer);
    }
  }
};

template <bool kWide, class C>
__device__ __forceinline__ void cluster_loop(const Tensors& t, char* shared) {
  using S = ClusterShared<C>;
  constexpr std::uint32_t kStepBytes = C::kD * C::kRows * 2;  // of h that a block receives
  const Lane<C> lane;
  const Place place = place_of<C>(t);
  const std::uint32_t base = ptx::shared_address(shared), barriers = base + S::kBarriers;

  WxRing<C> ring(base, lane);
  WxStream<C> wx(t, place, lane);
  for (int s = 0; s < C::kRing; ++s) ring.template fill_next<kWide>(wx, s < t.T);
  if (lane.thread == 0) {
    for (int i = 0; i < 2; ++i) ptx::init_barrier(barriers + 8 * i);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (lane.thread == 0) {
    for (int i = 0; i < 2; ++i) ptx::expect_bytes(barriers + 8 * i, kStepBytes);
  }
  Weights<C> weights;
  load_weights<C>(weights, t, place, lane, shared + S::kWeights);
  Owned<C> owned;
  owned.load(t, place, lane);
  store_initial_hidden<C>(t, place, shared + S::kHidden);
  const Sender<C> sender(base, place, lane);
  YStream<C> y(t, place, lane);
  const bool arms = ptx::opaque(static_cast<std::uint32_t>(lane.thread)) == 0;
  const std::uint32_t from = ptx::opaque(base + S::kHidden + hidden_offset<C>(lane));
  ptx::cluster_barrier();  // barriers are armed before any block sends; also a barrier of the block

  float own[C::kOwned][C::kTiles][4] = {};
  const auto step = [&](int s, int buffer) {  // buffer = s % 2, a constant
    std::uint32_t words[C::kOwned][C::kColumns][C::kWords];
    ring.take(words);
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) owned.start(own[i], words[i], i);
    if (s > 0) {  // h(0) is there
      ptx::wait_barrier(barriers + 8 * buffer, static_cast<std::uint32_t>((s - 1) >> 1 & 1), t.spin_limit);
      if (arms) ptx::expect_bytes(barriers + 8 * buffer, kStepBytes);
    }
    Hidden<C> h;
    load_hidden<C>(h, from + buffer * C::kHiddenBytes);
    if constexpr (C::kKWarps == 1) {
      multiply<C>(own, weights, h);
    } else {
      Sums<C> sums = {};
      multiply<C>(sums, weights, h);
      reduce_parts<C>(own, sums, shared + S::kParts + buffer * S::kPartBytes, lane);
    }
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) {
      if (!lane.owns(i)) continue;
      float apart[C::kUnitsPerLane][C::kColumns];
      owned.keep_apart(apart, words[i], i);
      owned.advance(own[i], apart, i, s, t.options);
      std::uint32_t rounded[C::kColumns];
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) rounded[e] = hidden_word<C>(owned, i, e);
      sender.send(sender.gather(rounded), i, 1 - buffer, s + 1 < t.T);
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) y.template store<kWide>(i, e, rounded[e], owned.is_valid(e, s));
    }
    y.advance();
    ring.template fill_next<kWide>(wx, s + C::kRing < t.T);
  };
  int s = 0;
  for (; s + 2 <= t.T; s += 2) {
    step(s, 0);
    step(s + 1, 1);
  }
  if (s < t.T) step(s, 0);
  owned.store(t, place, lane);
  ptx::wait_copies<0>();
  ptx::cluster_barrier();  // no block leaves while another one may still send to it
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) cluster_kernel(const __grid_constant__ Tensors t) {
  static_assert(C::kRing >= 2, "wx is copied at least one step ahead");
  extern __shared__ __align__(16) char shared[];
  if (t.wide_wx && t.wide_y) {
    cluster_loop<true, C>(t, shared);
  } else {
    cluster_loop<false, C>(t, shared);
  }
}

}  // namespace flashrnn::cuda
