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
constexpr int kTileRows = kRegisters * 3 / 4 / kPanelVectors;

// Two multiply_add per cycle with a latency of 4 need 8 independent chains: one row takes several panels at once.
constexpr int panels_at_once(int rows) { return rows * kPanelVectors >= 8 ? 1 : 12 / (rows * kPanelVectors); }

// k in one pass over a panel that several row tiles share: the panel and h of all rows stay in L1 (AVX2 12 + 8 KB of
// 32, AVX-512 32 + 8 of 48). D = 512, AVX2: twice as many take 1.15 times as long.
constexpr int kPassLength = 128;

// R of a head beyond this is on its way to L2 one pass ahead. At D = 512, B = 16 with AVX-512 0.87 times the time
// without; for an R that L2 holds 1.05, and for 1 MB beside 0.5 MB of L2 1.03 (AVX2).
constexpr std::ptrdiff_t kPrefetchBytes = 2 << 20;
constexpr int kLineBytes = 64;

// Length of a chain of the sum over k. Chains of 32 take 1.04 times the product's time (AVX2). A single chain of D has
// twice the error at D = 100 (and fails the project's tolerance); with 64 the error is at most 0.7 of the tolerance.
constexpr int kChain = 64;

// The part of R for one pass over k.
template <class Element>
struct Pass {
  const Element* r;
  std::ptrdiff_t panel;  // elements between panels
  int num_k;
  const char* next;  // what to prefetch meanwhile, or null
  bool fresh;        // acc holds nothing yet
};

// sum[row][column] += h[row] r[column] at one k, or = where it is the first. Columns are the vectors of one panel after
// the other.
template <class T, bool first, int rows, int columns>
FLASHRNN_SIMD void add_product(const typename T::Element* r, std::ptrdiff_t panel, const float* h, std::ptrdiff_t h_row,
                               F (&sum)[rows][columns]) {
  constexpr int V = kPanelVectors;
  F weight[columns];
#pragma GCC unroll 32
  for (int i = 0; i < columns; ++i) weight[i] = T::read(r + i / V * panel + i % V * kLanes);
#pragma GCC unroll 32
  for (int row = 0; row < rows; ++row) {
    const F hk = broadcast(h[row * h_row]);
#pragma GCC unroll 32
    for (int i = 0; i < columns; ++i) {
      sum[row][i] = first ? hk * weight[i] : multiply_add(hk, weight[i], sum[row][i]);
    }
  }
}

// acc[row][column] += sum over k in [0, num_k) of h[row][k] r[k][column], while `lines` lines per k are prefetched.
// Written for few instructions, of which the loop is bound where a neighbour has the core's other hardware thread.
// The first chain of all is stored: to add it to zeros, written before, takes 0.02 of an LSTM's step (D = 128, B = 16).
// Three k per turn: 0.96 times the time there, 1.01 elsewhere. Inlined into its caller it keeps fewer things in
// registers: 1.01.
template <class T, int columns, int rows, int lines>
__attribute__((noinline)) void multiply(Pass<typename T::Element> pass, const float* h, std::ptrdiff_t h_row, F* acc) {
  const float* const end = h + pass.num_k;
  const float* const fresh = pass.fresh ? h : nullptr;  // from a flag that changes GCC makes two copies of the loop
  while (h != end) {
    const bool store_sum = h == fresh;
    const float* const chain_end = end - h > kChain ? h + kChain : end;
    F sum[rows][columns];
    add_product<T, true>(pass.r, pass.panel, h, h_row, sum);
    while (pass.r += kPanelVectors * kLanes, ++h != chain_end) {
#pragma GCC unroll 32
      for (int i = 0; i < lines; ++i) __builtin_prefetch(pass.next + i * kLineBytes, 0, 2);
      pass.next += lines * kLineBytes;
      add_product<T, false>(pass.r, pass.panel, h, h_row, sum);
    }
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
template <class T, int lines, int max_rows, int max_panels = panels_at_once(max_rows)>
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
  // Two blocks of an LSTM are 8 vectors, 3 + 3 + 2: leaving the ninth out makes its product 0.98 times as long at
  // D = 128 and 256 (AVX2).
  if constexpr (max_panels == 1 && max_rows * (V - 1) >= 8) {
    if (vectors < V) return multiply<T, V - 1, max_rows, 0>(pass, h, h_row, acc);
  }
  multiply<T, max_panels * V, max_rows, 0>(pass, h, h_row, acc);
}

// acc[row][kGroupVectors] = R h' of one group, of `vectors` vectors.
template <class T>
void recurrent_product(const Recurrence& rec, const float* h, int group, int next_group, int vectors, F* acc) {
  using Element = typename T::Element;
  constexpr int V = kPanelVectors, max_tiles = (kMaxRows + kTileRows - 1) / kTileRows;
  // The lines of the next pass are spread over the row tiles as evenly as whole numbers per k can; the last tiles take
  // them if there are fewer than tiles.
  constexpr int pass_lines = (V * kLanes * int{sizeof(Element)} + kLineBytes - 1) / kLineBytes;
  constexpr int lines = (pass_lines + max_tiles - 1) / max_tiles, tiles_ahead = (pass_lines + lines - 1) / lines;

  const std::ptrdiff_t r_panel = std::ptrdiff_t{rec.D} * V * kLanes, r_group = r_panel * (kGroupVectors / V);
  const Element* r = static_cast<const Element*>(rec.r);
  const int tiles = (rec.rows + kTileRows - 1) / kTileRows, pass_k = tiles == 1 ? rec.D : kPassLength;
  const int panels = (vectors + V - 1) / V, at_once = panels_at_once(rec.rows);
  const bool ahead = tiles > 1 && r_group * rec.groups * std::ptrdiff_t{sizeof(Element)} > kPrefetchBytes;
  int edges[max_tiles + 1];  // of tiles of equal height, give or take one row
  for (int tile = 0; tile <= tiles; ++tile) edges[tile] = rec.rows * tile / tiles;
  for (int panel = 0; panel < panels; panel += at_once) {
    for (int k = 0; k < rec.D; k += pass_k) {
      const Element* here = r + group * r_group + panel * r_panel + std::ptrdiff_t{k} * V * kLanes;
      const bool last_k = rec.D - k <= pass_k, last = last_k && panel + at_once >= panels;
      Pass<Element> pass{here, r_panel, last_k ? rec.D - k : pass_k, nullptr, k == 0};
      const char* next = reinterpret_cast<const char*>(last ? r + next_group * r_group : here + pass_k * V * kLanes);
      for (int tile = 0; tile < tiles; ++tile) {
        const int row = edges[tile], rows = edges[tile + 1] - row;
        if (ahead && tile >= tiles - tiles_ahead) {
          pass.next = next;
          next += pass.num_k * lines * kLineBytes;
        }
        multiply_any<T, lines, kTileRows>(rows, std::min(vectors - panel * V, at_once * V), pass,
                                          h + row * rec.stride + k, rec.stride, acc + row * kGroupVectors + panel * V);
      }
    }
  }
}

}  // namespace
}  // namespace flashrnn::cpu
