// The kernel of float32, for the local and the cluster mode (fma_grid.cuh has the grid mode): R in registers and the
// rest in shared memory, products on the FMA units.
//
// Butterflies add up the slices of D and leave each (unit, row) pair with a lane, which computes its step. h is
// exchanged as in the modes of the tensor cores: through shared memory and a barrier of the block, or by st.async.
#pragma once

#include "exchange.cuh"
#include "math.cuh"
#include "reduce.cuh"
#include "slices.cuh"

namespace flashrnn::cuda {

// wx and y of the lane's pair. wx goes through a ring in shared memory, kRing steps deep; every lane copies and reads a
// slot of its own, also those that share a pair, so no lane waits for another.
template <class C>
struct FmaStreams {
  using F = Fma<C>;
  const float* wx;  // at the time to be copied next
  float* y;         // at the time to be written next
  std::int64_t wx_stride, y_stride;
  std::uint32_t slots, fill = 0, read = 0;
  bool active, writes, wide;

  __device__ __forceinline__ FmaStreams(const Tensors& t, const Place& place, const FmaLane<C>& lane,
                                        std::uint32_t ring)
      : slots(ptx::opaque(ring + static_cast<std::uint32_t>(lane.thread) * F::kSlotBytes)) {
    const bool backward = runs_backward(t, place.part / t.H);
    const int row = place.first_row + lane.row, unit = place.first_unit + lane.unit, last = backward ? t.T - 1 : 0;
    const std::int64_t column = static_cast<std::int64_t>(place.part) * t.D + unit;
    wx = static_cast<const float*>(t.wx) + last * t.wx_step + row * t.wx_row + column * C::kGates;
    y = static_cast<float*>(t.y) + last * t.y_step + row * t.y_row + column;
    wx_stride = backward ? -t.wx_step : t.wx_step;
    y_stride = backward ? -t.y_step : t.y_step;
    active = row < t.B && unit < t.D;
    writes = active && lane.stores;
    wide = t.wide_wx;
    for (int s = 0; s < C::kRing; ++s) {  // rows and units outside the tensors
      for (int g = 0; g < C::kGates; ++g) ptx::store_shared_4(slots + s * F::kStageBytes + 4 * g, 0);
    }
  }

  __device__ __forceinline__ void copy_next(bool wanted) {
    if constexpr (C::kGates == 4) ptx::copy_async_if<16>(wanted && active && wide, slots + fill, wx);
#pragma unroll
    for (int g = 0; g < C::kGates; ++g) {
      ptx::copy_async_if<4>(wanted && active && !(C::kGates == 4 && wide), slots + fill + 4 * g, wx + g);
    }
    ptx::commit_copies();
    wx += wx_stride;
    next(fill);
  }

  __device__ __forceinline__ void take(float (&x)[C::kGates]) {
    ptx::wait_copies<C::kRing - 1>();
    if constexpr (C::kGates == 4) {
      const float4 v = FmaWeights<C>::load_floats(slots + read);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
#pragma unroll
      for (int g = 0; g < C::kGates; ++g) x[g] = __uint_as_float(ptx::load_shared_4(slots + read + 4 * g));
    }
    next(read);
  }

  __device__ __forceinline__ void write(float h) {
    ptx::store_global_4_if(writes, y, __float_as_uint(h));
    y += y_stride;
  }

 private:
  __device__ __forceinline__ static void next(std::uint32_t& stage) {
    stage += F::kStageBytes;
    if (stage == C::kRing * F::kStageBytes) stage = 0;
  }
};

// Biases and states of the lane's pair.
template <class C>
struct FmaPair {
  using Step = StepFor<C::kCell>;
  float bias[Step::Gb], state[Step::S];
  int begin, length;  // first valid step and their number
  int row, unit;
  bool real;

  __device__ __forceinline__ FmaPair(const Tensors& t, const Place& place, const FmaLane<C>& lane) {
    row = place.first_row + lane.row, unit = place.first_unit + lane.unit;
    real = row < t.B && unit < t.D;
    length = length_of(t, row);
    begin = runs_backward(t, place.part / t.H) ? t.T - length : 0;
#pragma unroll
    for (int k = 0; k < Step::Gb; ++k) bias[k] = unit < t.D ? t.b[bias_offset(t, Step::Gb, k, place.part, unit)] : 0.0f;
#pragma unroll
    for (int k = 0; k < Step::S; ++k) {
      state[k] = real ? t.initial_states[state_offset(t, k, place.part, row, unit)] : 0.0f;
    }
  }

  // Adds the biases that stand beside wx.
  __device__ __forceinline__ void start(float (&x)[C::kGates]) const {
#pragma unroll
    for (int g = 0; g < C::kGates; ++g) x[g] += bias[g];
  }

  // Step s; a row behind its end keeps its state. Returns what y gets.
  __device__ __forceinline__ float advance(const float (&x)[C::kGates], const float (&rh)[C::kGates], int s,
                                           const CellOptions& given) {
    const CellOptions options = {C::kClips ? given.clip : 0.0f, given.relu, given.normalizer_floor};
    float b[Step::Gb], next[Step::S];
#pragma unroll
    for (int k = 0; k < Step::Gb; ++k) b[k] = k < C::kGates ? -0.0f : bias[k];  // -0 changes nothing: see start
#pragma unroll
    for (int k = 0; k < Step::S; ++k) next[k] = state[k];
    Step::template step<typename MathOf<C::kType>::Type>(x, rh, b, next, options);
    const bool valid = static_cast<unsigned>(s - begin) < static_cast<unsigned>(length);
#pragma unroll
    for (int k = 0; k < Step::S; ++k) state[k] = valid ? next[k] : state[k];
    return valid ? state[0] : 0.0f;
  }

