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

// Most (unit, row) pairs of a thread in a pass.
template <class C>
inline constexpr int kMostPairs = (C::kPassUnits * C::kRows + C::kThreads - 1) / C::kThreads;

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
  int time, first_row, first_unit, units, first;  // of the pass

  // Calls body(pair, row, unit) for the pairs that exist, counted from the first row and unit of the pass.
  template <class Body>
  __device__ __forceinline__ void visit(const Work& work, Body&& body) {
    const int all = units * min(C::kRows, work.end_row - first_row);
    int index = static_cast<int>(threadIdx.x) + first * C::kThreads, row = index / units, unit = index % units;
    const int rows_on = C::kThreads / units, units_on = C::kThreads % units;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (index < all) body(pairs[i], row, unit);
      index += C::kThreads;
      row += rows_on, unit += units_on;
      if (unit >= units) unit -= units, ++row;
    }
  }

  __device__ __forceinline__ void load(const Tensors& t, const Work& work, int s, int tile_row, int pass, int first_) {
    time = runs_backward(t, work.part / t.H) ? t.T - 1 - s : s;
    first_row = tile_row, first = first_;
    first_unit = work.first_unit + pass * C::kPassUnits;
    units = min(min(t.D, work.first_unit + work.groups * kHalfUnits) - first_unit, C::kPassUnits);
    const E* const inputs = static_cast<const E*>(t.wx) + time * t.wx_step + first_row * t.wx_row +
                            (static_cast<std::int64_t>(work.part) * t.D + first_unit) * Step::G;
    visit(work, [&](Pair& pair, int row, int unit) {
      pair.length = length_of(t, first_row + row);
      const E* const wx = inputs + row * t.wx_row + unit * Step::G;
      if (Step::G == 4 && t.wide_wx) {
        using Four = std::conditional_t<sizeof(E) == 2, uint2, uint4>;
        *reinterpret_cast<Four*>(pair.wx) = *reinterpret_cast<const Four*>(wx);
      } else {
#pragma unroll
        for (int g = 0; g < Step::G; ++g) pair.wx[g] = wx[g];
      }
#pragma unroll
      for (int k = 0; k < Step::S; ++k) {
        pair.state[k] = t.final_states[state_offset(t, k, work.part, first_row + row, first_unit + unit)];
      }
    });
  }

  // Computes the step and stores h for the other blocks.
  template <class Sums>
  __device__ __forceinline__ void step(const Tensors& t, const Work& work, const Sums& all, const float* biases,
                                       E* hidden) {
    hidden += (static_cast<std::int64_t>(work.part) * t.B + first_row) * t.D + first_unit;
    biases += (first_unit - work.first_unit) * Step::Gb;
    visit(work, [&](Pair& pair, int row, int unit) {
      if (time < pair.length) {
        float x[Step::G], sums[Step::G], bias[Step::Gb];
#pragma unroll
        for (int g = 0; g < Step::G; ++g) {
          x[g] = to_float(pair.wx[g]);
          sums[g] = all.sum(row, g, unit);
        }
#pragma unroll
        for (int k = 0; k < Step::Gb; ++k) bias[k] = biases[unit * Step::Gb + k];
        Step::template step<typename MathOf<C::kType>::Type>(x, sums, bias, pair.state, t.options);
      }
      hidden[static_cast<std::int64_t>(row) * t.D + unit] = from_float<E>(pair.state[0]);
    });
  }

  // The states and y, which no other block reads.
  __device__ __forceinline__ void store(const Tensors& t, const Work& work) {
    E* const y = static_cast<E*>(t.y) + time * t.y_step + first_row * t.y_row +
                 static_cast<std::int64_t>(work.part) * t.D + first_unit;
    visit(work, [&](Pair& pair, int row, int unit) {
      const bool valid = time < pair.length;
      y[row * t.y_row + unit] = from_float<E>(valid ? pair.state[0] : 0.0f);
      if (!valid) return;
#pragma unroll
      for (int k = 0; k < Step::S; ++k) {
        t.final_states[state_offset(t, k, work.part, first_row + row, first_unit + unit)] = pair.state[k];
      }
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
