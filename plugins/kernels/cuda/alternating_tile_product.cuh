// The products of alternating_tiled.cuh: what a lane sums up of a slice in shared memory, by the tensor cores of a
// warpgroup or of a warp, and how the sums come together.
//
// A slice is 128 bytes of D: first of the rows of R, in m-tiles of two halves of 8 units of one gate, then of the rows
// of the batch. The four warps of one part of the block multiply it.
#pragma once

#include "alternating_stream.cuh"
#include "alternating_wgmma.cuh"

namespace flashrnn::cuda {

template <Cell kCell_, DType kType_, int kRows_>
struct Tiled {
  static constexpr Cell kCell = kCell_;
  static constexpr DType kType = kType_;
  static constexpr int kGates = num_gates(kCell), kRows = kRows_;
  static constexpr int kTiles = 8;                     // m-tiles of a pass
  static constexpr int kGroups = 2 * kTiles / kGates;  // of 8 units, in a pass
  static constexpr int kPassUnits = kHalfUnits * kGroups;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kParts = 2, kPartThreads = kThreads / kParts;  // of D; they take turns with its slices
  static constexpr int kSliceStride = kParts * kSliceBytes;           // from a slice of one part to its next one
  static constexpr int kWeightBytes = 16 * kTiles * kSliceBytes, kSlotBytes = kWeightBytes + kRows * kSliceBytes;
  static constexpr int kMostSlots = 4;  // of a part's ring
};

// Of a slice a row has 8 pieces of 16 bytes, which lie as wgmma wants them. Eight lanes with one piece each of eight
// rows, or with every other piece of two, meet different banks.
__device__ __forceinline__ std::uint32_t piece_at(int row, int piece) {
  return static_cast<std::uint32_t>(row * kSliceBytes + (piece ^ row % 8) * 16);
}

// A lane has kHalves rows of R and kColumns rows of the batch. Half h of it is half(h) of the pass, if has(h), its row
// there lane / 4; column i of it is row column(i, lane) of the tile.
template <class C, bool kWarpgroup>
struct TileProduct;

// Tensor cores of a warp. Of the four warps two share the m-tiles, times two for the rows of the batch.
template <class C>
struct TileProduct<C, false> {
  static constexpr int kTiles = C::kTiles / 2, kSets = C::kRows / 16;  // m-tiles, and 8 rows of the batch each
  static constexpr int kHalves = 2 * kTiles, kColumns = 2 * kSets;
  float sums[kTiles][kSets][4];
  int upper, first_row, first_tile = 0, tiles = 0;

  __device__ __forceinline__ explicit TileProduct(int warp) : upper(warp / 2), first_row(warp % 2 * (C::kRows / 2)) {}
  __device__ __forceinline__ void start(int all) {
    first_tile = upper * ((all + 1) / 2);
    tiles = (all + 1 - upper) / 2;
#pragma unroll
    for (auto& tile : sums) {
#pragma unroll
      for (auto& set : tile) set[0] = set[1] = set[2] = set[3] = 0.0f;
    }
  }

  template <int>
  __device__ __forceinline__ void multiply(std::uint32_t weights, std::uint32_t hidden, int lane) {
    // Which bytes of a slice lane q has is free, if they are the same of R and of h.
    const std::uint32_t first = piece_at(lane / 4, lane % 4 * 2), second = first ^ 16;
    weights += static_cast<std::uint32_t>(16 * first_tile * kSliceBytes);
    hidden += static_cast<std::uint32_t>(first_row * kSliceBytes);
    uint4 h[kSets][2];
#pragma unroll
    for (int n = 0; n < kSets; ++n) {
      const std::uint32_t at = hidden + static_cast<std::uint32_t>(8 * n * kSliceBytes);
      h[n][0] = ptx::load_shared_16(at + first), h[n][1] = ptx::load_shared_16(at + second);
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if (m >= tiles) break;
      const std::uint32_t at = weights + static_cast<std::uint32_t>(16 * m * kSliceBytes);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const std::uint32_t place = p == 0 ? first : second;
        const uint4 low = ptx::load_shared_16(at + place), high = ptx::load_shared_16(at + 8 * kSliceBytes + place);
        const std::uint32_t rows[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
        for (int n = 0; n < kSets; ++n) ptx::mma<C::kType>(sums[m][n], rows[0], h[n][p].x, h[n][p].y);
#pragma unroll
        for (int n = 0; n < kSets; ++n) ptx::mma<C::kType>(sums[m][n], rows[1], h[n][p].z, h[n][p].w);
      }
    }
  }
  __device__ __forceinline__ void finish() {}

