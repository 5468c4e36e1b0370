// The streaming kernel of the alternating mode, from compute capability 8.0 on: one block per multiprocessor runs
// through all steps.
//
// A block owns some units of one head, with all gates, and some rows of the batch. Its warps split D. A step: wait
// until the blocks of the head have h, multiply, add up the warps' sums, the cell, h to global memory, say so. Blocks
// of a launch are resident together (a cooperative launch), so waiting ends.
#pragma once

#include "alternating_pairs.cuh"
#include "alternating_product.cuh"

namespace flashrnn::cuda {

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
  Pairs<C, (C::kPassUnits * C::kRows + C::kThreads - 1) / C::kThreads> pairs;
  HiddenSlice<C> next_h;
  Stage now;
  bool streamed = weights.read(now);

  for (int s = 0; s < t.T; ++s) {
    const void* const h_old = share.hidden[s % 2];
    pairs.load(t, work, s, work.first_row, 0, 0);
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
        pairs.step(t, partial, biases, static_cast<Element<C::kType>*>(share.hidden[(s + 1) % 2]));
        if (pass + 1 < passes) {
          pairs.store(t);
          pairs.load(t, work, s, row, pass + 1, 0);
        } else if (row + C::kRows < work.end_row) {
          pairs.store(t);
          pairs.load(t, work, s, row + C::kRows, 0, 0);
        }
      }
    }
    barrier.arrive();
    pairs.store(t);
  }
  ptx::wait_copies<0>();
#endif
}

}  // namespace flashrnn::cuda
