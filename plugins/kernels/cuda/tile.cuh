// What the local and the cluster kernel share: where a lane stands, its part of R, the product, and the pointwise part.
#pragma once

#include "config.h"
#include "math.cuh"
#include "ptx.cuh"
#include "tensors.cuh"

namespace flashrnn::cuda {

// A lane's place. In the accumulators it has rows g and g + 8 of each m-tile and columns 2q, 2q + 1; as the source of h
// it feeds column g.
template <class C>
struct Lane {
  int thread = static_cast<int>(ptx::opaque(threadIdx.x));  // reading it again takes as long as a shared load
  int lane = thread % 32, warp = thread / 32;
  int g = lane / 4, q = lane % 4;
  int row_warp = warp % C::kRowWarps, k_warp = warp / C::kRowWarps;

  // Batch row, inside the tile, of the lane's column e.
  __device__ __forceinline__ int row(int e) const {
    return C::kColumns == 1 ? q % C::kRows : tile_row(C::kOwnedColumns * q + e);
  }
  // Batch row of the i-th row whose pointwise part this warp does.
  __device__ __forceinline__ int tile_row(int i) const { return C::kSplit == 1 ? i : 2 * i + k_warp / C::kGroups; }
  __device__ __forceinline__ bool has_row() const { return C::kColumns == 2 || q < C::kRows * C::kPacked; }
  // Batch row whose h this lane feeds to the product. Columns without a row repeat one: zeros would cost a predicate
  // and two registers to clear for every load.
  __device__ __forceinline__ int source_row() const { return C::kColumns == 2 ? g : g / 2 % C::kRows; }
  // First unit, inside the block, of group p of this warp, and of this lane in the group.
  __device__ __forceinline__ int group_unit(int p) const { return (row_warp * C::kGroups + p) * C::Tile::kUnits; }
  __device__ __forceinline__ int unit(int p) const { return group_unit(p) + g * C::kUnitsPerLane; }
  // Group of this warp whose pointwise part the lane does as its i-th.
  __device__ __forceinline__ int owned_group(int i) const {
    if (C::kSplit == 2) return k_warp % C::kGroups;
    return C::kPacked > 1 ? slot() + i * C::kPacked : k_warp + i * C::kKWarps;
  }
  __device__ __forceinline__ bool owns(int i) const {
    return C::kKWarps == 1 || k_warp + i * C::kKWarps < C::kGroups * C::kSplit;
  }
  // Which of the groups that lie side by side is the lane's.
  __device__ __forceinline__ int slot() const { return q / C::kRows % C::kPacked; }
};

// Where the block stands: a tile of the batch, one head of one direction, and a share of its units.
struct Place {
  int part;        // direction and head
  int first_row;   // of the batch
  int first_unit;  // of the head
};
template <class C>
__device__ __forceinline__ Place place_of(const Tensors& t) {
  const int block = static_cast<int>(blockIdx.x), group = t.first_group + block / C::kBlocks;
  const int tiles = (t.B + C::kRows - 1) / C::kRows;
  return {group / tiles, group % tiles * C::kRows, block % C::kBlocks * C::kUnitsPerBlock};
}

// --- R: in registers, the rest in shared memory as [warp][group][tile][k-step][lane] of 16 bytes ---

template <class C>
struct Weights {
  static constexpr int kRest = C::kKSteps - C::kRegisterKSteps;
  static constexpr int kSharedBytes = C::kWarps * C::kGroups * C::kTiles * kRest * 512;
  std::uint32_t held[C::kGroups][C::kTiles][C::kRegisterKSteps > 0 ? C::kRegisterKSteps : 1][4];
  std::uint32_t rest;  // shared address of this lane's part
};

// 8 elements of one row of r from column k on; zeros outside the head.
__device__ __forceinline__ uint4 weight_piece(const Tensors& t, int gates, int gate, int part, int unit, int k) {
  std::uint32_t words[4] = {};
  if (unit < t.D) {
    const std::uint16_t* row = static_cast<const std::uint16_t*>(t.r) + weight_offset(t, gates, gate, part, unit);
    if (t.wide_r) return k < t.D ? __ldg(reinterpret_cast<const uint4*>(row + k)) : uint4{};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (k + i < t.D) words[i / 2] |= static_cast<std::uint32_t>(row[k + i]) << (16 * (i % 2));
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// Columns of R are dealt to lanes so that 16 bytes of h feed two k-steps: k = 32 s + 8 q + 4 e + 2 r + {0, 1}.
template <class C>
__device__ __forceinline__ void load_weights(Weights<C>& w, const Tensors& t, const Place& place, const Lane<C>& lane,
                                             void* shared) {
  char* const rest =
      static_cast<char*>(shared) + (lane.warp * C::kGroups * C::kTiles * Weights<C>::kRest * 32 + lane.lane) * 16;
  w.rest = ptx::shared_address(rest);
#pragma unroll
  for (int p = 0; p < C::kGroups; ++p) {
    const int unit = place.first_unit + lane.unit(p);
#pragma unroll
    for (int j = 0; j < C::kTiles; ++j) {
      const int gate = C::Tile::kInterleaved ? 2 * j : j, second = C::Tile::kInterleaved ? 1 : 0;
#pragma unroll
      for (int s = 0; s < C::kKSteps / 2; ++s) {
        const int k = (lane.k_warp * (C::kKSteps / 2) + s) * 32 + lane.q * 8;
        const uint4 low = weight_piece(t, C::kGates, gate, place.part, unit, k);
        const uint4 high = weight_piece(t, C::kGates, gate + second, place.part, unit + 1 - second, k);
        const std::uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int step = 2 * s + e;
          if (step < C::kRegisterKSteps) {
#pragma unroll
            for (int r = 0; r < 4; ++r) w.held[p][j][step < C::kRegisterKSteps ? step : 0][r] = a[e][r];
          } else {
            reinterpret_cast<uint4*>(
                rest)[((p * C::kTiles + j) * Weights<C>::kRest + step - C::kRegisterKSteps) * 32] = {a[e][0], a[e][1],
                                                                                                     a[e][2], a[e][3]};
          }
        }
      }
    }
  }
}

template <class C>
using Sums = float[C::kGroups][C::kTiles][4];
template <class C>
using Hidden = uint4[C::kKSteps / 2];

// Where h of a unit of a row lies in a buffer. The local mode stores it by units, one of each row by neighbouring
// lanes: there the pieces of 16 bytes of every second row change places, so that these are in different banks.
template <class C>
__device__ __forceinline__ std::uint32_t hidden_offset(int row, int unit) {
  const int piece = C::kMode == Mode::kLocal && !C::kFma ? unit / 8 ^ (row / 2 & 3) : unit / 8;
  return static_cast<std::uint32_t>(row * C::kPitch + piece * 16 + unit % 8 * 2);
}
// Where the lane's part of h starts.
template <class C>
__device__ __forceinline__ std::uint32_t hidden_offset(const Lane<C>& lane) {
  return hidden_offset<C>(lane.source_row(), lane.k_warp * (C::kKSteps / 2) * 32 + lane.q * 8);
}

template <class C>
__device__ __forceinline__ void load_hidden(Hidden<C>& h, std::uint32_t at) {
#pragma unroll
  for (int s = 0; s < C::kKSteps / 2; ++s) h[s] = ptx::load_shared_16(at + s * 64);
}

// The i-th k-step to be multiplied. Those whose R is in shared memory are spread among the others, which hide its
// loads.
template <class C>
__device__ constexpr int k_step_at(int i) {
  const int shared = i * Weights<C>::kRest / C::kKSteps;  // of those before
  return (i + 1) * Weights<C>::kRest / C::kKSteps > shared ? C::kRegisterKSteps + shared : i - shared;
}

template <class C>
__device__ __forceinline__ void multiply(Sums<C>& sums, const Weights<C>& w, const Hidden<C>& h) {
  // A chain of dependent products takes 24 cycles each. k-steps take turns with the sets of sums: shorter chains.
  constexpr int kMore = C::kSets - 1;
  Sums<C> more[kMore > 0 ? kMore : 1];
  const auto set = [&](int i) -> Sums<C>& { return i == 0 ? sums : more[i - 1]; };
#pragma unroll
  for (int i = 1; i < C::kSets; ++i) {
#pragma unroll
    for (int f = 0; f < C::kGroups * C::kTiles * 4; ++f) set(i)[f / 4 / C::kTiles][f / 4 % C::kTiles][f % 4] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < C::kKSteps; ++i) {
    const int step = k_step_at<C>(i);
    const uint4& piece = h[step / 2];
    const std::uint32_t b0 = step % 2 != 0 ? piece.z : piece.x, b1 = step % 2 != 0 ? piece.w : piece.y;
#pragma unroll
    for (int p = 0; p < C::kGroups; ++p) {
#pragma unroll
      for (int j = 0; j < C::kTiles; ++j) {
        std::uint32_t a[4];
        if (step < C::kRegisterKSteps) {
#pragma unroll
          for (int r = 0; r < 4; ++r) a[r] = w.held[p][j][step < C::kRegisterKSteps ? step : 0][r];
        } else {
          const int at = ((p * C::kTiles + j) * Weights<C>::kRest + step - C::kRegisterKSteps) * 512;
          const uint4 v = ptx::load_shared_16(w.rest + at);
          a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
        }
        ptx::mma<C::kType>(set(step % C::kSets)[p][j], a, b0, b1);
      }
    }
  }
#pragma unroll
  for (int half = C::kSets / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
#pragma unroll
      for (int f = 0; f < C::kGroups * C::kTiles * 4; ++f) {
        const int p = f / 4 / C::kTiles, j = f / 4 % C::kTiles;
        set(i)[p][j][f % 4] += set(i + half)[p][j][f % 4];
      }
    }
  }
}

// --- The pointwise part: one lane has all gates of its units and rows ---

// The accumulator of (gate, unit v, column e) of a lane.
template <class C>
__device__ __forceinline__ float& gate_of(float (&tile)[C::kTiles][4], int gate, int v, int e) {
  return C::Tile::kInterleaved ? tile[gate / 2][gate % 2 * 2 + e] : tile[gate][v * 2 + e];
}

template <class C>
struct Owned {
  using Step = StepFor<C::kCell>;
  float state[C::kOwned][C::kUnitsPerLane][C::kOwnedColumns][Step::S];
  float bias[C::kOwned][C::kUnitsPerLane][Step::Gb];
  int begin[C::kOwnedColumns], length[C::kOwnedColumns];  // first valid step and their number

