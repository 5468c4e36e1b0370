// One call of the op: sizes, seeded inputs, the result of the CPU kernel, and the call through a plugin.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "../../plugins/contract.h"
#include "driver.h"

namespace host {

struct Problem {
  flashrnn::Cell cell = flashrnn::Cell::kLstm;
  flashrnn::DType dtype = flashrnn::DType::kFloat32;
  flashrnn::Attributes attributes;
  std::int64_t T = 7, B = 3, N = 1, H = 2, D = 40;
  bool ragged = false;  // a length per row, some of them outside 0..T

  const flashrnn::OpInfo& op() const { return flashrnn::info(cell); }
  std::string text() const;
  std::vector<Field> fields() const;
  std::vector<Tensor> inputs() const;
  std::vector<Tensor> outputs() const;
  flashrnn::Params params() const;  // without pointers
};

using Bytes = std::vector<unsigned char>;

struct Result {
  Bytes y, final_states;
  bool operator==(const Result& other) const { return y == other.y && final_states == other.final_states; }
};

std::vector<Bytes> make_inputs(const Problem& problem, unsigned seed);
Result reference(const Problem& problem, const std::vector<Bytes>& inputs);

// Runs the call on device memory: outputs start as NaN, the workspace as noise. Exits where CUDA fails; false where the
// layer does.
bool run(Layer& layer, const Problem& problem, const std::vector<Bytes>& inputs, cudaStream_t stream, unsigned noise,
         Result& result);

// The largest error over what is allowed: beyond 1 the results differ. NaN counts as infinite.
double error_of(const Problem& problem, const Result& result, const Result& expected);

}  // namespace host
