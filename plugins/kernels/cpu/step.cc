// One time step of one recurrence. Compiled once per instruction set with FLASHRNN_ISA the table it fills and
// FLASHRNN_ISA_NAME its name.
//
// Bitwise rules: each sum over k is one chain of multiply_add in the order of k, whatever tile it sits in. So neither
// the batch tile, nor the chunk of units, nor the number of threads changes a result.
#include "step.h"

#include <type_traits>

#include "math.h"
#include "simd.h"

namespace flashrnn::cpu {
namespace {

// Two multiply_add per cycle with a latency of 4 need 8 independent chains. Accumulators take up to 3/4 of the
// registers; the rest holds the weights of one k and a broadcast h.
constexpr int kAccumulators = kRegisters * 3 / 4;

template <int G>
constexpr int kPanelVectors = panel_vectors(G, kRegisters);

// An even number for one row: the pointwise part takes places in pairs.
template <int G, bool one_row>
constexpr int kBlocksPerTile = one_row ? 2 * ((8 + 2 * G - 1) / (2 * G)) : (G == 1 ? 4 : 1);

// k in one pass over a panel that several row tiles share: the panel and h of all rows stay in L1 (AVX2 8 + 8 KB of 32,
// AVX-512 32 + 8 of 48). D = 512, AVX2: twice as many take 1.15 times as long.
constexpr int kPassLength = 128;

// R of a head beyond this is on its way to L2 one pass ahead. At D = 512, B = 16 with AVX-512 0.87 times the time
// without; for an R that L2 holds 1.05.
constexpr std::ptrdiff_t kPrefetchBytes = 2 << 20;
constexpr int kLineBytes = 64;

// The part of R for one pass over k.
template <class Element>
struct Pass {
  const Element* r;
  std::ptrdiff_t panel;  // elements between panels
  int num_k;
  const char* next;  // what to prefetch meanwhile
};

// Length of a chain of the sum over k. A single chain of D has twice the error at D = 100 (and fails the project's
// tolerance); the additions of the chains cost 1/32 of the arithmetic.
constexpr int kChain = 32;

// sum[panel][row][v] += h[row] r[panel][v] at one k, or = where it is the first.
template <class T, int V, int panels, int rows, bool first>
FLASHRNN_SIMD void add_product(const typename T::Element* r, std::ptrdiff_t panel, const float* h, std::ptrdiff_t h_row,
                               F (&sum)[panels][rows][V]) {
  F weight[panels][V];
#pragma GCC unroll 32
  for (int i = 0; i < panels * V; ++i) weight[i / V][i % V] = T::read(r + i / V * panel + i % V * kLanes);
#pragma GCC unroll 32
  for (int row = 0; row < rows; ++row) {
    const F hk = broadcast(h[row * h_row]);
#pragma GCC unroll 32
    for (int i = 0; i < panels * V; ++i) {
      F& to = sum[i / V][row][i % V];
      to = first ? hk * weight[i / V][i % V] : multiply_add(hk, weight[i / V][i % V], to);
    }
  }
}

// acc[panel][row][v] += sum over k in [0, num_k) of h[row][k] r[panel][k][v], while `lines` lines per k are prefetched.
// Written for few instructions: a neighbour on the core's other hardware thread leaves three a cycle.
template <class T, int V, int panels, int rows, int lines>
void multiply(Pass<typename T::Element> pass, const float* h, std::ptrdiff_t h_row, F* acc, std::ptrdiff_t acc_panel) {
  const float* const end = h + pass.num_k;
  while (h != end) {
    const float* const chain_end = end - h > kChain ? h + kChain : end;
    F sum[panels][rows][V];
    add_product<T, V, panels, rows, true>(pass.r, pass.panel, h, h_row, sum);
    for (++h, pass.r += V * kLanes; h != chain_end; ++h, pass.r += V * kLanes) {
#pragma GCC unroll 32
      for (int i = 0; i < lines; ++i) __builtin_prefetch(pass.next + i * kLineBytes, 0, 2);
      pass.next += lines * kLineBytes;
      add_product<T, V, panels, rows, false>(pass.r, pass.panel, h, h_row, sum);
    }
#pragma GCC unroll 32
    for (int i = 0; i < panels * rows * V; ++i) {
      const int panel = i / (rows * V), at = i % (rows * V);
      acc[panel * acc_panel + at] += sum[panel][at / V][at % V];
    }
  }
}

template <class T, int V, int panels, int lines, int max_rows>
FLASHRNN_SIMD void multiply_rows(int rows, const Pass<typename T::Element>& pass, const float* h, std::ptrdiff_t h_row,
                                 F* acc, std::ptrdiff_t acc_panel) {
  if (rows == max_rows) {
    if (lines > 0 && pass.next != nullptr) {
      multiply<T, V, panels, max_rows, lines>(pass, h, h_row, acc, acc_panel);
    } else {
      multiply<T, V, panels, max_rows, 0>(pass, h, h_row, acc, acc_panel);
    }
  } else if constexpr (max_rows > 1) {
    multiply_rows<T, V, panels, lines, max_rows - 1>(rows, pass, h, h_row, acc, acc_panel);
  }
}

// recurrent_product with `panels` of the tile's panels in each pass.
template <class T, int G, int blocks, int panels>
void multiply_panels(const Recurrence& rec, const float* h, int block, int next_block, F* acc) {
  using Element = typename T::Element;
  constexpr int V = kPanelVectors<G>, most = kAccumulators / (panels * V);
  constexpr int tile_rows = most < kMaxRows ? most : kMaxRows, max_tiles = (kMaxRows + tile_rows - 1) / tile_rows;
  // The lines of the next pass are spread over the row tiles, as evenly as whole numbers per k can; the last ones take
  // them if there are fewer than tiles.
  constexpr int pass_lines = (panels * V * kLanes * int{sizeof(Element)} + kLineBytes - 1) / kLineBytes;
  constexpr int lines = max_tiles == 1 ? 0 : (pass_lines + max_tiles - 1) / max_tiles;
  constexpr int tiles_ahead = lines == 0 ? 0 : (pass_lines + lines - 1) / lines;

  const std::ptrdiff_t r_panel = std::ptrdiff_t{rec.D} * V * kLanes, r_block = r_panel * (G / V);
  const Element* r = static_cast<const Element*>(rec.r);
  const int tiles = (rec.rows + tile_rows - 1) / tile_rows, pass_k = tiles == 1 ? rec.D : kPassLength;
  const bool ahead = tiles > 1 && rec.D / kLanes * r_block * std::ptrdiff_t{sizeof(Element)} > kPrefetchBytes;
  for (int panel = 0; panel < blocks * G / V; panel += panels) {
    for (int k = 0; k < rec.D; k += pass_k) {
      const Element* here = r + block * r_block + panel * r_panel + std::ptrdiff_t{k} * V * kLanes;
      const bool last_k = rec.D - k <= pass_k, last = last_k && panel + panels == blocks * G / V;
      Pass<Element> pass{here, r_panel, last_k ? rec.D - k : pass_k, nullptr};
      const char* next = reinterpret_cast<const char*>(last ? r + next_block * r_block : here + pass_k * V * kLanes);
      for (int tile = 0; tile < tiles; ++tile) {  // of equal height, give or take one row
        const int row = rec.rows * tile / tiles, rows = rec.rows * (tile + 1) / tiles - row;
        if (ahead && tile >= tiles - tiles_ahead) {
          pass.next = next;
          next += pass.num_k * lines * kLineBytes;
        }
        multiply_rows<T, V, panels, lines, tile_rows>(rows, pass, h + row * rec.stride + k, rec.stride,
                                                      acc + (panel * rec.rows + row) * V, rec.rows * V);
      }
    }
  }
}

// acc[panel][row][v] = (R h')[row, panel, v] for `blocks` neighbouring unit blocks from `block` on. Few rows
// multiply all panels at once, to have chains enough.
template <class T, int G, int blocks>
void recurrent_product(const Recurrence& rec, const float* h, int block, int next_block, F* acc) {
  constexpr int panels = blocks * G / kPanelVectors<G>, few_rows = kAccumulators / (blocks * G);
  for (int i = 0; i < rec.rows * blocks * G; ++i) acc[i] = F{};
  if (G == 1 || rec.rows <= few_rows) {
    multiply_panels<T, G, blocks, panels>(rec, h, block, next_block, acc);
  } else {
    multiply_panels<T, G, blocks, G == 1 ? panels : 1>(rec, h, block, next_block, acc);
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
  deinterleave(in, x);
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

// One unit block of one row.
template <class T>
struct Place {
  using Element = typename T::Element;
  Place(const Recurrence& rec, std::int64_t time, int row, int block, int G, const F* product)
      : wx(static_cast<const Element*>(rec.wx) + time * rec.wx_time + row * rec.wx_row + block * kLanes * G),
        y(static_cast<Element*>(rec.y) + time * rec.y_time + row * rec.y_row + block * kLanes),
        rh(product),
        unit(block * kLanes),
        units(rec.D - unit < kLanes ? rec.D - unit : kLanes),
        at(row * rec.stride + unit),
        active(time < rec.lengths[row]) {}

  const Element* wx;
  Element* y;
  const F* rh;        // [panel][rec.rows][V]
  int unit, units;    // the first, and how many exist
  std::ptrdiff_t at;  // in h and in each of the states
  bool active;
};

// Cell::step of two places. The sLSTM chooses with ?:, which pairs cannot.
template <class Cell, int G = Cell::G, int Gb = Cell::Gb, int S = Cell::S>
FLASHRNN_SIMD void step_both(const F (&x)[2][G], const F (&rh)[2][G], const F (&b)[2][Gb], F (&state)[2][S],
                             const CellOptions& options) {
  if constexpr (std::is_same_v<Cell, Slstm>) {
    for (int i = 0; i < 2; ++i) Cell::template step<VectorMath<F>>(x[i], rh[i], b[i], state[i], options);
  } else {
    FF xs[G], rhs[G], bs[Gb], states[S];
    for (int g = 0; g < G; ++g) xs[g] = {x[0][g], x[1][g]};
    for (int g = 0; g < G; ++g) rhs[g] = {rh[0][g], rh[1][g]};
    for (int g = 0; g < Gb; ++g) bs[g] = {b[0][g], b[1][g]};
    for (int s = 0; s < S; ++s) states[s] = {state[0][s], state[1][s]};
    Cell::template step<VectorMath<FF>>(xs, rhs, bs, states, options);
    for (int s = 0; s < S; ++s) state[0][s] = states[s].a, state[1][s] = states[s].b;
  }
}

// What Cell::step takes of one place.
template <class Cell, class T>
FLASHRNN_SIMD void read_place(const Recurrence& rec, const Place<T>& place, F (&x)[Cell::G], F (&rh)[Cell::G],
                              F (&b)[Cell::Gb], F (&state)[Cell::S]) {
  read_gates<Cell::G, T>(place.wx, place.units, x);
  constexpr int V = kPanelVectors<Cell::G>;
  for (int g = 0; g < Cell::G; ++g) rh[g] = place.rh[g / V * rec.rows * V + g % V];
  for (int g = 0; g < Cell::Gb; ++g) b[g] = load<F>(rec.b + g * rec.stride + place.unit);
  for (int s = 0; s < Cell::S; ++s) state[s] = load<F>(rec.states + s * rec.rows * rec.stride + place.at);
}

// New states, the next h and y. Behind the end of a row the states stay and y is 0.
template <class Cell, class T>
FLASHRNN_SIMD void write_place(const Recurrence& rec, const Place<T>& place, const F (&state)[Cell::S], const float* h,
                               float* next_h) {
  F y{};
  if (place.active) {
    for (int s = 0; s < Cell::S; ++s) store(rec.states + s * rec.rows * rec.stride + place.at, state[s]);
    y = state[0];
    store(next_h + place.at, T::round(y));
  } else {
    store(next_h + place.at, load<F>(h + place.at));
  }
  write_units<T>(place.y, place.units, y);
}

// The pointwise part of two places, which may be the same one.
template <class Cell, class T>
FLASHRNN_SIMD void advance(const Recurrence& rec, const Place<T>& one, const Place<T>& other, const float* h,
                           float* next_h) {
  F x[2][Cell::G], rh[2][Cell::G], b[2][Cell::Gb], state[2][Cell::S];
  read_place<Cell>(rec, one, x[0], rh[0], b[0], state[0]);
  read_place<Cell>(rec, other, x[1], rh[1], b[1], state[1]);
  step_both<Cell>(x, rh, b, state, rec.options);
  write_place<Cell>(rec, one, state[0], h, next_h);
  write_place<Cell>(rec, other, state[1], h, next_h);
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
  const Recurrence here = rec;  // which no store below can alias: its fields stay in registers
  const auto place = [&](int i) {
    const int row = i / blocks, at = i % blocks;
    return Place<T>(here, time, row, block + at, Cell::G,
                    acc + at * Cell::G * here.rows + row * kPanelVectors<Cell::G>);
  };
  const int places = here.rows * blocks;
  for (int i = 0; i < places; i += 2) {
    advance<Cell>(here, place(i), place(i + 1 < places ? i + 1 : i), h, next_h);
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
    kRegisters,
    {FLASHRNN_STEPS(Lstm), FLASHRNN_STEPS(Gru), FLASHRNN_STEPS(Elman), FLASHRNN_STEPS(Slstm)},
    {round_h<Float32>, round_h<Float16>, round_h<Bfloat16>},
};

}  // namespace flashrnn::cpu
