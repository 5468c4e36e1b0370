// The recurrent product R h' of one group of unit blocks, for all rows.
//
// Bitwise rules: each sum over k is cut into chains at the same k, and each chain is one multiply_add after the other,
// whatever tile it sits in. So neither the batch tile, nor the group, nor the number of threads changes a result.
#pragma once

#include <algorithm>

#include "simd.h"
#include "step.h"

namespace flashrnn::cpu {
namespace {

constexpr int kPanelVectors = panel_vectors(kRegisters);
// Rows of a tile of `columns` vectors: its sums fill 3/4 of the registers.
constexpr int tile_rows(int columns) { return kRegisters * 3 / 4 / columns; }
// Two blocks of an LSTM are 8 vectors, 3 + 3 + 2 (AVX2). A last panel that lacks a vector is taken as this many, in
// taller tiles: with tiles of 4 x 2 an LSTM's step takes 1.01 times as long at D = 256, of 4 x 3 1.02.
constexpr int kNarrowVectors = kPanelVectors - 1;

// Two multiply_add per cycle with a latency of 4 need 8 independent chains: one row takes several panels at once.
constexpr int panels_at_once(int rows) { return rows * kPanelVectors >= 8 ? 1 : 12 / (rows * kPanelVectors); }

// Length of a chain of the sum over k. Chains of 32 take 1.04 times the product's time (AVX2). A single chain of D has
// twice the error at D = 100 (and fails the project's tolerance); with 64 the error is at most 0.7 of the tolerance.
constexpr int kChain = 64;

// k in one pass over a panel that several row tiles share: the panel, h of all rows and the panel to come stay in L1.
// Passes of two chains take 1.01 times an LSTM's step at D = 256 and 512 (AVX2).
constexpr int kPassLength = kChain;

// R of a head beyond this is on its way to L2 one pass ahead. At D = 512, B = 16 with AVX-512 0.87 times the time
// without; for an R that L2 holds 1.05, and for 1 MB beside 0.5 MB of L2 1.03 (AVX2).
constexpr std::ptrdiff_t kPrefetchBytes = 2 << 20;
constexpr int kLineBytes = 64;

// Rows of wx and y that will be wanted after the product, and are fetched to L2 while it runs: a few at a time. A
// processor drops requests when too many are open. Asked for all at once, one line in 16 came too late, and a step of
// an LSTM took 1.02 (wx just written) to 1.06 times as long (Zen 3, B = 16). The states too: 1.01.
class Upcoming {
 public:
  FLASHRNN_SIMD void add(const void* first, std::ptrdiff_t row_bytes, std::ptrdiff_t bytes) {
    arrays_[count_++] = {static_cast<const char*>(first), row_bytes, bytes};
  }
  FLASHRNN_SIMD void fetch(int first, int last) const {
    for (int row = first; row < last; ++row) {
      for (int i = 0; i < count_; ++i) {
        const char* from = arrays_[i].first + row * arrays_[i].row_bytes;
        for (std::ptrdiff_t at = 0; at < arrays_[i].bytes; at += kLineBytes) __builtin_prefetch(from + at, 0, 2);
      }
    }
  }

