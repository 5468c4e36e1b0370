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

// A recurrence is one direction and one head over a tile of at most kMaxRows batch rows: nothing it reads at step s is
// written by another one. Units come in blocks of Isa::lanes; `stride` is that of a row of them.
struct Recurrence {
  const void* wx;                  // row 0, time 0, unit 0, gate 0 of this direction and head
  std::ptrdiff_t wx_time, wx_row;  // in elements
  void* y;
  std::ptrdiff_t y_time, y_row;
  const void* r;                // packed: [block][panel][D][V][lanes], units behind D are 0
  const float* b;               // [Gb][stride]
  float* h[2];                  // [rows][stride], rounded to r's dtype; step s reads h[s % 2] and writes the other
  float* states;                // [S][rows][stride], not rounded
  const std::int64_t* lengths;  // [rows], in 0..T
  std::int64_t T;
  int rows, D;
  std::ptrdiff_t stride;
  bool backward;
  CellOptions options;
};

// Step `step` (0 is the first to run, whatever the direction) of the unit blocks [first_block, last_block).
using Step = void (*)(const Recurrence&, std::int64_t step, int first_block, int last_block);

// V: how many of the G vectors of a unit block stand together in packed R. With 16 registers, accumulators of 6 rows x
// 2 vectors or 4 x 3 leave room for the weights of one k and a broadcast h. 3 x 4 do so too, but cut 16 rows into 6
// tiles of which two have not chains enough.
constexpr int panel_vectors(int G, int registers) { return G == 4 && registers < 32 ? 2 : G; }

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
