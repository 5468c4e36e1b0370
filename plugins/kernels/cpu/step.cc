// One time step of one recurrence. Compiled once per instruction set with FLASHRNN_ISA the table it fills and
// FLASHRNN_ISA_NAME its name.
//
// Bitwise rules: each sum over k is one chain of multiply_add in the order of k, whatever tile it sits in. So neither
// the batch tile, nor the chunk of units, nor the number of threads changes a result.
#include "step.h"

#include "math.h"
#include "simd.h"

namespace flashrnn::cpu {
namespace {

// Two multiply_add per cycle with a latency of 4 need 8 independent chains: one row of a 4-gate cell takes two blocks.
// Accumulators stay within 3/4 of the registers; the rest holds the weight and the broadcast h.
template <int G, bool one_row>
constexpr int kBlocksPerTile = one_row ? (8 + G - 1) / G : (G == 1 ? 4 : 1);
template <int G, int blocks>
constexpr int kRowsPerTile =
    blocks == kBlocksPerTile<G, true> ? 1 : kRegisters * 3 / 4 / (G * kBlocksPerTile<G, false>);

// Bytes of packed R that one pass over k may take from L1 when several row tiles share them.
constexpr int kPanelBytes = 32 * 1024;

// R of a head beyond this is on its way to L2 one panel ahead, a few lines per k in every pass over the panel. At
// D = 512, B = 16 0.87 times the speed without, 0.90 with all of it in the last pass; for an R that L2 holds 0.95.
constexpr std::ptrdiff_t kPrefetchBytes = 2 << 20;
constexpr int kPrefetchLines = 2, kLineBytes = 64;

// The part of R for one pass over k.
template <class Element>
struct Panel {
  const Element* r;
  const char* next;      // what to prefetch meanwhile, or null
  std::ptrdiff_t block;  // elements between unit blocks
  int num_k;
};

// Length of a chain of the sum over k. A single chain of D has twice the error at D = 100 (and fails the project's
// tolerance); the additions of the chains cost 1/32 of the arithmetic.
constexpr int kChain = 32;

// acc[row][block][gate] += sum over k in [0, num_k) of h[row][k] r[block][k][gate].
template <class T, int G, int blocks, int rows, bool prefetch>
void multiply(const Panel<typename T::Element>& panel, const float* h, std::ptrdiff_t h_row, F* acc) {
  for (int begin = 0; begin < panel.num_k; begin += kChain) {
    const int end = begin + kChain < panel.num_k ? begin + kChain : panel.num_k;
    F sum[rows][blocks][G] = {};
    for (int k = begin; k < end; ++k) {
      if constexpr (prefetch) {
#pragma GCC unroll 32
        for (int i = 0; i < kPrefetchLines; ++i) {
          __builtin_prefetch(panel.next + (k * kPrefetchLines + i) * kLineBytes, 0, 2);
        }
      }
      F hk[rows];
#pragma GCC unroll 32
      for (int row = 0; row < rows; ++row) hk[row] = broadcast(h[row * h_row + k]);
#pragma GCC unroll 32
      for (int block = 0; block < blocks; ++block) {
#pragma GCC unroll 32
        for (int g = 0; g < G; ++g) {
          const std::ptrdiff_t at = block * panel.block + (std::ptrdiff_t{k} * G + g) * kLanes;
          const F weight = T::read(panel.r + at);
#pragma GCC unroll 32
          for (int row = 0; row < rows; ++row) sum[row][block][g] = multiply_add(hk[row], weight, sum[row][block][g]);
        }
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows * blocks * G; ++i) acc[i] += sum[i / (blocks * G)][i / G % blocks][i % G];
  }
}

template <class T, int G, int blocks, int max_rows>
FLASHRNN_SIMD void multiply_rows(int rows, const Panel<typename T::Element>& panel, const float* h,
                                 std::ptrdiff_t h_row, F* acc) {
  if (rows == max_rows) {
    if (panel.next != nullptr) {
      multiply<T, G, blocks, max_rows, true>(panel, h, h_row, acc);
    } else {
      multiply<T, G, blocks, max_rows, false>(panel, h, h_row, acc);
    }
  } else if constexpr (max_rows > 1) {
    multiply_rows<T, G, blocks, max_rows - 1>(rows, panel, h, h_row, acc);
  }
}

// acc[row][block][gate] = (R h')[row, block, gate] for `blocks` neighbouring unit blocks from `block` on.
template <class T, int G, int blocks>
void recurrent_product(const Recurrence& rec, const float* h, int block, int next_block, F* acc) {
  using Element = typename T::Element;
  constexpr int tile_rows = kRowsPerTile<G, blocks>;
  const std::ptrdiff_t r_block = std::ptrdiff_t{rec.D} * G * kLanes;
  const Element* r = static_cast<const Element*>(rec.r);
  for (int i = 0; i < rec.rows * blocks * G; ++i) acc[i] = F{};
  const int tiles = (rec.rows + tile_rows - 1) / tile_rows;
  const int panel_k = tiles == 1 ? rec.D : kPanelBytes / int{blocks * G * kLanes * sizeof(Element)} / kChain * kChain;
  const bool ahead = tiles > 1 && G * rec.D * rec.stride * std::ptrdiff_t{sizeof(Element)} > kPrefetchBytes;
  for (int k = 0; k < rec.D; k += panel_k) {
    const Element* here = r + block * r_block + std::ptrdiff_t{k} * G * kLanes;
    const bool last = rec.D - k <= panel_k;
    Panel<Element> panel{here, nullptr, r_block, last ? rec.D - k : panel_k};
    if (ahead) {
      const Element* next = last ? r + next_block * r_block : here + std::ptrdiff_t{panel_k} * G * kLanes;
      panel.next = reinterpret_cast<const char*>(next);
    }
    for (int tile = 0; tile < tiles; ++tile) {  // of equal height, give or take one row
      const int row = rec.rows * tile / tiles, rows = rec.rows * (tile + 1) / tiles - row;
      multiply_rows<T, G, blocks, tile_rows>(rows, panel, h + row * rec.stride + k, rec.stride, acc + row * blocks * G);
      if (ahead) panel.next += panel.num_k * kPrefetchLines * kLineBytes;
    }
  }
}

// What the pointwise part of a tile will touch, fetched to L2 while its product runs. Rows of wx and y lie too far
// apart for the hardware to guess, and a large R drives the states out of L2 at every step.
template <class Cell, class T, int blocks>
FLASHRNN_SIMD void prefetch_tile(const Recurrence& rec, std::int64_t time, int block) {
  using Element = typename T::Element;
  const int unit = block * kLanes;
  for (int row = 0; row < rec.rows; ++row) {
    const auto* wx = static_cast<const Element*>(rec.wx) + time * rec.wx_time + row * rec.wx_row + unit * Cell::G;
    const char* lines = reinterpret_cast<const char*>(wx);
#pragma GCC unroll 32
    for (int at = 0; at < blocks * kLanes * Cell::G * int{sizeof(Element)}; at += kLineBytes) {
      __builtin_prefetch(lines + at, 0, 2);
    }
    for (int s = 0; s < Cell::S; ++s) {
      __builtin_prefetch(rec.states + (s * rec.rows + row) * rec.stride + unit, 1, 2);
    }
    __builtin_prefetch(static_cast<Element*>(rec.y) + time * rec.y_time + row * rec.y_row + unit, 1, 2);
  }
}

// One vector per gate from [unit][gate] in memory, of which `units` exist.
template <int G, class T, class Element = typename T::Element>
FLASHRNN_SIMD void read_gates(const Element* from, int units, F (&x)[G]) {
  Element padded[G * kLanes];
  if (units < kLanes) {
    for (int i = 0; i < G * kLanes; ++i) padded[i] = i < units * G ? from[i] : Element{0};
    from = padded;
  }
  F in[G];
  for (int g = 0; g < G; ++g) in[g] = T::read(from + g * kLanes);
  deinterleave<G>(in, x);
}

template <class T, class Element = typename T::Element>
FLASHRNN_SIMD void write_units(Element* to, int units, F x) {
  if (units == kLanes) {
    T::write(to, x);
  } else {
    Element padded[kLanes];
    T::write(padded, x);
    for (int i = 0; i < units; ++i) to[i] = padded[i];
  }
}

// The pointwise part of one row and unit block: new states, the next h and y.
template <class Cell, class T>
FLASHRNN_SIMD void advance(const Recurrence& rec, std::int64_t time, int row, int block, const float* h, float* next_h,
                           const F* acc) {
  using Element = typename T::Element;
  constexpr int G = Cell::G;
  const int unit = block * kLanes, units = rec.D - unit < kLanes ? rec.D - unit : kLanes;
  const std::ptrdiff_t at = row * rec.stride + unit;
  F result{};
  if (time < rec.lengths[row]) {
    F x[G], rh[G], b[Cell::Gb], state[Cell::S];
    const Element* wx = static_cast<const Element*>(rec.wx) + time * rec.wx_time + row * rec.wx_row + unit * G;
    read_gates<G, T>(wx, units, x);
    for (int g = 0; g < G; ++g) rh[g] = acc[g];
    for (int g = 0; g < Cell::Gb; ++g) b[g] = load<F>(rec.b + g * rec.stride + unit);
    for (int s = 0; s < Cell::S; ++s) state[s] = load<F>(rec.states + s * rec.rows * rec.stride + at);
    Cell::template step<VectorMath>(x, rh, b, state, rec.options);
    for (int s = 0; s < Cell::S; ++s) store(rec.states + s * rec.rows * rec.stride + at, state[s]);
    result = state[0];
    store(next_h + at, T::round(result));
  } else {
    store(next_h + at, load<F>(h + at));
  }
  write_units<T>(static_cast<Element*>(rec.y) + time * rec.y_time + row * rec.y_row + unit, units, result);
}

template <class Cell, class T, int blocks>
void step_tile(const Recurrence& rec, std::int64_t step, std::int64_t time, bool active, int block, int next_block) {
  const float* h = rec.h[step & 1];
  float* next_h = rec.h[~step & 1];
  F acc[kMaxRows * blocks * Cell::G];
  if (active) {
    prefetch_tile<Cell, T, blocks>(rec, time, block);
    recurrent_product<T, Cell::G, blocks>(rec, h, block, next_block, acc);
  }
  for (int row = 0; row < rec.rows; ++row) {
    for (int i = 0; i < blocks; ++i) {
      advance<Cell, T>(rec, time, row, block + i, h, next_h, acc + (row * blocks + i) * Cell::G);
    }
  }
}

template <class Cell, class T, int blocks>
void step_blocks(const Recurrence& rec, std::int64_t step, int first, int last) {
  const std::int64_t time = rec.backward ? rec.T - 1 - step : step;
  bool active = false;
  for (int row = 0; row < rec.rows; ++row) active |= time < rec.lengths[row];
  // Odd steps run through R from its end: what the cache kept of the last step is read first. One thread, fp32, D = 512
  // (4 MB of R over 2 MB of L2): 1.4 times the speed of always running forward.
  const int whole = (last - first) / blocks, tiles = whole + (last - first) % blocks;
  const auto block_of = [&](int tile) { return first + (tile < whole ? tile * blocks : whole * (blocks - 1) + tile); };
  for (int i = 0; i < tiles; ++i) {
    const int tile = step & 1 ? tiles - 1 - i : i;
    const int next = i + 1 == tiles ? tile : step & 1 ? tile - 1 : tile + 1;
    if (tile < whole) {
      step_tile<Cell, T, blocks>(rec, step, time, active, block_of(tile), block_of(next));
    } else {
      step_tile<Cell, T, 1>(rec, step, time, active, block_of(tile), block_of(next));
    }
  }
}

template <class Cell, class T>
void step(const Recurrence& rec, std::int64_t step, int first, int last) {
  if (rec.rows == 1) {
    step_blocks<Cell, T, kBlocksPerTile<Cell::G, true>>(rec, step, first, last);
  } else {
    step_blocks<Cell, T, kBlocksPerTile<Cell::G, false>>(rec, step, first, last);
  }
}

template <class T>
void round_h(const Recurrence& rec) {
  for (std::ptrdiff_t i = 0; i < rec.rows * rec.stride; i += kLanes) {
    store(rec.h[0] + i, T::round(load<F>(rec.states + i)));
  }
}

}  // namespace

#define FLASHRNN_STEPS(cell) {step<cell, Float32>, step<cell, Float16>, step<cell, Bfloat16>}
const Isa FLASHRNN_ISA = {
    FLASHRNN_ISA_NAME,
    kLanes,
    {FLASHRNN_STEPS(Lstm), FLASHRNN_STEPS(Gru), FLASHRNN_STEPS(Elman), FLASHRNN_STEPS(Slstm)},
    {round_h<Float32>, round_h<Float16>, round_h<Bfloat16>},
};

}  // namespace flashrnn::cpu
