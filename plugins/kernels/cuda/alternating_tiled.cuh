// The alternating mode for many rows of the batch: R and h pass through shared memory in tiles that all warps use.
//
// A block owns some units of one head, with all gates, and some rows of the batch, as in alternating_kernel.cuh, but a
// tile has up to 64 rows and R is read once for all of them. The two parts of the block, four warps each, take turns
// with the slices of D. Slices of R are copied ahead into the next step, while its blocks still wait for h; those of h
// follow once it is there.
#pragma once

#include "alternating_pairs.cuh"
#include "alternating_tile_product.cuh"

namespace flashrnn::cuda {

// Of this pass of the compiler: whether warpgroups multiply.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kHasWarpgroups = true;
#else
inline constexpr bool kHasWarpgroups = false;
#endif

// The copies of one part of the block: a thread's share of each slice, the same piece of every 16th row. A slot of the
// ring holds a slice of R and then one of h.
template <class C>
struct TileCopies {
  const char* weights;  // this thread's piece of row 0 of the first gate in the part's first slice
  std::int64_t row_bytes;
  int part, row, piece;
  int left;                    // bytes from the piece to the end of the row
  std::uint32_t ring, halves;  // shared addresses: of the ring, and in the table of tiles
  int slots;
  int groups, passes, slices;
  int pass = 0, slice = 0;  // of R, to be copied

  __device__ __forceinline__ TileCopies(const Tensors& t, const Work& work, const TileTable<C>& table,
                                        std::uint32_t rings, int slots_)
      : row_bytes(work.row_bytes),
        part(static_cast<int>(threadIdx.x) / C::kPartThreads),
        row(static_cast<int>(threadIdx.x) % C::kPartThreads / 8),
        piece(static_cast<int>(threadIdx.x) % 8),
        ring(rings + static_cast<std::uint32_t>(part * slots_ * C::kSlotBytes)),
        halves(ptx::shared_address(table.at) + static_cast<std::uint32_t>(row / 8 * 8)),
        slots(slots_),
        groups(work.groups),
        passes((groups + C::kGroups - 1) / C::kGroups),
        slices(work.slices) {
    using E = Element<C::kType>;
    const std::int64_t offset = part * kSliceBytes + piece * 16;
    left = static_cast<int>(max(row_bytes - offset, static_cast<std::int64_t>(0)));
    weights = reinterpret_cast<const char*>(static_cast<const E*>(t.r) + weight_offset(t, C::kGates, 0, work.part, 0)) +
              row % 8 * row_bytes + (left > 0 ? offset : 0);
  }

  // M-tiles of pass p.
  __device__ __forceinline__ int tiles(int p) const {
    return (min(C::kGroups, groups - p * C::kGroups) * C::kGates + 1) / 2;
  }
  __device__ __forceinline__ std::uint32_t slot(int index) const {
    return ring + static_cast<std::uint32_t>(index * C::kSlotBytes);
  }

  // The next slice of R; behind the last one of a step the first one again.
  __device__ __forceinline__ void copy_weights(int index) {
    const int count = tiles(pass), offset = slice * C::kSliceStride;
    const bool inside = offset < left;
    const std::uint32_t to = slot(index) + piece_at(row, piece);
    std::uint32_t entry = halves + static_cast<std::uint32_t>(pass * C::kTiles * TileTable<C>::kEntryBytes);
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) {
      if (m >= count) break;
      const char* const from = weights + ptx::load_shared_8_signed(entry) + offset;
      ptx::copy_async_16_or_zero(inside, to + static_cast<std::uint32_t>(16 * m * kSliceBytes),
                                 inside ? from : weights);
      entry += TileTable<C>::kEntryBytes;
    }
    if (++slice == slices) {
      slice = 0;
      pass = pass + 1 == passes ? 0 : pass + 1;
    }
  }

  // A slice of `rows` rows of h, the first of which begins at `hidden`.
  __device__ __forceinline__ void copy_hidden(int index, const char* hidden, int rows, int of) const {
    const int offset = of * C::kSliceStride;
    const char* const from = hidden + part * kSliceBytes + piece * 16 + offset;
    const std::uint32_t to = slot(index) + C::kWeightBytes + piece_at(row, piece);
#pragma unroll
    for (int i = 0; i < C::kRows; i += 16) {
      const bool wanted = offset < left && row + i < rows;
      ptx::copy_async_16_or_zero(wanted, to + static_cast<std::uint32_t>(i * kSliceBytes),
                                 wanted ? from + (row + i) * row_bytes : weights);
    }
  }

  // Until the next slice is there: all that this thread copies but the newest slots - 2.
  __device__ __forceinline__ void wait() const {
    if (slots == 4) {
      ptx::wait_copies<2>();
    } else if (slots == 3) {
      ptx::wait_copies<1>();
    } else {
      ptx::wait_copies<0>();
    }
  }
};

// Shared memory: the rings of both parts, the sums, the table of tiles, the biases.
template <class C>
struct TiledShared {
  static std::size_t bytes(int slots, int units) {
    return static_cast<std::size_t>(C::kParts * slots) * C::kSlotBytes + TileSums<C>::kBytes +
           TileTable<C>::bytes(units) + static_cast<std::size_t>(units) * num_biases(C::kCell) * sizeof(float);
  }
};

