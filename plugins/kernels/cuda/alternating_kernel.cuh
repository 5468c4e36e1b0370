// The kernel of the alternating mode from compute capability 8.0 on: one block per multiprocessor runs through all
// steps.
//
// A block owns some units of one head, with all gates, and some rows of the batch. Its warps split D. A step: wait
// until the blocks of the head have h, multiply, add up the warps' sums, the cell, h to global memory, say so. Blocks
// of a launch are resident together (a cooperative launch), so waiting ends.
#pragma once

#include "alternating_product.cuh"

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

// The (unit, row) pairs of a thread in one pass: their inputs, loaded long before the sums are there, and their step.
template <class C>
struct Pairs {
  using E = Element<C::kType>;
  using Step = StepFor<C::kCell>;
  static constexpr int kCount = (C::kPassUnits * C::kRows + C::kThreads - 1) / C::kThreads;
  struct Pair {
    E wx[Step::G];
    float state[Step::S];
    int length;
    bool active;
  } pairs[kCount];
  int time;

  __device__ __forceinline__ static int unit_of(int i) {
    return (static_cast<int>(threadIdx.x) + i * C::kThreads) % C::kPassUnits;
  }
  __device__ __forceinline__ static int row_of(int i) {
    return (static_cast<int>(threadIdx.x) + i * C::kThreads) / C::kPassUnits;
  }

  __device__ __forceinline__ void load(const Tensors& t, const Work& work, int s, int first_row, int pass) {
    const int n = work.part / t.H;
    time = runs_backward(t, n) ? t.T - 1 - s : s;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Pair& pair = pairs[i];
      const int unit = work.first_unit + pass * C::kPassUnits + unit_of(i), row = first_row + row_of(i);
      pair.active =
          unit < min(t.D, work.first_unit + work.groups * kHalfUnits) && row < work.end_row && row_of(i) < C::kRows;
      if (!pair.active) continue;
      pair.length = length_of(t, row);
      const E* wx = static_cast<const E*>(t.wx) + time * t.wx_step + row * t.wx_row +
                    (static_cast<std::int64_t>(work.part) * t.D + unit) * Step::G;
#pragma unroll
      for (int g = 0; g < Step::G; ++g) pair.wx[g] = wx[g];
#pragma unroll
      for (int k = 0; k < Step::S; ++k) pair.state[k] = t.final_states[state_offset(t, k, work.part, row, unit)];
    }
  }

  __device__ __forceinline__ void step(const Tensors& t, const Work& work, const PartialSums<C>& partial,
                                       const float* biases, int first_row, int pass, E* hidden) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Pair& pair = pairs[i];
      if (!pair.active) continue;
      const int unit = work.first_unit + pass * C::kPassUnits + unit_of(i), row = first_row + row_of(i);
      float out = 0.0f;
      if (time < pair.length) {
        float x[Step::G], sums[Step::G], bias[Step::Gb];
#pragma unroll
        for (int g = 0; g < Step::G; ++g) {
          x[g] = to_float(pair.wx[g]);
          sums[g] = partial.sum(row_of(i), g, unit_of(i));
        }
#pragma unroll
        for (int k = 0; k < Step::Gb; ++k) bias[k] = biases[(pass * C::kPassUnits + unit_of(i)) * Step::Gb + k];
        Step::template step<ScalarMath>(x, sums, bias, pair.state, t.options);
#pragma unroll
        for (int k = 0; k < Step::S; ++k) t.final_states[state_offset(t, k, work.part, row, unit)] = pair.state[k];
        out = pair.state[0];
      }
      hidden[(static_cast<std::int64_t>(work.part) * t.B + row) * t.D + unit] = from_float<E>(pair.state[0]);
      static_cast<E*>(t.y)[time * t.y_step + row * t.y_row + static_cast<std::int64_t>(work.part) * t.D + unit] =
          from_float<E>(out);
    }
  }
};

// A lane's way through h: slice after slice of the rows of a tile, for each pass again.
template <class C>
struct HiddenStream {
  std::int64_t pitch;   // bytes
  std::int64_t offset;  // of the lane's bytes in a row
  int inside, g;

  __device__ __forceinline__ HiddenStream(const Work& work, int warp, int lane)
      : pitch(work.row_bytes),
        offset(static_cast<std::int64_t>(warp) * work.slices * kSliceBytes + lane % 4 * 16),
        inside(static_cast<int>(max(work.row_bytes - offset, static_cast<std::int64_t>(0)))),
        g(lane / 4) {}

