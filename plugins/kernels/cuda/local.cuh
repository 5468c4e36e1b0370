// The local mode: a block keeps one head's R in registers and a tile of the batch to itself; one barrier per step.
//
// The feed of wx decides the speed. A spare warp copies it into a ring in shared memory, and the others read it from
// there a step ahead. Tried and lost: cp.async by the warps that need it (0.33 us per step at D = 64); registers filled
// 4 steps ahead behind prefetches into L2 (0.21 to 0.33: a warp has six scoreboards, and a wait for the oldest load is
// often a wait for the newest).
#pragma once

#include "stream.cuh"

namespace flashrnn::cuda {

// The barrier of a step. Named, with its count: the warps meet from two places in the code.
template <class C>
__device__ __forceinline__ void end_step() {
  ptx::named_barrier<C::kThreads + 32>(1);
}

template <class C>
struct LocalShared {
  static constexpr int kRowBytes = C::kD * C::kGates * 2;
  static constexpr int kPitch = kRowBytes + (C::kGates == 3 ? 96 : 32);  // rows of a tile in different banks
  static constexpr int kStageBytes = C::kRows * kPitch;
  static constexpr int kRing = 2 * C::kHiddenBytes;
  static constexpr int kBytes = kRing + C::kRing * kStageBytes;
};

// What a lane of the spare warp copies in each step: pieces of kGrain bytes, dealt over the rows of the tile. Addresses
// are kept: worked out in every step they cost 0.09 us for each row.
template <int kGrain, class C>
struct Pieces {
  using S = LocalShared<C>;
  static constexpr int kPerRow = S::kRowBytes / kGrain;
  static constexpr int kRounds = (C::kRows * kPerRow + 31) / 32;
  const char* from[kRounds];
  std::uint32_t to[kRounds];  // in a stage
  bool active[kRounds];

  __device__ __forceinline__ Pieces(const Tensors& t, const char* first, int rows) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int piece = static_cast<int>(threadIdx.x) % 32 + 32 * i, row = piece / kPerRow;
      const int byte = piece % kPerRow * kGrain;
      from[i] = first + 2 * row * t.wx_row + byte;
      to[i] = static_cast<std::uint32_t>(row * S::kPitch + byte);
      active[i] = row < rows && byte < t.D * C::kGates * 2;
    }
  }
  __device__ __forceinline__ void copy(std::uint32_t stage, bool wanted, std::int64_t stride) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      ptx::copy_async_if<kGrain>(wanted && active[i], stage + to[i], from[i]);
      from[i] += stride;
    }
  }
};

// Single elements, which a GRU or Elman cell with an odd head_dim needs: slow, and waited for in every step.
template <class C>
struct Pieces<0, C> {
  using S = LocalShared<C>;
  const char* from;
  std::int64_t row_bytes;
  int rows, elements;

  __device__ __forceinline__ Pieces(const Tensors& t, const char* first, int num_rows)
      : from(first), row_bytes(2 * t.wx_row), rows(num_rows), elements(t.D * C::kGates) {}
  __device__ __forceinline__ void copy(std::uint32_t stage, bool wanted, std::int64_t stride) {
    for (int row = 0; wanted && row < rows; ++row) {
      const std::uint16_t* const source = reinterpret_cast<const std::uint16_t*>(from + row * row_bytes);
      for (int i = static_cast<int>(threadIdx.x) % 32; i < elements; i += 32) {
        ptx::store_shared_2(stage + row * S::kPitch + 2 * i, __ldg(source + i));
      }
    }
    from += stride;
  }
};

// The spare warp's work.
template <int kGrain, class C>
__device__ __forceinline__ void feed(const Tensors& t, const Place& place, std::uint32_t ring) {
  using S = LocalShared<C>;
  const bool backward = runs_backward(t, place.part / t.H);
  const std::int64_t stride = (backward ? -2 : 2) * t.wx_step;
  const char* const first =
      static_cast<const char*>(t.wx) + 2 * ((backward ? t.T - 1 : 0) * t.wx_step + place.first_row * t.wx_row +
                                            static_cast<std::int64_t>(place.part) * t.D * C::kGates);
  Pieces<kGrain, C> pieces(t, first, min(C::kRows, t.B - place.first_row));
  std::uint32_t stage = ring;
  const auto copy = [&](bool wanted) {
    pieces.copy(stage, wanted, stride);
    ptx::commit_copies();
    stage = stage + S::kStageBytes == ring + C::kRing * S::kStageBytes ? ring : stage + S::kStageBytes;
  };
  // In step s the others read wx of s + 1: it has to be there before the barrier that ends step s - 1.
  for (int s = 0; s < C::kRing - 1; ++s) copy(s < t.T);
  ptx::wait_copies<C::kRing - 3>();
  end_step<C>();
  for (int s = 0; s < t.T; ++s) {
    copy(s + C::kRing - 1 < t.T);
    ptx::wait_copies<C::kRing - 3>();
    end_step<C>();
  }
}