// Brings wx of the block's units in step s into the L2 cache.
template <class C>
__device__ __forceinline__ void prefetch_inputs(const Tensors& t, const Work& work, int s) {
  if (s >= t.T) return;
  constexpr int kLine = 128;
  using E = Element<C::kType>;
  const int time = runs_backward(t, work.part / t.H) ? t.T - 1 - s : s;
  const std::int64_t unit = static_cast<std::int64_t>(work.part) * t.D + work.first_unit;
  const int units = min(work.groups * kHalfUnits, t.D - work.first_unit);
  const int bytes = units * C::kGates * static_cast<int>(sizeof(E)), lines = bytes / kLine + 1;
  const E* const step = static_cast<const E*>(t.wx) + time * t.wx_step + unit * C::kGates;
  for (int i = static_cast<int>(threadIdx.x); i < (work.end_row - work.first_row) * lines; i += C::kThreads) {
    const char* const from = reinterpret_cast<const char*>(step + (work.first_row + i / lines) * t.wx_row);
    ptx::prefetch_if(true, from + min(i % lines * kLine, bytes - 1));
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    tiled_kernel(const __grid_constant__ Tensors t, const __grid_constant__ Share share) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(1024) char tiled_shared[];
  using E = Element<C::kType>;
  // Pairs of a thread whose inputs are loaded before the products, as many as registers hold; earlier, before the wait
  // for h, they cost more registers than there are.
  constexpr int kPairs = kHasWarpgroups || C::kRows <= 32 ? 8 : 4;
  constexpr int kTurns = (C::kPassUnits * C::kRows + kPairs * C::kThreads - 1) / (kPairs * C::kThreads);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, part = thread / C::kPartThreads;
  const Work work(t, share, C::kParts, static_cast<int>(sizeof(E)));
  const TileSums<C> sums{reinterpret_cast<float*>(tiled_shared + C::kParts * share.slots * C::kSlotBytes)};
  const TileTable<C> table{reinterpret_cast<std::int64_t*>(reinterpret_cast<char*>(sums.at) + TileSums<C>::kBytes)};
  float* const biases = reinterpret_cast<float*>(reinterpret_cast<char*>(table.at) + TileTable<C>::bytes(share.units));
  table.fill(t, work);
  load_biases<C>(biases, t, work);
  __syncthreads();
  TileCopies<C> copies(t, work, table, ptx::shared_address(tiled_shared), share.slots);
  GroupBarrier barrier{share.arrivals + static_cast<int>(blockIdx.x) / share.unit_blocks * kArrivalStride,
                       static_cast<std::uint32_t>(share.unit_blocks), t.spin_limit};
  const int ahead = share.slots - 1;
  for (int i = 0; i < ahead; ++i) copies.copy_weights(i);
  ptx::commit_copies();
  TileProduct<C, kHasWarpgroups> product(thread / 32 % 4);
  Pairs<C, kPairs> pairs;
  int slot = 0;  // to be multiplied
  prefetch_inputs<C>(t, work, 0);

  for (int s = 0; s < t.T; ++s) {
    const char* const h_old =
        static_cast<const char*>(share.hidden[s % 2]) + static_cast<std::int64_t>(work.part) * t.B * work.row_bytes;
    int next_row = work.first_row, next_pass = 0, next_slice = 0;  // of h, to be copied
    const auto copy_hidden = [&](int index) {
      if (next_row < work.end_row) {
        copies.copy_hidden(index, h_old + next_row * work.row_bytes, min(C::kRows, work.end_row - next_row),
                           next_slice);
        if (++next_slice == work.slices) next_slice = 0, ++next_pass;
        if (next_pass == copies.passes) next_pass = 0, next_row += C::kRows;
      }
      ptx::commit_copies();  // also an empty group: wait() counts them
    };
    if (s > 0) barrier.wait();
    for (int i = 0; i < ahead; ++i) copy_hidden(slot + i < share.slots ? slot + i : slot + i - share.slots);
    prefetch_inputs<C>(t, work, s + 1);
    for (int row = work.first_row; row < work.end_row; row += C::kRows) {
      for (int pass = 0; pass < copies.passes; ++pass) {
        pairs.load(t, work, s, row, pass, 0);
        const int tiles = copies.tiles(pass);
        product.start(tiles);
        const auto multiply = [&](auto blocks) {
          for (int slice = 0; slice < work.slices; ++slice) {
            copies.wait();
            if (kHasWarpgroups) ptx::fence_shared_for_wgmma();
            ptx::named_barrier<C::kPartThreads>(1 + part);  // the slice is there, and nobody reads the one before
            const std::uint32_t at = copies.slot(slot);
            product.template multiply<decltype(blocks)::value>(at, at + C::kWeightBytes, lane);
            const int freed = slot == 0 ? share.slots - 1 : slot - 1;
            copies.copy_weights(freed);
            copy_hidden(freed);
            product.finish();
            slot = slot + 1 == share.slots ? 0 : slot + 1;
          }
        };
        if (kHasWarpgroups && tiles <= 4) {
          multiply(std::integral_constant<int, 1>{});
        } else {
          multiply(std::integral_constant<int, C::kTiles / 4>{});
        }
        sums.gather(product, part, lane);
        for (int turn = 0; turn < kTurns; ++turn) {
          pairs.step(t, sums, biases, static_cast<E*>(share.hidden[(s + 1) % 2]));
          const bool more = (turn + 1) * kPairs * C::kThreads < pairs.all;
          if (more || pass + 1 < copies.passes || row + C::kRows < work.end_row) pairs.store(t);
          if (!more) break;
          pairs.load(t, work, s, row, pass, (turn + 1) * kPairs);
        }
      }
    }
    barrier.arrive();
    pairs.store(t);  // the last ones of the step: no other block waits for them
  }
  ptx::wait_copies<0>();
#endif
}

}  // namespace flashrnn::cuda