  __device__ __forceinline__ void load(const Tensors& t, const Place& place, const Lane<C>& lane) {
#pragma unroll
    for (int e = 0; e < C::kOwnedColumns; ++e) {
      length[e] = lane.has_row() ? length_of(t, place.first_row + lane.row(e)) : 0;
      begin[e] = runs_backward(t, place.part / t.H) ? t.T - length[e] : 0;
    }
    visit(t, place, lane, [&](int i, int v, int unit, bool inside) {
#pragma unroll
      for (int k = 0; k < Step::Gb; ++k) {
        bias[i][v][k] = inside ? t.b[bias_offset(t, Step::Gb, k, place.part, unit)] : 0.0f;
      }
#pragma unroll
      for (int e = 0; e < C::kOwnedColumns; ++e) {
        const int row = place.first_row + lane.row(e);
#pragma unroll
        for (int k = 0; k < Step::S; ++k) {
          const bool real = inside && lane.has_row() && row < t.B;
          state[i][v][e][k] = real ? t.initial_states[state_offset(t, k, place.part, row, unit)] : 0.0f;
        }
      }
    });
  }

  __device__ __forceinline__ void store(const Tensors& t, const Place& place, const Lane<C>& lane) const {
    visit(t, place, lane, [&](int i, int v, int unit, bool inside) {
#pragma unroll
      for (int e = 0; e < C::kOwnedColumns; ++e) {
        const int row = place.first_row + lane.row(e);
        if (inside && lane.has_row() && row < t.B) {
#pragma unroll
          for (int k = 0; k < Step::S; ++k) {
            t.final_states[state_offset(t, k, place.part, row, unit)] = state[i][v][e][k];
          }
        }
      }
    });
  }

