// How a call of the alternating mode is divided over the blocks of a device, and which way is faster. Plain C++, so
// that a test can hold flashrnn_deploy/alternating_model.py, which predicts the same, to it.
#pragma once

#include <cstdint>

namespace flashrnn::cuda {

inline constexpr int kHalfUnits = 8;  // a block has whole groups of so many units

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// Blocks share the units of a head first, which divides R too, and then the batch, in tiles of so many rows.
struct Division {
  int units;        // of a block, a multiple of 8; the last block of a head may have fewer
  int unit_blocks;  // of one head and range of the batch; they exchange h
  int ranges;       // of the batch
  int range_rows;
};

constexpr Division divide(std::int64_t heads, int D, int B, int rows, int processors) {
  const std::int64_t groups = ceil_div(D, kHalfUnits), tiles = ceil_div(B, rows);
  const std::int64_t each = ceil_div(groups, clamp(processors / heads, 1, groups)), blocks = ceil_div(groups, each);
  const std::int64_t tiles_each = ceil_div(tiles, clamp(processors / (heads * blocks), 1, tiles));
  const std::int64_t range_rows = tiles_each * rows < B ? tiles_each * rows : B;
  return {static_cast<int>(each * kHalfUnits), static_cast<int>(blocks), static_cast<int>(ceil_div(tiles, tiles_each)),
          static_cast<int>(range_rows)};
}

// How often a block runs through D in a step: for each pass of its units, for each tile of the batch.
constexpr int turns(const Division& d, int pass_units, int rows) {
  return static_cast<int>(ceil_div(d.units, pass_units) * ceil_div(d.range_rows, rows));
}

// What a run through D takes, us on an H200: the start, and each slice.
struct TurnCost {
  double start, slice;
};
inline constexpr TurnCost kStreamingCost{1.0, 0.7}, kTiledCost{3.0, 0.5};

// us of a step on an H200, scaled by the multiprocessors: by one kernel for all steps, and by one kernel per step,
// which reads R from memory but has all rows of the batch in flight. Fitted to some 40 and 120 layers, within a third.
constexpr double all_steps_us(std::int64_t heads, const Division& d, int turns, TurnCost turn, std::int64_t slices,
                              int processors) {
  const std::int64_t at_once = clamp(processors / d.unit_blocks, 1, heads * d.ranges);
  const double launches = static_cast<double>(ceil_div(heads * d.ranges, at_once));
  return 1.5 + launches * turns * (turn.start + turn.slice * static_cast<double>(slices));
}
constexpr double per_step_us(std::int64_t heads, int D, int B, int gates, int element_bytes, int processors) {
  const double units = static_cast<double>(heads) * D / processors,
               tiles = B > 1 ? static_cast<double>(ceil_div(B, 8)) : 0;
  // Cycles of a multiprocessor for a unit and 8 rows: the products, or where D is small adding up a warp's lanes.
  const double products = 0.2614 * gates * D, sums = 170 + 105 * gates, cycles = products > sums ? products : sums;
  const double arithmetic = units * tiles * cycles / 1980, memory = units * D * gates * element_bytes * 132 / 4e6;
  return 4.0 + (arithmetic > memory ? arithmetic : memory);
}

}  // namespace flashrnn::cuda
