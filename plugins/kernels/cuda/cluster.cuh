// The cluster mode: the blocks of a cluster share one head's R, and hand h to each other through shared memory.
//
// Every block has all of h twice. A finished 16-byte piece goes to all blocks by st.async, whose bytes the receiver's
// barrier of that buffer counts; there is no other barrier per step. Nobody overwrites h that is still read: h(t + 2)
// can only be sent by a block that has all of h(t + 1), hence after every warp has used h(t).
#pragma once

#include "blocks.cuh"
#include "exchange.cuh"

namespace flashrnn::cuda {

template <class C>
struct ClusterShared {
  static constexpr int kPartBytes = Parts<C>::kBytes;

  static constexpr int kHidden = 0;
  static constexpr int kRing = kHidden + 2 * C::kHiddenBytes;
  static constexpr int kParts = (kRing + WxRing<C>::kBytes + 15) / 16 * 16;
  static constexpr int kWeights = kParts + 2 * kPartBytes;
  static constexpr int kBarriers = kWeights + Weights<C>::kSharedBytes;
  static constexpr int kBytes = kBarriers + 16;
};

// Sends the rounded h of one group of a warp to every block.
template <class C>
struct Sender {
  int message;
  Fanout<kMessages<C>, C::kClusterSize> fanout;

  __device__ __forceinline__ Sender(std::uint32_t shared, const Place& place, const Lane<C>& lane)
      : message(lane.lane % kMessages<C>),
        fanout(shared, lane.lane, offset(place, lane), ClusterShared<C>::kBarriers) {}

  // Of the lane's message of group 0 in the first buffer of h.
  __device__ __forceinline__ static int offset(const Place& place, const Lane<C>& lane) {
    const int m = lane.lane % kMessages<C>;
    const int unit = place.first_unit + message_unit<C>(lane, m);
    return ClusterShared<C>::kHidden + message_row<C>(lane, m) * C::kPitch + unit * 2;
  }

  // `buffer` and `i`, the warp's i-th group, are constants.
  __device__ __forceinline__ void send(uint4 v, int i, int buffer, bool wanted) const {
    fanout.send(v, buffer * C::kHiddenBytes + i * WxStream<C>::kUnitsApart * 2, buffer, wanted);
  }
};

template <bool kWide, class C>
__device__ __forceinline__ void cluster_loop(const Tensors& t, char* shared) {
  using S = ClusterShared<C>;
  constexpr std::uint32_t kStepBytes = C::kD * C::kRows * 2;  // of h that a block receives
  const Lane<C> lane{};
  const Place place = place_of<C>(t);
  const std::uint32_t base = ptx::shared_address(shared), barriers = base + S::kBarriers;

  WxRing<C> ring(base + S::kRing, lane);
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
    WxWords<C> words;
    ring.take(words);
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) owned.start(own[i], words[i], i);
    if (s > 0) {  // h(0) is there
      ptx::wait_barrier(barriers + 8 * buffer, static_cast<std::uint32_t>((s - 1) >> 1 & 1), t.spin_limit);
      if (arms) ptx::expect_bytes(barriers + 8 * buffer, kStepBytes);
    }
    Hidden<C> h;
    load_hidden<C>(h, from + buffer * C::kHiddenBytes);
    add_products<C>(own, weights, h, shared + S::kParts + buffer * S::kPartBytes, lane);
    finish_step<C>(
        owned, own, words, lane, sender.message, s, t.options,
        [&](uint4 message, int i) { sender.send(message, i, 1 - buffer, s + 1 < t.T); },
        [&](int i, int e, std::uint32_t word, bool valid) { y.template store<kWide>(i, e, word, valid); });
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
