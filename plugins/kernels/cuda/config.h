// One kernel configuration as compile-time constants. Each line of kernel_configs.inc, a file that a build renders from
// what flashrnn_deploy/kernel_config.py chose, names one:
//
//   FLASHRNN_KERNEL(cell, dtype, compute_capability, min_batch, max_batch, clips, mode, padded_head_dim, cluster_size,
//                   units_per_block, batch_tile, tiles_per_block, row_warps, k_warps, register_k_steps,
//                   accumulator_sets, ring_depth, replicas, spare_warp)
#pragma once

#include "../op.h"

namespace flashrnn::cuda {

enum class Mode : int { kLocal, kCluster, kGrid };

// What bounds the memory of the grid mode: units of a head, units of all heads' tiles of one launch (a call of more is
// several launches), and bytes per unit.
inline constexpr int kLargestGridHead = 4096, kLargestGridUnits = 512 * 256, kGridBytesPerUnit = 128;

// How a cell meets mma.m16n8k16. Rows of R are dealt so that one lane owns all gates of its (unit, row) pairs and needs
// no shuffle before the pointwise part: with 4 gates, 8 units take two m-tiles, rows 0-7 and 8-15 of each being two
// gates; with 3 or 1 gates, 16 units take one m-tile per gate, and the lane of rows g and g + 8 owns units 2g, 2g + 1.
template <int kGates>
struct Tiling {
  static constexpr bool kInterleaved = kGates == 4;
  static constexpr int kUnits = kInterleaved ? 8 : 16;      // of one group of m-tiles
  static constexpr int kTiles = kInterleaved ? 2 : kGates;  // m-tiles of a group
  static constexpr int kUnitsPerLane = kUnits / 8;
};

// Groups of m-tiles whose pointwise part fits side by side into the lanes of a warp. A tile of one or two rows of the
// batch leaves three or two of four lanes without a row: they take other groups, whose sums they hold as well, since
// the columns of h repeat (Lane::source_row). Fewer special-function instructions: 0.02 us per step at D = 64.
constexpr int packed_groups(int groups, int rows) {
  int packed = rows <= 4 ? 4 / rows : 1;
  while (groups % packed != 0) packed /= 2;
  return packed;
}

// Units of one thread in the float32 kernels of the local and the cluster mode.
constexpr int fma_units(int gates) { return gates == 1 ? 4 : 2; }

template <Cell kCell_, DType kType_, bool kClips_, Mode kMode_, int kD_, int kClusterSize_, int kUnitsPerBlock_,
          int kBatchTile_, int kTilesPerBlock_, int kRowWarps_, int kKWarps_, int kRegisterKSteps_,
          int kAccumulatorSets_, int kRingDepth_, int kReplicas_, int kSpareWarp_>
struct Config {
  static constexpr Cell kCell = kCell_;
  static constexpr DType kType = kType_;
  static constexpr bool kClips = kClips_;
  static constexpr Mode kMode = kMode_;
  static constexpr int kD = kD_;  // head_dim with zero rows and columns added
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr int kUnitsPerBlock = kUnitsPerBlock_;
  static constexpr int kRows = kBatchTile_;  // of the batch
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kKWarps = kKWarps_;
  static constexpr int kRegisterKSteps = kRegisterKSteps_;
  static constexpr int kSets = kAccumulatorSets_;
  static constexpr int kRing = kRingDepth_;
  static constexpr int kReplicas = kReplicas_;
  static constexpr bool kSpareWarp = kSpareWarp_ != 0;
  static constexpr int kBlocks = kD / kUnitsPerBlock;     // that share one head and tile of the batch
  static constexpr bool kFma = kType == DType::kFloat32;  // products on the FMA units, not on tensor cores

  static constexpr int kGates = num_gates(kCell), kStates = num_states(kCell);
  using Tile = Tiling<kGates>;
  static constexpr int kTiles = Tile::kTiles;
  static constexpr int kUnitsPerLane = Tile::kUnitsPerLane;

  static constexpr int kWarps = kRowWarps * kKWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroups = kUnitsPerBlock / Tile::kUnits / kRowWarps;  // groups of m-tiles of one warp
  static constexpr int kKSteps = kD / 16 / kKWarps;                          // 16-wide steps of D of one warp
  // Up to 4 rows, row b sits in column 2b of the tile: each lane has one column, half the special-function work.
  static constexpr int kColumns = kRows <= 4 ? 1 : 2;

  // Who does the pointwise part. Warps that share D share the groups out; where there are enough of them, the two
  // columns of a group too.
  static constexpr int kPacked = kMode == Mode::kLocal && !kFma ? packed_groups(kGroups, kRows) : 1;
  static constexpr int kSplit = kMode == Mode::kGrid && kColumns == 2 && 2 * kGroups <= kKWarps ? 2 : 1;
  static constexpr int kOwnedColumns = kColumns / kSplit, kOwnedRows = kRows / kSplit;  // of a lane, and of its warp
  static constexpr int kOwned = (kGroups / kPacked + kKWarps - 1) / kKWarps;            // groups of a lane

  // h in shared memory: one row of the batch after the other, two buffers. The pitch is free of bank conflicts.
  static constexpr int kPitch = kFma ? 4 * kD : 2 * kD + 64;  // bytes
  static constexpr int kHiddenBytes = kRows * kPitch;

  // wx of one lane, group and column, in pieces that are always aligned where head_dim is even.
  static constexpr int kPieceBytes = kGates == 4 ? 8 : 4;
  static constexpr int kPieces = kUnitsPerLane * kGates * 2 / kPieceBytes;
  static constexpr int kWords = kUnitsPerLane * kGates / 2;  // 4-byte words of all pieces

  static_assert(kMode == Mode::kCluster || kClusterSize == 1, "cluster_size is 1 outside the cluster mode");
  static_assert(kD % kUnitsPerBlock == 0, "whole blocks");
  static_assert(kMode == Mode::kGrid || kClusterSize == kBlocks, "a cluster, or a block, holds one head");
  static_assert(kFma || kD % (32 * kKWarps) == 0, "k-steps come in pairs");
  static_assert(kFma || kUnitsPerBlock % (Tile::kUnits * kRowWarps) == 0, "whole groups of units per warp");
  static_assert(!kFma || (kKWarps == 1 && kSets == 1), "not offered in float32");
  static_assert(kRows == 1 || kRows == 2 || kRows == 4 || kRows == 8, "batch_tile is 1, 2, 4 or 8");
  static_assert(kTilesPerBlock_ == 1, "not offered");
  static_assert(kMode == Mode::kGrid || kReplicas == 1, "only the grid mode has copies of h");
  static_assert(kSpareWarp == (kMode == Mode::kLocal && !kFma), "a spare warp feeds the tensor cores' local mode");
  static_assert(kSets == 1 || kSets == 2 || kSets == 4, "1, 2 or 4 accumulator sets");
  static_assert(kRegisterKSteps >= 0 && kRegisterKSteps <= kKSteps && kRegisterKSteps % 2 == 0, "pairs of k-steps");
  static_assert(kWarps <= 8, "more warps lose more at the barriers than they gain");
};

}  // namespace flashrnn::cuda