  // What the sums of group i start from: wx and bias. The recurrent part of the GRU's n stands apart from wx, since r
  // multiplies it. Columns without a row go on from what they hold.
  __device__ __forceinline__ void start(float (&sums)[C::kTiles][4],
                                        const std::uint32_t (&words)[C::kOwnedColumns][C::kWords], int i) const {
#pragma unroll
    for (int v = 0; v < C::kUnitsPerLane; ++v) {
#pragma unroll
      for (int e = 0; e < C::kOwnedColumns; ++e) {
#pragma unroll
        for (int g = 0; g < C::kGates; ++g) {
          const bool apart = C::kCell == Cell::kGru && g == 2;
          gate_of<C>(sums, g, v, e) = apart ? bias[i][v][Step::Gb - 1] : input(v, g, words[e]) + bias[i][v][g];
        }
      }
    }
  }

  // What a step needs of wx beside the sums: the GRU's n.
  __device__ __forceinline__ void keep_apart(float (&apart)[C::kUnitsPerLane][C::kOwnedColumns],
                                             const std::uint32_t (&words)[C::kOwnedColumns][C::kWords], int i) const {
#pragma unroll
    for (int v = 0; v < C::kUnitsPerLane; ++v) {
#pragma unroll
      for (int e = 0; e < C::kOwnedColumns; ++e) {
        apart[v][e] = C::kCell == Cell::kGru ? input(v, C::kGates - 1, words[e]) + bias[i][v][C::kGates - 1] : 0.0f;
      }
    }
  }

