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

// wx of step s + kRing into the ring, and that of kAhead steps later from memory into L2: loads return in order, and
// one that went to memory would hold up the poll behind it.
template <class C>
__device__ __forceinline__ void feed_wx(WxRing<C>& ring, WxStream<C>& wx, const Tensors& t, int s) {
  constexpr int kAhead = 8;
#pragma unroll
  for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
    for (int e = 0; e < C::kOwnedColumns; ++e) {
      ptx::prefetch_if(wx.active[i][e] && s + C::kRing + kAhead < t.T, wx.piece(i, e, 0) + kAhead * wx.stride);
    }
  }
  ring.template fill_next<true>(wx, s + C::kRing < t.T);
}

// What a lane of the grid mode holds from step to step, and the parts of one step.
template <class C>
struct GridLane {
  using S = GridShared<C>;
  const Tensors& t;
  char* shared;
  Lane<C> lane{};
  Place place = place_of<C>(t);
  WxRing<C> ring{ptx::shared_address(shared) + S::kRing, lane};
  WxStream<C> wx{t, place, lane};
  Weights<C> weights;
  Owned<C> owned;
  Packets<C> packets{t, place, lane};
  YStream<C> y{t, place, lane};
  WxWords<C> words;
  float own[C::kOwned][C::kTiles][4] = {};

  __device__ __forceinline__ GridLane(const Tensors& tensors, char* memory) : t(tensors), shared(memory) {
    for (int s = 0; s < C::kRing; ++s) {
      if (t.wide_wx) {
        ring.template fill_next<true>(wx, s < t.T);
      } else {
        ring.template fill_next<false>(wx, s < t.T);
      }
    }
    load_weights<C>(weights, t, place, lane, shared + S::kWeights);
    owned.load(t, place, lane);
  }

  __device__ __forceinline__ void start() {
    ring.take(words);
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) owned.start(own[i], words[i], i);
  }

  // Step s: the sums, the cell, h on its way to all blocks, y.
  __device__ __forceinline__ void step(const Hidden<C>& h, int s) {
    add_products<C>(own, weights, h, shared + S::kParts + (s & 1) * Parts<C>::kBytes, lane);
    finish_step<C>(
        owned, own, words, lane, packets.message, s, t.options,
        [&](uint4 message, int i) { packets.send(message, i, s + 1, s + 1 < t.T); },
        [&](int i, int e, std::uint32_t word, bool valid) { y.store_any(t.wide_y, i, e, word, valid); });
    y.advance();
  }
};

// A step begins when h is there and ends when that of the next one is. What is rare comes between two steps, outside of
// their loop: each step runs through its instructions once, and what lies among them costs as if it ran (0.17 us).
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) grid_kernel(const __grid_constant__ Tensors t) {
  static_assert(C::kRing >= 2, "wx is copied at least one step ahead");
  extern __shared__ __align__(16) char shared[];
  GridLane<C> lane(t, shared);
  Hidden<C> h;
  load_initial_hidden<C>(h, t, lane.place, lane.lane);
  lane.start();
  for (int s = 0; s < t.T;) {
    bool rare = false;
    do {
      lane.step(h, s);
      if (t.wide_wx) feed_wx<C>(lane.ring, lane.wx, t, s);
      if (++s == t.T) break;
      lane.start();
      rare = __any_sync(~0u, lane.packets.receive(h, s, t.spin_limit) != 0);
    } while (!rare && t.wide_wx);
    if (s == t.T) break;
    if (rare) lane.packets.receive_long(h, s, t.spin_limit);
    if (!t.wide_wx) lane.ring.template fill_next<false>(lane.wx, s - 1 + C::kRing < t.T);
    __syncwarp();
  }
  lane.owned.store(t, lane.place, lane.lane);
  ptx::wait_copies<0>();
}

}  // namespace flashrnn::cuda
