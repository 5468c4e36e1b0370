// The tensors of one call as a kernel sees them: Params with its strides worked out.
#pragma once

#include <climits>
#include <cstdint>

#include "../cells.cuh"
#include "../op.h"

namespace flashrnn::cuda {

struct Tensors {
  const void* wx;
  const void* r;
  const float* b;
  const std::int32_t* sequence_lens;
  const float* initial_states;
  void* y;
  float* final_states;
  int T, B, N, H, D;
  std::int64_t wx_step, wx_row, y_step, y_row;  // in elements: from t to t + 1, from row b to b + 1
  int len_stride;                               // 0: one length for every row
  int reverse;
  std::uint32_t spin_limit;
  void* workspace;  // grid mode: the packets of h
  int first_group;  // grid mode: of (direction, head, tile of the batch), where a call takes several launches
  CellOptions options;
  // Whether vector accesses are aligned. They change no result, only its speed.
  bool wide_rows;  // a row of wx in pieces of 16 bytes
  bool wide_wx;    // one unit (G = 4) or two (G = 1, 3) in pieces of 8 or 4 bytes
  bool wide_y;     // two units by one store of 4 bytes
  bool wide_r;     // 16 bytes of a row of r
};

inline bool is_aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

inline bool sizes_fit(const Params& p) {
  const auto fits = [](std::int64_t size) { return size >= 0 && size <= INT_MAX; };
  return fits(p.T) && fits(p.B) && p.N >= 1 && p.N <= 2 && p.H >= 1 && fits(p.H) && p.D >= 1 && fits(p.D);
}

inline Tensors tensors_of(const Params& p, std::uint32_t spin_limit) {
  Tensors t{};
  t.wx = p.wx;
  t.r = p.r;
  t.b = p.b;
  t.sequence_lens = p.sequence_lens;
  t.initial_states = p.initial_states;
  t.y = p.y;
  t.final_states = p.final_states;
  t.T = static_cast<int>(p.T);
  t.B = static_cast<int>(p.B);
  t.N = static_cast<int>(p.N);
  t.H = static_cast<int>(p.H);
  t.D = static_cast<int>(p.D);
  const std::int64_t width = p.N * p.H * p.D, G = num_gates(p.cell);
  const bool batch_first = p.attributes.layout != 0;
  t.y_step = batch_first ? width : width * p.B;
  t.y_row = batch_first ? width * p.T : width;
  t.wx_step = t.y_step * G;
  t.wx_row = t.y_row * G;
  t.len_stride = p.num_lens == 1 ? 0 : 1;
  t.reverse = p.attributes.reverse;
  t.spin_limit = spin_limit;
  t.options = {p.attributes.clip, p.attributes.relu, p.attributes.normalizer_floor};
  const std::uintptr_t element = static_cast<std::uintptr_t>(element_bytes(p.dtype));
  const bool even = p.D % 2 == 0;
  t.wide_rows = p.D * G * static_cast<std::int64_t>(element) % 16 == 0 && is_aligned(p.wx, 16);
  t.wide_wx = G == 4 ? is_aligned(p.wx, 4 * element) : even && is_aligned(p.wx, 2 * element);
  t.wide_y = even && is_aligned(p.y, 2 * element);
  t.wide_r = p.D % static_cast<std::int64_t>(16 / element) == 0 && is_aligned(p.r, 16);
  return t;
}

// Valid steps of row b, 0 for rows behind the batch.
__device__ __forceinline__ int length_of(const Tensors& t, int row) {
  if (row >= t.B) return 0;
  return min(max(t.sequence_lens[row * t.len_stride], 0), t.T);
}

__device__ __forceinline__ bool runs_backward(const Tensors& t, int direction) {
  return ((direction + t.reverse) & 1) != 0;
}

// Element offsets. `part` counts (direction, head) pairs, the direction first.
__device__ __forceinline__ std::int64_t state_offset(const Tensors& t, int state, int part, int row, int unit) {
  const int n = part / t.H, head = part % t.H;
  return ((static_cast<std::int64_t>(state * t.N + n) * t.B + row) * t.H + head) * t.D + unit;
}
__device__ __forceinline__ std::int64_t weight_offset(const Tensors& t, int gates, int gate, int part, int unit) {
  const int n = part / t.H, head = part % t.H;
  return ((static_cast<std::int64_t>(n * gates + gate) * t.H + head) * t.D + unit) * t.D;
}
__device__ __forceinline__ std::int64_t bias_offset(const Tensors& t, int biases, int bias, int part, int unit) {
  const int n = part / t.H, head = part % t.H;
  return (static_cast<std::int64_t>(n * biases + bias) * t.H + head) * t.D + unit;
}

}  // namespace flashrnn::cuda