  // Whether column e has a step s; backward, its steps are the last ones.
  __device__ __forceinline__ bool is_valid(int e, int s) const {
    return static_cast<unsigned>(s - begin[e]) < static_cast<unsigned>(length[e]);
  }

  // Step s of group i from its finished sums. A row behind its end keeps its state.
  __device__ __forceinline__ void advance(float (&sums)[C::kTiles][4],
                                          const float (&apart)[C::kUnitsPerLane][C::kOwnedColumns], int i, int s,
                                          const CellOptions& given) {
    const CellOptions options = {C::kClips ? given.clip : 0.0f, given.relu, given.normalizer_floor};
#pragma unroll
    for (int v = 0; v < C::kUnitsPerLane; ++v) {
#pragma unroll
      for (int e = 0; e < C::kOwnedColumns; ++e) {
        float x[Step::G], rh[Step::G], b[Step::Gb], next[Step::S];
#pragma unroll
        for (int g = 0; g < Step::G; ++g) {
          x[g] = -0.0f;  // changes nothing, and the compiler knows: the sums began with wx and the biases
          rh[g] = gate_of<C>(sums, g, v, e);
        }
#pragma unroll
        for (int k = 0; k < Step::Gb; ++k) b[k] = -0.0f;
        if constexpr (C::kCell == Cell::kGru) x[2] = apart[v][e];
#pragma unroll
        for (int k = 0; k < Step::S; ++k) next[k] = state[i][v][e][k];
        Step::template step<typename MathOf<C::kType>::Type>(x, rh, b, next, options);
#pragma unroll
        for (int k = 0; k < Step::S; ++k) state[i][v][e][k] = is_valid(e, s) ? next[k] : state[i][v][e][k];
      }
    }
  }

 private:
  __device__ __forceinline__ static float input(int v, int gate, const std::uint32_t (&words)[C::kWords]) {
    const int element = v * C::kGates + gate;
    return unpack<C::kType>(words[element / 2], element % 2);
  }

  template <class Body>
  __device__ __forceinline__ static void visit(const Tensors& t, const Place& place, const Lane<C>& lane, Body&& body) {
#pragma unroll
    for (int i = 0; i < C::kOwned; ++i) {
#pragma unroll
      for (int v = 0; v < C::kUnitsPerLane; ++v) {
        const int unit = place.first_unit + lane.unit(lane.owned_group(i)) + v;
        body(i, v, unit, lane.owns(i) && unit < t.D);
      }
    }
  }
};

// The rounded initial h of the tile's rows, all units of the head, into a buffer in shared memory.
template <class C>
__device__ __forceinline__ void store_initial_hidden(const Tensors& t, const Place& place, char* buffer) {
  for (int i = static_cast<int>(threadIdx.x); i < C::kRows * C::kD; i += static_cast<int>(blockDim.x)) {
    const int row = i / C::kD, unit = i % C::kD;
    float h = 0.0f;
    if (place.first_row + row < t.B && unit < t.D) {
      h = t.initial_states[state_offset(t, 0, place.part, place.first_row + row, unit)];
    }
    using E = Element<C::kType>;
    const std::uint32_t at = C::kFma ? row * C::kPitch + unit * 4 : hidden_offset<C>(row, unit);
    *reinterpret_cast<E*>(buffer + at) = from_float<E>(h);
  }
}

}  // namespace flashrnn::cuda
