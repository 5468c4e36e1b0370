// What both kernels of the alternating mode that run through all steps do around the products: wait for the other
// blocks of a head, and compute the cell.
#pragma once

#include <type_traits>

#include "alternating_stream.cuh"
#include "math.cuh"

namespace flashrnn::cuda {

// A barrier of the blocks of one group, in two halves. By the memory model of PTX what a block wrote before it arrived
// is seen by those that have waited: the barrier of the block orders its threads' stores before the release, which is
// cumulative, and the loads of the waiting block after the acquire.
struct GroupBarrier {
  std::uint32_t* arrivals;
  std::uint32_t blocks, limit, target = 0;

  __device__ __forceinline__ void arrive() {
    __syncthreads();
    if (threadIdx.x == 0 && blocks > 1) ptx::add_release(arrivals, 1);
    target += blocks;
  }
  // Ends the kernel with an error after `limit` polls.
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0 && blocks > 1) {
      std::uint32_t polls = 0;
      while (static_cast<std::int32_t>(ptx::load_acquire(arrivals) - target) < 0) {
        if (++polls > limit) __trap();
      }
    }
    __syncthreads();
  }
};

// Up to kCount (unit, row) pairs of a thread in one pass, from its pair `first` on: their inputs, which may be loaded
// before the sums are there, their step, and what others do not wait for.
template <class C, int kCount>
struct Pairs {
  using E = Element<C::kType>;
  using Step = StepFor<C::kCell>;
  struct Pair {
    alignas(Step::G == 4 ? 4 * sizeof(E) : sizeof(E)) E wx[Step::G];
    float state[Step::S];
    int length;
  } pairs[kCount];
  int time, units, all;   // units of the pass, and pairs
  int index, row, unit;   // of this thread's first pair, within the pass
  int first_bias;         // of the pass
  int rows_on, units_on;  // to its next one
  std::int64_t output;    // element of the pass's first pair in hidden, and in y
  std::int64_t first_y;
  float* states;            // its first state
  std::int64_t state_step;  // elements to its next one

  // Calls body(pair, row, unit) for the pairs that exist, counted from the first row and unit of the pass.
  template <class Body>
  __device__ __forceinline__ void visit(Body&& body) {
    int i = index, r = row, u = unit;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (i < all) body(pairs[k], r, u);
      i += C::kThreads;
      r += rows_on, u += units_on;
      if (u >= units) u -= units, ++r;
    }
  }

  __device__ __forceinline__ void load(const Tensors& t, const Work& work, int s, int first_row, int pass, int first) {
    time = runs_backward(t, work.direction) ? t.T - 1 - s : s;
    const int first_unit = work.first_unit + pass * C::kPassUnits;
    units = min(min(t.D, work.first_unit + work.groups * kHalfUnits) - first_unit, C::kPassUnits);
    all = units * min(C::kRows, work.end_row - first_row);
    index = static_cast<int>(threadIdx.x) + first * C::kThreads;
    row = index / units, unit = index - row * units;
    rows_on = C::kThreads / units, units_on = C::kThreads - rows_on * units;
    first_bias = pass * C::kPassUnits * Step::Gb;
    const std::int64_t width = static_cast<std::int64_t>(t.H) * t.D;
    const std::int64_t column = static_cast<std::int64_t>(work.part) * t.D + first_unit;
    output = (static_cast<std::int64_t>(work.part) * t.B + first_row) * t.D + first_unit;
    first_y = time * t.y_step + first_row * t.y_row + column;
    states = t.final_states + (static_cast<std::int64_t>(work.direction) * t.B + first_row) * width +
             static_cast<std::int64_t>(work.head) * t.D + first_unit;
    state_step = static_cast<std::int64_t>(t.N) * t.B * width;
    const E* const inputs = static_cast<const E*>(t.wx) + time * t.wx_step + first_row * t.wx_row + column * Step::G;
    visit([&](Pair& pair, int r, int u) {
      pair.length = length_of(t, first_row + r);
      const E* const wx = inputs + r * t.wx_row + u * Step::G;
      if (Step::G == 4 && t.wide_wx) {
        using Four = std::conditional_t<sizeof(E) == 2, uint2, uint4>;
        *reinterpret_cast<Four*>(pair.wx) = *reinterpret_cast<const Four*>(wx);
      } else {
#pragma unroll
        for (int g = 0; g < Step::G; ++g) pair.wx[g] = wx[g];
      }
      const float* const state = states + r * width + u;
#pragma unroll
      for (int k = 0; k < Step::S; ++k) pair.state[k] = state[k * state_step];
    });
  }

  // Computes the step and stores h for the other blocks. `biases` are those of the block.
  template <class Sums>
  __device__ __forceinline__ void step(const Tensors& t, const Sums& sums, const float* biases, E* hidden) {
    hidden += output;
    visit([&](Pair& pair, int r, int u) {
      if (time < pair.length) {
        float x[Step::G], products[Step::G], bias[Step::Gb];
#pragma unroll
        for (int g = 0; g < Step::G; ++g) {
          x[g] = to_float(pair.wx[g]);
          products[g] = sums.sum(r, g, u);
        }
#pragma unroll
        for (int k = 0; k < Step::Gb; ++k) bias[k] = biases[first_bias + u * Step::Gb + k];
        Step::template step<typename MathOf<C::kType>::Type>(x, products, bias, pair.state, t.options);
      }
      hidden[static_cast<std::int64_t>(r) * t.D + u] = from_float<E>(pair.state[0]);
    });
  }

  // The states and y, which no other block reads.
  __device__ __forceinline__ void store(const Tensors& t) {
    E* const y = static_cast<E*>(t.y) + first_y;
    const std::int64_t width = static_cast<std::int64_t>(t.H) * t.D;
    visit([&](Pair& pair, int r, int u) {
      const bool valid = time < pair.length;
      y[r * t.y_row + u] = from_float<E>(valid ? pair.state[0] : 0.0f);
      if (!valid) return;
      float* const state = states + r * width + u;
#pragma unroll
      for (int k = 0; k < Step::S; ++k) state[k * state_step] = pair.state[k];
    });
  }
};

// The biases of the block's units: [unit][bias].
template <class C>
__device__ __forceinline__ void load_biases(float* to, const Tensors& t, const Work& work) {
  constexpr int Gb = StepFor<C::kCell>::Gb;
  for (int i = static_cast<int>(threadIdx.x); i < work.groups * kHalfUnits * Gb; i += C::kThreads) {
    const int unit = work.first_unit + i / Gb;
    to[i] = unit < t.D ? t.b[bias_offset(t, Gb, i % Gb, work.part, unit)] : 0.0f;
  }
}

}  // namespace flashrnn::cuda
