// One time step of one recurrence: the interface between cpu_kernel.cc and the code of each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../cells.cuh"
#include "../op.h"

namespace flashrnn::cpu {

// Batch rows of one recurrence. Tiles of 8 need no synchronisation between two threads at B = 16, yet lost by 1.1 at
// D = 256: each reads all of R.
inline constexpr int kMaxRows = 16;

// Unit blocks of Isa::lanes units are taken in groups of up to 12 vectors, blocks x gates, whatever the cell: a product
// of a matrix, then the pointwise part. The weights of a group are packed in panels of V vectors.
inline constexpr int kGroupVectors = 12;

// Accumulators of 4 rows x 3 vectors fill 3/4 of 16 registers, those of 6 x 4 3/4 of 32; the rest holds the weights of
// one k and a broadcast h. With 16, tiles of 5 x 2 and 6 x 2 load more per product: 1.2 times the time where a
// neighbour on the other hardware thread loads too. 3 x 4 cuts 16 rows into 6 tiles, of which two have not chains
// enough.
constexpr int panel_vectors(int registers) { return registers < 32 ? 3 : 4; }

// A recurrence is one direction and one head over a tile of at most kMaxRows batch rows: nothing it reads at step s is
// written by another one.
struct Recurrence {
  const void* wx;                  // row 0, time 0, unit 0, gate 0 of this direction and head
  std::ptrdiff_t wx_time, wx_row;  // in elements
  void* y;
  std::ptrdiff_t y_time, y_row;
  const void* r;                // packed: [group][12 / V panels][D][V][lanes], 0 where there is no unit
  const float* b;               // [Gb][stride]
  float* h[2];                  // [rows][stride], rounded to r's dtype; step s reads h[s % 2] and writes the other
  float* states;                // [S][rows][stride], not rounded. The first one of float32 is in h from step 0 on
  const std::int64_t* lengths;  // [rows], in 0..T
  std::int64_t T;
  int rows, D, blocks, groups;
  std::ptrdiff_t stride;  // of a row of units
  bool backward;
  CellOptions options;

  // Groups differ by one block at most.
  int first_block(int group) const { return blocks * group / groups; }
};

// Step `step` (0 is the first to run, whatever the direction) of the groups [first, last).
using Step = void (*)(const Recurrence&, std::int64_t step, int first, int last);

struct Isa {
  const char* name;
  int lanes, registers;
  Step step[4][3];                        // [Cell][DType]
  void (*round_h[3])(const Recurrence&);  // [DType]: h[0] from the state h
};

extern const Isa kBaseline;  // SSE2, or NEON on aarch64
#ifdef FLASHRNN_X86
extern const Isa kAvx2;    // with FMA and F16C
extern const Isa kAvx512;  // F, BW, DQ, VL
#endif

const Isa& best_isa();  // the fastest one that this processor runs

}  // namespace flashrnn::cpu