template <bool kWide, class C>
__device__ __forceinline__ void local_steps(const Tensors& t, const Place& place, std::uint32_t shared) {
  using S = LocalShared<C>;
  const Lane<C> lane{};
  const std::uint32_t from = ptx::opaque(shared + hidden_offset<C>(lane));
  const std::uint32_t to = ptx::opaque(shared + lane.row(0) * C::kPitch + lane.unit(0) * 2);
  const std::uint32_t wx = ptx::opaque((lane.has_row() ? lane.row(0) : 0) * S::kPitch + lane.unit(0) * C::kGates * 2);
  std::uint32_t stage = shared + S::kRing;
  Weights<C> weights;
  load_weights<C>(weights, t, place, lane, nullptr);
  Owned<C> owned;
  owned.load(t, place, lane);
  YStream<C> y(t, place, lane);

  std::uint32_t words[C::kOwned][C::kColumns][C::kWords];
  const auto load_wx = [&] {
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) {
#pragma unroll
        for (int p = 0; p < C::kPieces; ++p) {
          const std::uint32_t at =
              stage + wx + i * C::Tile::kUnits * C::kGates * 2 + e * S::kPitch + p * C::kPieceBytes;
          if constexpr (C::kPieceBytes == 8) {
            const uint2 v = ptx::load_shared_8(at);
            words[i][e][2 * p] = v.x, words[i][e][2 * p + 1] = v.y;
          } else {
            words[i][e][p] = ptx::load_shared_4(at);
          }
        }
      }
    }
    stage = stage + S::kStageBytes == shared + S::kBytes ? shared + S::kRing : stage + S::kStageBytes;
  };
  end_step<C>();
  load_wx();
  Sums<C> sums = {};

  const auto step = [&](int s, int buffer) {  // buffer = s % 2, a constant
    Hidden<C> h;
    load_hidden<C>(h, from + buffer * C::kHiddenBytes);
    float apart[C::kOwned][C::kUnitsPerLane][C::kColumns];
#pragma unroll
    for (int i = 0; i < C::kGroups; ++i) {
      owned.start(sums[i], words[i], i);
      owned.keep_apart(apart[i], words[i], i);
    }
    load_wx();
    multiply<C>(sums, weights, h);
    std::uint32_t rounded[C::kGroups][C::kColumns];
#pragma unroll
    for (int i = 0; i < C::kGroups; ++i) {
      owned.advance(sums[i], apart[i], i, s, t.options);
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) {
        rounded[i][e] = hidden_word<C>(owned, i, e);
        const std::uint32_t at = to + (1 - buffer) * C::kHiddenBytes + e * C::kPitch + i * C::Tile::kUnits * 2;
        if (!lane.has_row()) continue;
        if (C::kUnitsPerLane == 2) {
          ptx::store_shared_4(at, rounded[i][e]);
        } else {
          ptx::store_shared_2(at, static_cast<std::uint16_t>(rounded[i][e]));
        }
      }
    }
    end_step<C>();
#pragma unroll
    for (int i = 0; i < C::kGroups; ++i) {
#pragma unroll
      for (int e = 0; e < C::kColumns; ++e) y.template store<kWide>(i, e, rounded[i][e], owned.is_valid(e, s));
    }
    y.advance();
  };
  int s = 0;
  for (; s + 2 <= t.T; s += 2) {
    step(s, 0);
    step(s + 1, 1);
  }
  if (s < t.T) step(s, 0);
  owned.store(t, place, lane);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + 32, 1) local_kernel(const __grid_constant__ Tensors t) {
  static_assert(C::kKWarps == 1 && C::kRegisterKSteps == C::kKSteps, "all of R in registers, D not split");
  static_assert(C::kSpareWarp && C::kRing >= 4, "a spare warp feeds wx at least 3 steps ahead");
  extern __shared__ __align__(16) char shared[];
  const Place place = place_of<C>(t);
  const std::uint32_t base = ptx::shared_address(shared);
  for (int i = static_cast<int>(threadIdx.x); i < C::kRing * LocalShared<C>::kStageBytes / 4; i += C::kThreads + 32) {
    ptx::store_shared_4(base + LocalShared<C>::kRing + 4 * i, 0);  // rows and units outside the tensors stay 0
  }
  store_initial_hidden<C>(t, place, shared);
  __syncthreads();
  if (threadIdx.x >= C::kThreads) {
    const std::uint32_t ring = base + LocalShared<C>::kRing;
    if (t.wide_rows) {
      feed<16, C>(t, place, ring);
    } else if (t.wide_wx) {
      feed<C::kPieceBytes, C>(t, place, ring);
    } else {
      feed<0, C>(t, place, ring);
    }
  } else if (C::kUnitsPerLane == 1 || t.wide_y) {
    local_steps<true, C>(t, place, base);
  } else {
    local_steps<false, C>(t, place, base);
  }
}

}  // namespace flashrnn::cuda