  __device__ __forceinline__ void store(const Tensors& t, const Place& place, bool stores) const {
    if (!real || !stores) return;
#pragma unroll
    for (int k = 0; k < Step::S; ++k) t.final_states[state_offset(t, k, place.part, row, unit)] = state[k];
  }
};

// Hands h to those who need it, and says when all of it is there: inside the block ...
template <class C, Mode kMode>
struct FmaExchange {
  std::uint32_t to;
  bool stores;

  __device__ __forceinline__ FmaExchange(const Tensors&, const char* shared, const Place&, const FmaLane<C>& lane)
      : to(ptx::opaque(ptx::shared_address(shared) + Fma<C>::kHidden + lane.row * C::kPitch + lane.unit * 4)),
        stores(lane.stores) {}
  __device__ __forceinline__ void ready() { __syncthreads(); }
  __device__ __forceinline__ void wait(int, int, std::uint32_t) {}
  __device__ __forceinline__ void send(float h, int, int buffer, bool) const {
    if (stores) ptx::store_shared_4(to + buffer * C::kHiddenBytes, __float_as_uint(h));
  }
  __device__ __forceinline__ void end_step() { __syncthreads(); }
  __device__ __forceinline__ void leave() {}
};

// ... and in a cluster; cluster.cuh says why two buffers and two barriers do.
template <class C>
struct FmaExchange<C, Mode::kCluster> {
  using F = Fma<C>;
  static constexpr int kMessages = F::kWarpUnits / 4 * C::kRows;  // message m: 4 units of row m % kRows
  static constexpr std::uint32_t kStepBytes = C::kD * C::kRows * 4;
  std::uint32_t barriers;
  int source;  // the lane with the message's first unit
  bool arms;
  Fanout<kMessages, C::kClusterSize> fanout;

  __device__ __forceinline__ FmaExchange(const Tensors&, const char* shared, const Place& place, const FmaLane<C>& lane)
      : barriers(ptx::shared_address(shared) + F::kBarriers),
        source(lane.lane % kMessages / C::kRows * (4 / F::kUnits) * F::kSlices +
               lane.lane % kMessages % C::kRows * F::kCopies),
        arms(ptx::opaque(static_cast<std::uint32_t>(lane.thread)) == 0),
        fanout(ptx::shared_address(shared), lane.lane,
               F::kHidden + lane.lane % kMessages % C::kRows * C::kPitch +
                   (place.first_unit + lane.warp * F::kWarpUnits + lane.lane % kMessages / C::kRows * 4) * 4,
               F::kBarriers) {
    if (arms) {
      for (int i = 0; i < 2; ++i) ptx::init_barrier(barriers + 8 * i);
      ptx::fence_barrier_init();
    }
    __syncthreads();
    if (arms) {
      for (int i = 0; i < 2; ++i) ptx::expect_bytes(barriers + 8 * i, kStepBytes);
    }
  }
  __device__ __forceinline__ void ready() { ptx::cluster_barrier(); }  // armed before any block sends
  __device__ __forceinline__ void wait(int s, int buffer, std::uint32_t limit) {
    if (s == 0) return;  // h(0) is there
    ptx::wait_barrier(barriers + 8 * buffer, static_cast<std::uint32_t>((s - 1) >> 1 & 1), limit);
    if (arms) ptx::expect_bytes(barriers + 8 * buffer, kStepBytes);
  }
  __device__ __forceinline__ void send(float h, int, int buffer, bool wanted) const {
    std::uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = source + i / F::kUnits * F::kSlices + i % F::kUnits * C::kRows * F::kCopies;
      v[i] = __shfl_sync(~0u, __float_as_uint(h), from);
    }
    fanout.send({v[0], v[1], v[2], v[3]}, buffer * C::kHiddenBytes, buffer, wanted);
  }
  __device__ __forceinline__ void end_step() {}
  __device__ __forceinline__ void leave() { ptx::cluster_barrier(); }  // not while another block may still send here
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) fma_kernel(const __grid_constant__ Tensors t) {
  extern __shared__ __align__(16) char shared[];
  using F = Fma<C>;
  const FmaLane<C> lane{};
  const Place place = place_of<C>(t);
  const std::uint32_t base = ptx::shared_address(shared);
  FmaStreams<C> streams(t, place, lane, base + F::kRing);
  for (int s = 0; s < C::kRing; ++s) streams.copy_next(s < t.T);
  FmaExchange<C, C::kMode> exchange(t, shared, place, lane);
  const FmaWeights<C> weights(t, place, lane, shared + F::kWeights);
  FmaPair<C> pair(t, place, lane);
  store_initial_hidden<C>(t, place, shared + F::kHidden);
  const std::uint32_t hidden = ptx::opaque(base + F::kHidden + lane.slice * 16);
  exchange.ready();

  const auto step = [&](int s, int buffer) {  // buffer = s % 2, a constant
    float x[C::kGates];
    streams.take(x);
    pair.start(x);
    exchange.wait(s, buffer, t.spin_limit);
    FmaSums<C> sums = {};
    multiply_slice<C>(sums, weights, hidden + buffer * C::kHiddenBytes);
    reduce_items<F::kSlices>(sums, lane.lane);
    const float out = pair.advance(x, sums[0], s, t.options);
    exchange.send(pair.state[0], s + 1, 1 - buffer, s + 1 < t.T);
    exchange.end_step();
    streams.write(out);
    streams.copy_next(s + C::kRing < t.T);
  };
  int s = 0;
  for (; s + 2 <= t.T; s += 2) {
    step(s, 0);
    step(s + 1, 1);
  }
  if (s < t.T) step(s, 0);
  pair.store(t, place, lane.stores);
  ptx::wait_copies<0>();
  exchange.leave();
}

}  // namespace flashrnn::cuda
