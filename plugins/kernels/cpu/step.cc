// One time step of one recurrence. Compiled once per instruction set with FLASHRNN_ISA the table it fills and
// FLASHRNN_ISA_NAME its name.
#include "step.h"

#include <algorithm>
#include <type_traits>

#include "math.h"
#include "product.h"
#include "simd.h"

namespace flashrnn::cpu {
namespace {

// Row 0 of state `s` before step `step` (after it: step + 1). Where h is not rounded, the hidden state is h: its two
// buffers take turns, and no third copy is written. 0.98 times the time of an LSTM's step.
template <class T>
FLASHRNN_SIMD float* state_rows(const Recurrence& rec, int s, std::int64_t step) {
  return s == 0 && !T::kRounds ? rec.h[step & 1] : rec.states + s * rec.rows * rec.stride;
}

// Of wx and y each line is new, and rows lie too far apart for the hardware to guess the next one.
template <class Cell, class T>
FLASHRNN_SIMD Upcoming upcoming_rows(const Recurrence& rec, std::int64_t time, int first_block, int blocks) {
  using Element = typename T::Element;
  constexpr std::ptrdiff_t element = sizeof(Element);
  const std::ptrdiff_t unit = first_block * kLanes, units = blocks * kLanes;
  Upcoming rows;
  rows.add(static_cast<const Element*>(rec.wx) + time * rec.wx_time + unit * Cell::G, rec.wx_row * element,
           units * Cell::G * element);
  rows.add(static_cast<Element*>(rec.y) + time * rec.y_time + unit, rec.y_row * element, units * element);
  return rows;
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

// One unit block of one row of a group, and the walk over the rows of one block after the other. Additions alone lead
// from one to the next: products took 1.05 times the pointwise part's time. `whole`: no row has ended, the blocks are
// full, and nothing is clipped.
template <class Cell, class T, bool whole>
struct Place {
  using Element = typename T::Element;
  Place(const Recurrence& rec, std::int64_t time, int first_block, F* product)
      : wx(static_cast<const Element*>(rec.wx) + time * rec.wx_time + first_block * kLanes * Cell::G),
        y(static_cast<Element*>(rec.y) + time * rec.y_time + first_block * kLanes),
        rh(product),
        at(first_block * kLanes),
        row(0),
        unit(first_block * kLanes) {}

  FLASHRNN_SIMD void next(const Recurrence& rec) {
    wx += rec.wx_row;
    y += rec.y_row;
    rh += kGroupVectors;
    at += rec.stride;
    if (++row == rec.rows) {
      row = 0;
      unit += kLanes;
      wx += kLanes * Cell::G - rec.rows * rec.wx_row;
      y += kLanes - rec.rows * rec.y_row;
      rh += Cell::G - rec.rows * kGroupVectors;
      at += kLanes - rec.rows * rec.stride;
    }
  }
  int units(const Recurrence& rec) const { return whole || rec.D - unit > kLanes ? kLanes : rec.D - unit; }
  bool active(const Recurrence& rec, std::int64_t time) const { return whole || time < rec.lengths[row]; }

  const Element* wx;
  Element* y;
  F* rh;
  std::ptrdiff_t at;  // in h and in each of the states
  int row, unit;
};

// An LSTM's h is made in a second loop over the places of a group: no step of the first loop's chain waits for tanh(c).
// 0.98 times the op's time at D = 128, 0.99 at 256 (AVX2).
template <class Cell, bool whole>
constexpr bool kTwoLoops = whole && std::is_same_v<Cell, Lstm>;

// Cell::step, or its first part, of two places. The sLSTM chooses with ?:, which pairs cannot.
template <class Cell, bool first_part, int G = Cell::G, int Gb = Cell::Gb, int S = Cell::S>
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
    if constexpr (first_part) {
      Cell::template step_c<VectorMath<FF>>(xs, rhs, bs, states, options);
    } else {
      Cell::template step<VectorMath<FF>>(xs, rhs, bs, states, options);
    }
    for (int s = 0; s < S; ++s) state[0][s] = states[s].a, state[1][s] = states[s].b;
  }
}

// What Cell::step takes of one place.
template <class Cell, class T, bool whole>
FLASHRNN_SIMD void read_place(const Recurrence& rec, std::int64_t step, const Place<Cell, T, whole>& place,
                              F (&x)[Cell::G], F (&rh)[Cell::G], F (&b)[Cell::Gb], F (&state)[Cell::S]) {
  read_gates<Cell::G, T>(place.wx, place.units(rec), x);
  for (int g = 0; g < Cell::G; ++g) rh[g] = place.rh[g];
  for (int g = 0; g < Cell::Gb; ++g) b[g] = load<F>(rec.b + g * rec.stride + place.unit);
  for (int s = 0; s < Cell::S; ++s) state[s] = load<F>(state_rows<T>(rec, s, step) + place.at);
}

// New states, the h of the next step and y. Behind the end of a row the states stay and y is 0.
template <class Cell, class T, bool whole>
FLASHRNN_SIMD void write_place(const Recurrence& rec, std::int64_t step, bool active,
                               const Place<Cell, T, whole>& place, const F (&state)[Cell::S]) {
  float* const next_h = rec.h[~step & 1] + place.at;
  F y{};
  if (active) {
    for (int s = T::kRounds ? 0 : 1; s < Cell::S; ++s) store(state_rows<T>(rec, s, step + 1) + place.at, state[s]);
    y = state[0];
    store(next_h, T::round(y));
  } else {
    store(next_h, load<F>(rec.h[step & 1] + place.at));
  }
  write_units<T>(place.y, place.units(rec), y);
}

// Known to the compiler: no branch around each activation.
template <bool whole>
FLASHRNN_SIMD CellOptions options_of(const Recurrence& rec) {
  CellOptions options = rec.options;
  if (whole) options.clip = 0;
  return options;
}

// The pointwise part of two places, which may be the same one. Of two loops the first: what Cell::step_c leaves is put
// in the place of the product.
template <class Cell, class T, bool whole>
FLASHRNN_SIMD void advance(const Recurrence& rec, std::int64_t step, std::int64_t time,
                           const Place<Cell, T, whole>& one, const Place<Cell, T, whole>& other) {
  F x[2][Cell::G], rh[2][Cell::G], b[2][Cell::Gb], state[2][Cell::S];
  read_place(rec, step, one, x[0], rh[0], b[0], state[0]);
  read_place(rec, step, other, x[1], rh[1], b[1], state[1]);
  step_both<Cell, kTwoLoops<Cell, whole>>(x, rh, b, state, options_of<whole>(rec));
  if constexpr (kTwoLoops<Cell, whole>) {
    for (int s = 0; s < Cell::S; ++s) one.rh[s] = state[0][s], other.rh[s] = state[1][s];
  } else {
    write_place(rec, step, one.active(rec, time), one, state[0]);
    write_place(rec, step, other.active(rec, time), other, state[1]);
  }
}

// The second loop's part.
template <class Cell, class T, bool whole>
FLASHRNN_SIMD void finish(const Recurrence& rec, std::int64_t step, const Place<Cell, T, whole>& one,
                          const Place<Cell, T, whole>& other) {
  FF states[Cell::S];
  for (int s = 0; s < Cell::S; ++s) states[s] = {one.rh[s], other.rh[s]};
  Cell::template step_h<VectorMath<FF>>(states, options_of<whole>(rec));
  F state[2][Cell::S];
  for (int s = 0; s < Cell::S; ++s) state[0][s] = states[s].a, state[1][s] = states[s].b;
  write_place(rec, step, true, one, state[0]);
  write_place(rec, step, true, other, state[1]);
}

// Calls visit(one, other) for pairs of places: neighbouring rows, or blocks where there is one row. Pairs of blocks
// throughout: 1.1 times the time. Four at once: 1.25 times, for want of registers.
template <class Cell, class T, bool whole, class Visit>
FLASHRNN_SIMD void for_each_pair(const Recurrence& rec, int blocks, Place<Cell, T, whole> place, const Visit& visit) {
  const int places = rec.rows * blocks;
  for (int i = 0; i < places; i += 2) {
    const Place<Cell, T, whole> one = place;
    if (i + 1 < places) place.next(rec);
    visit(one, place);
    place.next(rec);
  }
}

// How far ahead wx is fetched to L1: its rows come from L2 or farther, and a pair of places takes 60 ns. 0.96 times the
// time of an LSTM's step. The last of a group fetch what the next group begins with, or nothing of use.
constexpr int kPlacesAhead = 8;

template <class Cell, class T, bool whole>
void step_group(const Recurrence& rec, std::int64_t step, std::int64_t time, bool active, int group, int next_group) {
  const int first = rec.first_block(group), blocks = rec.first_block(group + 1) - first;
  F acc[kMaxRows * kGroupVectors];
  if (active) {
    const Upcoming rows = upcoming_rows<Cell, T>(rec, time, first, blocks);
    recurrent_product<T>(rec, rec.h[step & 1], group, next_group, blocks * Cell::G, acc, rows);
  }
  const Recurrence here = rec;  // which no store below can alias: its fields need not be read again
  const Place<Cell, T, whole> begin(here, time, first, acc);
  Place<Cell, T, whole> ahead = begin;
  for (int i = 0; i < kPlacesAhead; ++i) ahead.next(here);
  for_each_pair(here, blocks, begin, [&](const auto& one, const auto& other) __attribute__((always_inline)) {
    for (int j = 0; j < 2; ++j, ahead.next(here)) {
      constexpr int line = kLineBytes / int{sizeof *ahead.wx};
      for (int k = 0; k < kLanes * Cell::G; k += line) __builtin_prefetch(ahead.wx + k, 0, 3);
    }
    advance(here, step, time, one, other);
  });
  if constexpr (kTwoLoops<Cell, whole>) {
    for_each_pair(here, blocks, begin, [&](const auto& one, const auto& other) __attribute__((always_inline)) {
      finish(here, step, one, other);
    });
  }
}

template <class Cell, class T>
void step(const Recurrence& rec, std::int64_t step, int first, int last) {
  const std::int64_t time = rec.backward ? rec.T - 1 - step : step;
  // Most steps need none of the pointwise part's branches. Without them an LSTM of D = 128, B = 16 takes 0.95 times as
  // long, a GRU 0.93.
  bool active = false, whole = rec.D % kLanes == 0 && rec.options.clip == 0.0f;
  for (int row = 0; row < rec.rows; ++row) {
    active |= time < rec.lengths[row];
    whole &= time < rec.lengths[row];
  }
  const auto group_step = whole ? step_group<Cell, T, true> : step_group<Cell, T, false>;
  // Odd steps run through R from its end: what the cache kept of the last step is read first. One thread, fp32, D = 512
  // (4 MB of R over 2 MB of L2): 1.4 times the speed of always running forward.
  for (int i = first; i < last; ++i) {
    const int group = step & 1 ? first + last - 1 - i : i;
    // The last one is the first of the step to come.
    const int next = std::clamp(step & 1 ? group - 1 : group + 1, 0, rec.groups - 1);
    group_step(rec, step, time, active, group, next);
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