  __device__ __forceinline__ void load(HiddenSlice<C>& h, const Tensors& t, const Work& work, const void* hidden,
                                       int first_row, int slice) const {
    const char* const row = static_cast<const char*>(hidden) +
                            (static_cast<std::int64_t>(work.part) * t.B + first_row) * pitch + offset +
                            slice * kSliceBytes;
    h.load(row, pitch, min(C::kRows, work.end_row - first_row), inside - slice * kSliceBytes, g);
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

// Shared memory: of each warp what its lanes hand each other, the ring and the stages that stay; then the sums, the
// biases and the table of tiles.
template <class C>
struct AlternatingShared {
  using P = Product<C, C::kFma>;
  static std::size_t bytes(int rows, int units, int resident) {
    return C::kWarps * (P::kScratchBytes + static_cast<std::size_t>(C::kRing + resident) * kStageBytes) +
           PartialSums<C>::bytes(rows) + TileTable<C>::bytes(units) +
           static_cast<std::size_t>(units) * num_biases(C::kCell) * sizeof(float);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    alternating_kernel(const __grid_constant__ Tensors t, const __grid_constant__ Share share) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) char shared[];
  using P = Product<C, C::kFma>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Work work(t, share, C::kWarps, static_cast<int>(sizeof(Element<C::kType>)));
  const int warp_bytes = P::kScratchBytes + (C::kRing + share.resident) * kStageBytes;
  char* const mine = shared + warp * warp_bytes;
  const std::uint32_t scratch = ptx::shared_address(mine);
  const PartialSums<C> partial{reinterpret_cast<float*>(shared + C::kWarps * warp_bytes),
                               min(C::kRows, share.range_rows)};
  const TileTable<C> table{
      reinterpret_cast<std::int64_t*>(reinterpret_cast<char*>(partial.at) + PartialSums<C>::bytes(partial.rows))};
  float* const biases = reinterpret_cast<float*>(reinterpret_cast<char*>(table.at) + TileTable<C>::bytes(share.units));
  table.fill(t, work);
  load_biases<C>(biases, t, work);
  __syncthreads();
  WeightStream<C> weights(t, work, table, share.resident, scratch + P::kScratchBytes, warp, lane);
  Stage held[C::kHeld > 0 ? C::kHeld : 1];
  weights.start(held);
  const HiddenStream<C> hidden(work, warp, lane);
  GroupBarrier barrier{share.arrivals + static_cast<int>(blockIdx.x) / share.unit_blocks * kArrivalStride,
                       static_cast<std::uint32_t>(share.unit_blocks), t.spin_limit};
  const int passes = weights.passes();
  P product;
  Pairs<C> pairs;
  HiddenSlice<C> next_h;
  Stage now;
  bool streamed = weights.read(now);

  for (int s = 0; s < t.T; ++s) {
    const void* const h_old = share.hidden[s % 2];
    pairs.load(t, work, s, work.first_row, 0);
    if (s > 0) barrier.wait();
    hidden.load(next_h, t, work, h_old, work.first_row, 0);
    for (int row = work.first_row; row < work.end_row; row += C::kRows) {
      for (int pass = 0; pass < passes; ++pass) {
        const int tiles = weights.tiles(pass);
        product.clear();
        for (int slice = 0; slice < work.slices; ++slice) {
          product.take(next_h, scratch, lane);
          const bool more = slice + 1 < work.slices;
          const int next_row = more || pass + 1 < passes ? row : row + C::kRows;
          if (next_row < work.end_row) hidden.load(next_h, t, work, h_old, next_row, more ? slice + 1 : 0);
          int first = 0;
          if (C::kHeld > 0 && pass == 0 && slice == 0) {
#pragma unroll
            for (int m = 0; m < C::kHeld; ++m) {
              if (m < tiles) product.multiply(m, held[m]);
            }
            first = C::kHeld;
          }
#pragma unroll
          for (int m = 0; m < C::kTiles; ++m) {
            if (m < first) continue;
            if (m >= tiles) break;
            Stage next;
            const bool next_streamed = weights.read(next);
            product.multiply(m, now);
            if (streamed) weights.refill();
            now = next, streamed = next_streamed;
          }
        }
        product.finish(lane);
        partial.gather(product, min(C::kGroups, work.groups - pass * C::kGroups) * C::kGates, warp, lane);
        pairs.step(t, work, partial, biases, row, pass, static_cast<Element<C::kType>*>(share.hidden[(s + 1) % 2]));
        if (pass + 1 < passes) {
          pairs.load(t, work, s, row, pass + 1);
        } else if (row + C::kRows < work.end_row) {
          pairs.load(t, work, s, row + C::kRows, 0);
        }
      }
    }
    barrier.arrive();
  }
  ptx::wait_copies<0>();
#endif
}

}  // namespace flashrnn::cuda