  __device__ __forceinline__ int half(int h) const { return 2 * first_tile + h; }
  __device__ __forceinline__ bool has(int h) const { return h < 2 * tiles; }
  __device__ __forceinline__ int column(int i, int lane) const { return first_row + i / 2 * 8 + lane % 4 * 2 + i % 2; }
  __device__ __forceinline__ float value(int h, int i) const { return sums[h / 2][i / 2][h % 2 * 2 + i % 2]; }
};

// Tensor cores of the four warps together: each has every fourth m-tile and all rows. Products go on until finish().
template <class C>
struct TileProduct<C, true> {
  static constexpr int kBlocks = C::kTiles / 4, kSets = C::kRows / 8;
  static constexpr int kHalves = 2 * kBlocks, kColumns = 2 * kSets;
  float sums[kBlocks][kSets][4];
  int warp, tiles = 0;
  int adds = 0;  // 0: the first products of the pass

  __device__ __forceinline__ explicit TileProduct(int warp_) : warp(warp_) {}
  __device__ __forceinline__ void start(int all) {
    tiles = all;
    adds = 0;
  }

  // The first kMultiplied blocks of 4 m-tiles. No branch between products: the compiler would wait for each.
  template <int kMultiplied>
  __device__ __forceinline__ void multiply(std::uint32_t weights, std::uint32_t hidden, int) {
    constexpr int kStep = 32 / 16;  // from 16 of D to the next ones, as operands count
    const std::uint64_t h = ptx::operand(hidden);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSliceBytes / 32; ++k) {
#pragma unroll
      for (int m = 0; m < kMultiplied; ++m) {
        const std::uint64_t r = ptx::operand(weights + static_cast<std::uint32_t>(64 * m * kSliceBytes));
        ptx::wgmma<C::kType>(sums[m], r + kStep * k, h + kStep * k, k > 0 ? 1 : adds);
      }
    }
    ptx::wgmma_commit();
    adds = 1;
  }
  __device__ __forceinline__ void finish() { ptx::wgmma_wait(); }

  __device__ __forceinline__ int half(int h) const { return 2 * (h / 2 * 4 + warp) + h % 2; }
  __device__ __forceinline__ bool has(int h) const { return half(h) < 2 * tiles; }
  __device__ __forceinline__ int column(int i, int lane) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
  __device__ __forceinline__ float value(int h, int i) const { return sums[h / 2][i / 2][h % 2 * 2 + i % 2]; }
};

// The sums of a pass in shared memory: [row][gate and unit]. The pitch is free of bank conflicts.
template <class C>
struct TileSums {
  static constexpr int kPitch = 16 * C::kTiles + 4;
  static constexpr std::size_t kBytes = static_cast<std::size_t>(C::kRows) * kPitch * sizeof(float);
  float* at;

  // Those of both parts come together.
  template <class P>
  __device__ __forceinline__ void gather(const P& product, int part, int lane) const {
    __syncthreads();  // the sums of the pass before have been read
    if (part == 1) visit(product, lane, [](float& place, float sum) { place = sum; });
    __syncthreads();
    if (part == 0) visit(product, lane, [](float& place, float sum) { place += sum; });
    __syncthreads();
  }

  __device__ __forceinline__ float sum(int row, int gate, int unit) const {
    return at[row * kPitch + gate * C::kPassUnits + unit];
  }

 private:
  template <class P, class Body>
  __device__ __forceinline__ void visit(const P& product, int lane, Body&& body) const {
#pragma unroll
    for (int h = 0; h < P::kHalves; ++h) {
      const int half = product.half(h);
      if (!product.has(h) || half >= C::kGroups * C::kGates) break;  // a tile may have a half too many
      float* const column = at + half % C::kGates * C::kPassUnits + half / C::kGates * kHalfUnits + lane / 4;
#pragma unroll
      for (int i = 0; i < P::kColumns; ++i) body(column[product.column(i, lane) * kPitch], product.value(h, i));
    }
  }
};

}  // namespace flashrnn::cuda
