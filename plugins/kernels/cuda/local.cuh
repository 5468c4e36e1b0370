// The local mode: a block keeps one head's R in registers, and what they cannot hold in shared memory, and a tile of
// the batch to itself; one barrier per step.
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
  static constexpr int kPitch = kRowBytes + (C::kGates == 3     ? 96
                                             : C::kColumns == 2 ? 16
                                                                : 32);  // rows of a tile in different banks
  static constexpr int kStageBytes = C::kRows * kPitch;
  static constexpr int kRing = 2 * C::kHiddenBytes;
  static constexpr int kWeights = kRing + C::kRing * kStageBytes;
  static constexpr int kBytes = kWeights + Weights<C>::kSharedBytes;
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

// Groups that lie side by side start from what their lanes hold, each lane for its own group: nobody reads the others.
template <class C>
__device__ __forceinline__ void spread(Sums<C>& sums, const float (&own)[C::kOwned][C::kTiles][4]) {
#pragma unroll
  for (int p = 0; p < C::kGroups; ++p) {
#pragma unroll
    for (int f = 0; f < 4 * C::kTiles; ++f) sums[p][f / 4][f % 4] = own[p / C::kPacked][f / 4][f % 4];
  }
}
template <class C>
__device__ __forceinline__ void collect(float (&own)[C::kOwned][C::kTiles][4], const Sums<C>& sums, int slot) {
#pragma unroll
  for (int p = 0; p < C::kGroups; ++p) {
#pragma unroll
    for (int f = 0; f < 4 * C::kTiles; ++f) {
      float& mine = own[p / C::kPacked][f / 4][f % 4];
      mine = p % C::kPacked == 0 || slot == p % C::kPacked ? sums[p][f / 4][f % 4] : mine;
    }
  }
}

template <bool kWide, class C>
__device__ __forceinline__ void local_steps(const Tensors& t, const Place& place, char* memory) {
  using S = LocalShared<C>;
  const std::uint32_t shared = ptx::shared_address(memory);
  constexpr int kUnitsApart = WxStream<C>::kUnitsApart;
  const Lane<C> lane{};
  const std::uint32_t from = ptx::opaque(shared + hidden_offset<C>(lane));
  const int unit = lane.unit(lane.owned_group(0)), slot = lane.slot();
  std::uint32_t to[C::kOwned];  // of h in the first buffer; the second column's row is one pitch away
#pragma unroll
  for (int i = 0; i < C::kOwned; ++i) {
    to[i] = ptx::opaque(shared + hidden_offset<C>(lane.row(0), unit + i * kUnitsApart));
  }
  const std::uint32_t wx = ptx::opaque(lane.row(0) * S::kPitch + unit * C::kGates * 2);
  std::uint32_t stage = shared + S::kRing;
  Weights<C> weights;
  load_weights<C>(weights, t, place, lane, memory + S::kWeights);
  Owned<C> owned;
  owned.load(t, place, lane);
  YStream<C> y(t, place, lane);

  WxWords<C> words;
  const auto take_wx = [&] {
    load_wx<C>(words, [&](int i, int e, int p) {
      return stage + wx + i * kUnitsApart * C::kGates * 2 + e * S::kPitch + p * C::kPieceBytes;
    });
    stage = stage + S::kStageBytes == shared + S::kWeights ? shared + S::kRing : stage + S::kStageBytes;
  };
  end_step<C>();
  take_wx();
  Sums<C> sums = {};
  float own[C::kOwned][C::kTiles][4] = {};

  const auto step = [&](int s, int buffer) {  // buffer = s % 2, a constant
    Hidden<C> h;
    load_hidden<C>(h, from + buffer * C::kHiddenBytes);
    float apart[C::kOwned][C::kUnitsPerLane][C::kOwnedColumns];
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) {
      owned.start(own[i], words[i], i);
      owned.keep_apart(apart[i], words[i], i);
    }
    spread<C>(sums, own);
    take_wx();
    multiply<C>(sums, weights, h);
    collect<C>(own, sums, slot);
    std::uint32_t rounded[C::kOwned][C::kOwnedColumns];
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) {
      owned.advance(own[i], apart[i], i, s, t.options);
#pragma unroll
      for (int e = 0; e < C::kOwnedColumns; ++e) {
        rounded[i][e] = hidden_word<C>(owned, i, e);
        const std::uint32_t at = to[i] + (1 - buffer) * C::kHiddenBytes + e * C::kPitch;
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
    for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
      for (int e = 0; e < C::kOwnedColumns; ++e) {
        y.template store<kWide>(i, e, rounded[i][e], owned.is_valid(e, s));
      }
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
  static_assert(C::kKWarps == 1, "D is not split");
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
    local_steps<true, C>(t, place, shared);
  } else {
    local_steps<false, C>(t, place, shared);
  }
}

}  // namespace flashrnn::cuda