 private:
  struct {
    const char* first;
    std::ptrdiff_t row_bytes, bytes;
  } arrays_[2];
  int count_ = 0;
};

// The part of R for one pass over k.
template <class Element>
struct Pass {
  const Element* r;
  std::ptrdiff_t panel;  // elements between panels
  int num_k;
  const char* next;  // what to prefetch meanwhile, or null
  bool fresh;        // acc holds nothing yet
};

// sum += a b. With several rows GCC would move the sums of an unrolled loop from register to register and to the stack;
// inline assembly keeps each in one.
template <bool in_place>
FLASHRNN_SIMD void accumulate(F& sum, F a, F b) {
#ifdef __AVX2__
  if constexpr (in_place) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return;
  }
#endif
  sum = multiply_add(a, b, sum);
}

// sum[row][column] += h[row][k] r[k][column] at one k, or = where it is the first. Columns are the vectors of one panel
// after the other.
template <class T, bool first, int rows, int columns>
FLASHRNN_SIMD void add_product(const typename T::Element* r, std::ptrdiff_t panel, const float* const (&h)[rows], int k,
                               F (&sum)[rows][columns]) {
  constexpr int V = kPanelVectors;
  F weight[columns];
#pragma GCC unroll 32
  for (int i = 0; i < columns; ++i) weight[i] = T::read(r + (k * V + i % V) * kLanes + i / V * panel);
#pragma GCC unroll 32
  for (int row = 0; row < rows; ++row) {
    const F hk = broadcast(h[row][k]);
#pragma GCC unroll 32
    for (int i = 0; i < columns; ++i) {
      if constexpr (first) {
        sum[row][i] = hk * weight[i];
      } else {
        accumulate<(rows > 1)>(sum[row][i], hk, weight[i]);
      }
    }
  }
}

// A pointer that GCC cannot replace by another one and an offset: rows that were offsets from one base took a register
// each for every k of an unrolled loop.
FLASHRNN_SIMD const float* opaque(const float* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

// acc[row][column] += sum over k in [0, num_k) of h[row][k] r[k][column], while `lines` lines per k are prefetched.
// Written for few instructions, of which the loop is bound where a neighbour has the core's other hardware thread: nine
// k per turn take 0.98 times an LSTM's step at D = 256. The first chain of all is stored: to add it to zeros, written
// before, takes 0.02 of a step (D = 128, B = 16). Inlined into its caller it keeps fewer things in registers: 1.01.
// `pass` by value, on the stack: 1.02.
template <class T, int columns, int rows, int lines>
__attribute__((noinline)) void multiply(const Pass<typename T::Element>& pass, const float* h, std::ptrdiff_t h_row,
                                        F* acc) {
  constexpr int unroll = rows > 1 ? 9 : 1;  // a chain is its first k and 7 x 9
  const float* const end = h + pass.num_k;
  const float* const fresh = pass.fresh ? h : nullptr;  // from a flag that changes GCC makes two copies of the loop
  const typename T::Element* r = pass.r;
  const char* next = pass.next;
  while (h != end) {
    const bool store_sum = h == fresh;
    const float* at[rows];
#pragma GCC unroll 32
    for (int row = 0; row < rows; ++row) at[row] = opaque(h + row * h_row);
    const auto advance = [&](int k) __attribute__((always_inline)) {
#pragma GCC unroll 32
      for (int row = 0; row < rows; ++row) at[row] += k;
      r += k * kPanelVectors * kLanes;
    };
    const auto add = [&](F(&sum)[rows][columns], int k) __attribute__((always_inline)) {
#pragma GCC unroll 32
      for (int i = 0; i < lines; ++i) __builtin_prefetch(next + i * kLineBytes, 0, 2);
      next += lines * kLineBytes;
      add_product<T, false>(r, pass.panel, at, k, sum);
    };
    F sum[rows][columns];
    add_product<T, true>(r, pass.panel, at, 0, sum);
    advance(1);
    const std::ptrdiff_t chain = end - h > kChain ? kChain : end - h;
    std::ptrdiff_t left = chain - 1;
    for (; left >= unroll; left -= unroll) {
#pragma GCC unroll 32
      for (int k = 0; k < unroll; ++k) add(sum, k);
      advance(unroll);
    }
    for (; unroll > 1 && left > 0; --left) {
      add(sum, 0);
      advance(1);
    }
    h += chain;
    if (store_sum) {
#pragma GCC unroll 32
      for (int i = 0; i < rows * columns; ++i)
        acc[i / columns * kGroupVectors + i % columns] = sum[i / columns][i % columns];
    } else {
#pragma GCC unroll 32
      for (int i = 0; i < rows * columns; ++i)
        acc[i / columns * kGroupVectors + i % columns] += sum[i / columns][i % columns];
    }
  }
}

// multiply() for `rows` <= max_rows rows and the first `vectors` vectors of at most max_panels panels.
template <class T, int lines, int max_rows = tile_rows(kPanelVectors), int max_panels = panels_at_once(max_rows)>
FLASHRNN_SIMD void multiply_any(int rows, int vectors, const Pass<typename T::Element>& pass, const float* h,
                                std::ptrdiff_t h_row, F* acc) {
  constexpr int V = kPanelVectors;
  if constexpr (max_rows > 1) {
    if (rows < max_rows) return multiply_any<T, lines, max_rows - 1>(rows, vectors, pass, h, h_row, acc);
  }
  if constexpr (max_panels > 1) {
    if (vectors <= (max_panels - 1) * V)
      return multiply_any<T, lines, max_rows, max_panels - 1>(rows, vectors, pass, h, h_row, acc);
  }
  if (max_panels == 1 && pass.next != nullptr) return multiply<T, V, max_rows, lines>(pass, h, h_row, acc);
  multiply<T, max_panels * V, max_rows, 0>(pass, h, h_row, acc);
}

// multiply() for `rows` <= max_rows rows and a narrow panel.
template <class T, int max_rows = tile_rows(kNarrowVectors)>
FLASHRNN_SIMD void multiply_narrow(int rows, const Pass<typename T::Element>& pass, const float* h,
                                   std::ptrdiff_t h_row, F* acc) {
  if constexpr (max_rows > tile_rows(kNarrowVectors) / 2) {  // what Tiles makes of several tiles' rows
    if (rows < max_rows) return multiply_narrow<T, max_rows - 1>(rows, pass, h, h_row, acc);
  }
  multiply<T, kNarrowVectors, max_rows, 0>(pass, h, h_row, acc);
}

// Rows first[i] to first[i + 1] are tile i: of equal height, give or take one row.
struct Tiles {
  Tiles(int rows, int columns) : count((rows + tile_rows(columns) - 1) / tile_rows(columns)) {
    const int height = rows / count, low = count - rows % count;
    for (int tile = 0; tile < count; ++tile) first[tile + 1] = first[tile] + height + (tile >= low);
  }
  static constexpr int kMax = (kMaxRows + tile_rows(kPanelVectors) - 1) / tile_rows(kPanelVectors);
  int count, first[kMax + 1] = {};
};

// acc[row][kGroupVectors] = R h' of one group, of `vectors` vectors.
template <class T>
void recurrent_product(const Recurrence& rec, const float* h, int group, int next_group, int vectors, F* acc,
                       const Upcoming& upcoming) {
  using Element = typename T::Element;
  constexpr int V = kPanelVectors;
  // The lines of the next pass are spread over the row tiles as evenly as whole numbers per k can; the last tiles take
  // them if there are fewer than tiles. Narrow panels fetch none.
  constexpr int pass_lines = (V * kLanes * int{sizeof(Element)} + kLineBytes - 1) / kLineBytes;
  constexpr int lines = (pass_lines + Tiles::kMax - 1) / Tiles::kMax, tiles_ahead = (pass_lines + lines - 1) / lines;

  const std::ptrdiff_t r_panel = std::ptrdiff_t{rec.D} * V * kLanes, r_group = r_panel * (kGroupVectors / V);
  const Element* r = static_cast<const Element*>(rec.r);
  const Tiles wide(rec.rows, V);
  const bool several = wide.count > 1;
  const int pass_k = several ? kPassLength : rec.D, passes = several ? (rec.D + kPassLength - 1) / kPassLength : 1;
  const int panels = (vectors + V - 1) / V, at_once = panels_at_once(rec.rows);
  const bool last_narrow = several && vectors < panels * V;
  const Tiles low = last_narrow ? Tiles(rec.rows, kNarrowVectors) : wide;
  const bool ahead = several && r_group * rec.groups * std::ptrdiff_t{sizeof(Element)} > kPrefetchBytes;
  const int turns = passes * ((panels - last_narrow + at_once - 1) / at_once * wide.count + last_narrow * low.count);
  const int rows_a_turn = (rec.rows + turns - 1) / turns;
  int fetched = 0;
  for (int panel = 0; panel < panels; panel += at_once) {
    const bool last_panel = panel + at_once >= panels, narrow = last_panel && last_narrow;
    const Tiles& tiles = narrow ? low : wide;
    for (int k = 0; k < rec.D; k += pass_k) {
      const Element* here = r + group * r_group + panel * r_panel + std::ptrdiff_t{k} * V * kLanes;
      const bool last_k = rec.D - k <= pass_k;
      Pass<Element> pass{here, r_panel, last_k ? rec.D - k : pass_k, nullptr, k == 0};
      const char* next =
          reinterpret_cast<const char*>(last_k && last_panel ? r + next_group * r_group : here + pass_k * V * kLanes);
      for (int tile = 0; tile < tiles.count; ++tile) {
        const int row = tiles.first[tile], rows = tiles.first[tile + 1] - row;
        const int until = std::min(fetched + rows_a_turn, rec.rows);
        upcoming.fetch(fetched, until);
        fetched = until;
        const float* const tile_h = h + row * rec.stride + k;
        F* const tile_acc = acc + row * kGroupVectors + panel * V;
        if (narrow) {
          multiply_narrow<T>(rows, pass, tile_h, rec.stride, tile_acc);
          continue;
        }
        if (ahead && tile >= tiles.count - tiles_ahead) {
          pass.next = next;
          next += pass.num_k * lines * kLineBytes;
        }
        multiply_any<T, lines>(rows, std::min(vectors - panel * V, at_once * V), pass, tile_h, rec.stride, tile_acc);
      }
    }
  }
}

}  // namespace
}  // namespace flashrnn::cpu
