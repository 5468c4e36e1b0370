// The products of the alternating mode: what a lane holds of h, its sums, and how the warps' sums come together.
#pragma once

#include "alternating_stream.cuh"
#include "reduce.cuh"

namespace flashrnn::cuda {

// One slice of h as a lane reads it: row g of each 8 rows of the batch, the same bytes as of a row of R.
template <class C>
struct HiddenSlice {
  static constexpr int kSets = (C::kRows + 7) / 8;
  uint4 piece[kSets][2];

  // `row` is row 0 of the tile, at this lane's bytes of the slice; `rows` of it exist, and `inside` bytes of a row.
  __device__ __forceinline__ void load(const char* row, std::int64_t pitch, int rows, int inside, int g) {
#pragma unroll
    for (int n = 0; n < kSets; ++n) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        piece[n][p] = uint4{};
        if (8 * n + g < rows && 64 * p < inside) piece[n][p] = ptx::load_l2_16(row + (8 * n + g) * pitch + 64 * p);
      }
    }
  }
};

// Tensor cores. Sums: rows g, g + 8 of each m-tile, columns 2q, 2q + 1 of each 8 rows of the batch.
template <class C, bool kFma>
struct Product {
  static constexpr int kColumns = C::kRows / 4;  // of a lane
  static constexpr int kScratchBytes = 0;        // of a warp
  static_assert(C::kRows % 8 == 0, "whole tiles");
  float sums[C::kTiles][C::kRows / 8][4];
  HiddenSlice<C> h;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& tile : sums) {
#pragma unroll
      for (auto& set : tile) set[0] = set[1] = set[2] = set[3] = 0.0f;
    }
  }
  __device__ __forceinline__ void take(const HiddenSlice<C>& slice, std::uint32_t, int) { h = slice; }
  __device__ __forceinline__ void multiply(int m, const Stage& r) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const uint4 low = r.piece[0][p], high = r.piece[1][p];
      const std::uint32_t rows[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
      for (int n = 0; n < C::kRows / 8; ++n) {
        ptx::mma<C::kType>(sums[m][n], rows[0], h.piece[n][p].x, h.piece[n][p].y);
      }
#pragma unroll
      for (int n = 0; n < C::kRows / 8; ++n) {
        ptx::mma<C::kType>(sums[m][n], rows[1], h.piece[n][p].z, h.piece[n][p].w);
      }
    }
  }
  __device__ __forceinline__ void finish(int) {}
  __device__ __forceinline__ static bool owns(int) { return true; }
  __device__ __forceinline__ static int column(int i, int q) { return i / 2 * 8 + 2 * q + i % 2; }
  __device__ __forceinline__ float& value(int m, int half, int i) { return sums[m][i / 2][2 * half + i % 2]; }
};

// FMA units. A lane has rows g, g + 8 and a quarter of the slice; h of all rows of the batch comes to it through shared
// memory, and butterflies add the quarters up.
template <class C>
struct Product<C, true> {
  static constexpr int kItems = C::kRows < 4 ? C::kRows : 4, kSets = C::kRows / kItems;
  static constexpr int kColumns = kSets;
  static constexpr int kScratchBytes = C::kRows * kSliceBytes;
  float sums[kSets][kItems][2 * C::kTiles];
  float h[C::kRows][2][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& set : sums) {
#pragma unroll
      for (auto& row : set) {
#pragma unroll
        for (float& sum : row) sum = 0.0f;
      }
    }
  }
  __device__ __forceinline__ void take(const HiddenSlice<C>& slice, std::uint32_t scratch, int lane) {
    const int g = lane / 4;
    const std::uint32_t quarter = scratch + static_cast<std::uint32_t>(lane % 4) * 16;
    __syncwarp();  // all have read the slice before
    if (g < C::kRows) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        ptx::store_shared_16(quarter + static_cast<std::uint32_t>(g * kSliceBytes + 64 * p), slice.piece[0][p]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const uint4 v = ptx::load_shared_16(quarter + static_cast<std::uint32_t>(r * kSliceBytes + 64 * p));
        h[r][p][0] = __uint_as_float(v.x), h[r][p][1] = __uint_as_float(v.y);
        h[r][p][2] = __uint_as_float(v.z), h[r][p][3] = __uint_as_float(v.w);
      }
    }
  }
  __device__ __forceinline__ void multiply(int m, const Stage& r) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = r.piece[half][p];
        const float w[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
#pragma unroll
        for (int row = 0; row < C::kRows; ++row) {
          float& sum = sums[row / kItems][row % kItems][2 * m + half];
#pragma unroll
          for (int k = 0; k < 4; ++k) sum = fmaf(w[k], h[row][p][k], sum);
        }
      }
    }
  }
  __device__ __forceinline__ void finish(int lane) {
#pragma unroll
    for (auto& set : sums) reduce_items<4>(set, lane);
  }
  // With fewer than 4 rows several lanes have the same one; the first owns it.
  __device__ __forceinline__ static bool owns(int q) { return q % (4 / kItems) == 0; }
  __device__ __forceinline__ static int column(int i, int q) { return i * kItems + q / (4 / kItems); }
  __device__ __forceinline__ float& value(int m, int half, int i) { return sums[i][0][2 * m + half]; }
};

// Sums of half of the warps in shared memory, by warp, row of the batch, and gate and unit: [4][rows][kPitch]. The
// pitch is free of bank conflicts.
template <class C>
struct PartialSums {
  static constexpr int kPitch = 16 * C::kTiles + 4;
  static constexpr int kSources = C::kWarps / 2;
  __host__ __device__ static std::size_t bytes(int rows) {
    return static_cast<std::size_t>(kSources * rows * kPitch) * sizeof(float);
  }

  float* at;
  int rows;

  // Warps 4 to 7 hand their sums to warps 0 to 3, and these to everybody.
  template <class P>
  __device__ __forceinline__ void gather(P& product, int halves, int warp, int lane) const {
    const bool first = warp >= kSources;
    __syncthreads();  // the sums of the pass before have been read
    if (first) visit(product, halves, warp - kSources, lane, [](float& place, float& sum) { place = sum; });
    __syncthreads();
    if (!first) {
      visit(product, halves, warp, lane, [](float& place, float& sum) {
        sum += place;
        place = sum;
      });
    }
    __syncthreads();
  }

  __device__ __forceinline__ float sum(int row, int gate, int unit) const {
    const float* const from = at + row * kPitch + gate * C::kPassUnits + unit;
    float total = from[0];
#pragma unroll
    for (int w = 1; w < kSources; ++w) total += from[w * rows * kPitch];
    return total;
  }

 private:
  template <class P, class Body>
  __device__ __forceinline__ void visit(P& product, int halves, int source, int lane, Body&& body) const {
    const int g = lane / 4, q = lane % 4;
#pragma unroll
    for (int half = 0; half < C::kGroups * C::kGates; ++half) {
      if (half >= halves) break;
      const int index = half % C::kGates * C::kPassUnits + half / C::kGates * kHalfUnits + g;
#pragma unroll
      for (int i = 0; i < P::kColumns; ++i) {
        const int row = P::column(i, q);
        if (P::owns(q) && row < rows)
          body(at[(source * rows + row) * kPitch + index], product.value(half / 2, half % 2, i));
      }
    }
  }
};

}  // namespace flashrnn::cuda
