#include "contract.h"

#include <cmath>

namespace flashrnn {
namespace {

const char* label(Cell cell) { return info(cell).op_type; }

template <std::size_t kRank>
Shape shape_of(const std::array<std::int64_t, kRank>& dims) {
  return {dims.data(), kRank};
}

void check_rank(const Params& params, Input input, Shape shape, std::size_t rank, const char* meaning) {
  if (shape.rank == rank) return;
  refuse(label(params.cell), ": ", kInputs[input], " has shape ", text(shape), ", expected rank ", rank, " ", meaning);
}

template <std::size_t kRank>
void check_dims(const Params& params, Input input, Shape shape, const std::array<std::int64_t, kRank>& expected,
                const char* meaning) {
  bool equal = shape.rank == kRank;
  for (std::size_t i = 0; equal && i < kRank; ++i) equal = shape[i] == expected[i];
  if (equal) return;
  refuse(label(params.cell), ": ", kInputs[input], " has shape ", text(shape), ", expected ", text(shape_of(expected)),
         " ", meaning);
}

}  // namespace

std::string text(Shape shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.rank; ++i) out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

int switch_value(Cell cell, const char* name, std::int64_t value) {
  if (value != 0 && value != 1) refuse(label(cell), ": attribute ", name, " is ", value, ", expected 0 or 1");
  return static_cast<int>(value);
}

float bound_value(Cell cell, const char* name, double value) {
  const float bound = static_cast<float>(value);
  if (!std::isfinite(bound) || bound < 0.0f) {
    refuse(label(cell), ": attribute ", name, " is ", value, ", expected a finite number that is not negative");
  }
  return bound;
}

void check_attributes(Cell cell, const Attributes& attributes) {
  if (has_normalizer_floor(cell) && attributes.clip != 0.0f) {
    refuse(label(cell), ": attribute clip is ", attributes.clip, ", expected 0 for this op");
  }
}

void check_weight(Shape r, Params& params) {
  const char* op = label(params.cell);
  const std::int64_t G = num_gates(params.cell);
  constexpr const char* kMeaning = "[N, G, H, D, D]";
  check_rank(params, kR, r, 5, kMeaning);
  if (r[0] != 1 && r[0] != 2) refuse(op, ": r has shape ", text(r), ", expected 1 or 2 directions in front");
  if (r[2] < 1 || r[3] < 1) refuse(op, ": r has shape ", text(r), ", expected at least one head and one unit");
  check_dims<5>(params, kR, r, {r[0], G, r[2], r[3], r[3]}, kMeaning);
  if (r[0] == 2 && params.attributes.reverse != 0) {
    refuse(op, ": reverse is 1, expected 0 with the two directions of r ", text(r));
  }
  params.N = r[0];
  params.H = r[2];
  params.D = r[3];
}

void check_inputs(const Shape (&inputs)[kNumInputs], Params& params) {
  check_weight(inputs[kR], params);
  const bool batch_first = params.attributes.layout != 0;
  const char* meaning = batch_first ? "[B, T, N*H*D*G]" : "[T, B, N*H*D*G]";
  const Shape wx = inputs[kWx];
  check_rank(params, kWx, wx, 3, meaning);
  const std::int64_t hidden = params.N * params.H * params.D;
  check_dims<3>(params, kWx, wx, {wx[0], wx[1], hidden * num_gates(params.cell)}, meaning);
  params.T = wx[batch_first ? 1 : 0];
  params.B = wx[batch_first ? 0 : 1];
  check_dims<4>(params, kB, inputs[kB], {params.N, num_biases(params.cell), params.H, params.D}, "[N, Gb, H, D]");
  const Shape lens = inputs[kSequenceLens];
  if (lens.rank != 1 || (lens[0] != 1 && lens[0] != params.B)) {
    refuse(label(params.cell), ": sequence_lens has shape ", text(lens), ", expected [1] or [B] = [", params.B, "]");
  }
  params.num_lens = lens[0];
  check_dims(params, kInitialStates, inputs[kInitialStates], final_states_dims(params), "[S, N, B, H*D]");
}

std::array<std::int64_t, 3> y_dims(const Params& params) {
  const std::int64_t hidden = params.N * params.H * params.D;
  if (params.attributes.layout != 0) return {params.B, params.T, hidden};
  return {params.T, params.B, hidden};
}

std::array<std::int64_t, 4> final_states_dims(const Params& params) {
  return {num_states(params.cell), params.N, params.B, params.H * params.D};
}

}  // namespace flashrnn
