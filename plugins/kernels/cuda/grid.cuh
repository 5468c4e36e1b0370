// The grid mode: blocks all over the device share one head's R, and hand h to each other through the L2 cache.
//
// All blocks of a launch are resident at once (a cooperative launch), one per multiprocessor. A warp polls the part of
// h that its share of R multiplies, and what it polls is already the operand of its products: nothing is staged, and no
// barrier but that of the sums of D meets in a step. packets.cuh says why a poll can trust what it sees.
#pragma once

#include "packets.cuh"

namespace flashrnn::cuda {

template <class C>
struct GridShared {
  static constexpr int kRing = 0;
  static constexpr int kParts = (WxRing<C>::kBytes + 15) / 16 * 16;
  static constexpr int kWeights = kParts + 2 * Parts<C>::kBytes;
  static constexpr int kBytes = kWeights + Weights<C>::kSharedBytes;
};

// The rounded initial h, in the order in which h is received.
template <class C>
__device__ __forceinline__ void load_initial_hidden(Hidden<C>& h, const Tensors& t, const Place& place,
                                                    const Lane<C>& lane) {
  const int row = place.first_row + lane.source_row();
#pragma unroll
  for (int s = 0; s < C::kKSteps / 2; ++s) {
    const int unit = (lane.k_warp * (C::kKSteps / 2) + s) * 32 + lane.q * 8;
    const float* const from = t.initial_states + state_offset(t, 0, place.part, row, unit);
    const auto pair = [&](int i) {
      const bool low = row < t.B && unit + i < t.D, high = row < t.B && unit + i + 1 < t.D;
      return pack<C::kType>(low ? from[i] : 0.0f, high ? from[i + 1] : 0.0f);
    };
    h[s] = {pair(0), pair(2), pair(4), pair(6)};
  }
}

// wx of step s + kRing into the ring, and of kAhead steps later from memory into L2. Issued after a poll: loads return
// in order, and one that went to memory would hold the poll up.
template <class C>
__device__ __forceinline__ void feed_wx(WxRing<C>& ring, WxStream<C>& wx, const Tensors& t, int s) {
  constexpr int kAhead = 8;
  if (__builtin_expect(t.wide_wx, 1)) {
    ring.template fill_next<true>(wx, s + C::kRing < t.T);
  } else {
    ring.template fill_next<false>(wx, s + C::kRing < t.T);
  }
  if (s + C::kRing + kAhead >= t.T) return;
#pragma unroll
  for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
    for (int e = 0; e < C::kColumns; ++e) {
      ptx::prefetch_if(wx.active[i][e], wx.piece(i, e, 0) + (kAhead - 1) * wx.stride);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) grid_kernel(const __grid_constant__ Tensors t) {
  static_assert(C::kRing >= 2, "wx is copied at least one step ahead");
  using S = GridShared<C>;
  extern __shared__ __align__(16) char shared[];
  const Lane<C> lane{};
  const Place place = place_of<C>(t);

  WxRing<C> ring(ptx::shared_address(shared) + S::kRing, lane);
  WxStream<C> wx(t, place, lane);
  for (int s = 0; s < C::kRing; ++s) {
    if (t.wide_wx) {
      ring.template fill_next<true>(wx, s < t.T);
    } else {
      ring.template fill_next<false>(wx, s < t.T);
    }
  }
  Weights<C> weights;
  load_weights<C>(weights, t, place, lane, shared + S::kWeights);
  Owned<C> owned;
  owned.load(t, place, lane);
  const Packets<C> packets(t, place, lane);
  YStream<C> y(t, place, lane);

  float own[C::kOwned][C::kTiles][4] = {};
  // Not unrolled, and what is rare at the end: the instruction cache holds one step, not two (0.x us).
  for (int s = 0; s < t.T; ++s) {
    std::uint32_t words[C::kOwned][C::kColumns][C::kWords];
    ring.take(words);
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) owned.start(own[i], words[i], i);
    Hidden<C> h;
    if (__builtin_expect(s > 0, 1)) {
      packets.receive(h, s, t.spin_limit);
    } else {
      load_initial_hidden<C>(h, t, place, lane);
    }
    __syncwarp();
    feed_wx<C>(ring, wx, t, s);
    if constexpr (C::kKWarps == 1) {
      multiply<C>(own, weights, h);
    } else {
      Sums<C> sums = {};
      multiply<C>(sums, weights, h);
      reduce_parts<C>(own, sums, shared + S::kParts + (s & 1) * Parts<C>::kBytes, lane);
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
      const uint4 message = gather<C>(rounded, packets.message);
      if (s + 1 < t.T) packets.send(message, i, s + 1);
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) {
        if (C::kUnitsPerLane == 1 || __builtin_expect(t.wide_y, 1)) {
          y.template store<true>(i, e, rounded[e], owned.is_valid(e, s));
        } else {
          y.template store<false>(i, e, rounded[e], owned.is_valid(e, s));
        }
      }
    }
    y.advance();
  }
  owned.store(t, place, lane);
  ptx::wait_copies<0>();
}

}  // namespace flashrnn::cuda
