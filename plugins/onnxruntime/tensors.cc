#include "tensors.h"

#include "status.h"

namespace flashrnn::ort {
namespace {

void check_rank(const char* label, const char* name, const Dims& dims, std::size_t rank, const char* meaning) {
  if (dims.size() != rank) {
    refuse(label, ": ", name, " has shape ", text(dims), ", expected rank ", rank, " ", meaning);
  }
}

void check_dims(const char* label, const char* name, const Dims& dims, const Dims& expected, const char* meaning) {
  if (dims != expected) {
    refuse(label, ": ", name, " has shape ", text(dims), ", expected ", text(expected), " ", meaning);
  }
}

}  // namespace

std::string text(const Dims& dims) {
  std::string out = "[";
  for (const std::int64_t dim : dims) out += (out.size() > 1 ? ", " : "") + std::to_string(dim);
  return out + "]";
}

Dims dims_of(const OrtApi& api, const OrtTensorTypeAndShapeInfo* info) {
  std::size_t rank = 0;
  check(api, api.GetDimensionsCount(info, &rank));
  Dims dims(rank);
  check(api, api.GetDimensions(info, dims.data(), rank));
  return dims;
}

Tensor tensor_of(const OrtApi& api, const OrtValue* value) {
  if (value == nullptr) throw std::runtime_error("flashrnn: an input is missing; every input is required");
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, api.GetTensorTypeAndShape(value, &info));
  const struct Release {
    const OrtApi& api;
    OrtTensorTypeAndShapeInfo* info;
    ~Release() { api.ReleaseTensorTypeAndShapeInfo(info); }
  } release{api, info};
  Tensor tensor{nullptr, dims_of(api, info)};
  // The API has no const form of this; inputs are only read.
  check(api, api.GetTensorMutableData(const_cast<OrtValue*>(value), &tensor.data));
  return tensor;
}

void check_weight(const char* label, const Dims& r, Params& params) {
  const std::int64_t G = num_gates(params.cell);
  check_rank(label, "r", r, 5, "[N, G, H, D, D]");
  if (r[0] != 1 && r[0] != 2) refuse(label, ": r has shape ", text(r), ", expected 1 or 2 directions in front");
  if (r[2] < 1 || r[3] < 1) refuse(label, ": r has shape ", text(r), ", expected at least one head and one unit");
  check_dims(label, "r", r, {r[0], G, r[2], r[3], r[3]}, "[N, G, H, D, D]");
  if (r[0] == 2 && params.attributes.reverse != 0) {
    refuse(label, ": reverse is 1, expected 0 with the two directions of r ", text(r));
  }
  params.N = r[0];
  params.H = r[2];
  params.D = r[3];
}

void check_inputs(const char* label, const Dims (&inputs)[kNumInputs], Params& params) {
  check_weight(label, inputs[kR], params);
  const bool batch_first = params.attributes.layout != 0;
  const char* meaning = batch_first ? "[B, T, N*H*D*G]" : "[T, B, N*H*D*G]";
  const Dims& wx = inputs[kWx];
  check_rank(label, "wx", wx, 3, meaning);
  const std::int64_t hidden = params.N * params.H * params.D;
  check_dims(label, "wx", wx, {wx[0], wx[1], hidden * num_gates(params.cell)}, meaning);
  params.T = wx[batch_first ? 1 : 0];
  params.B = wx[batch_first ? 0 : 1];
  check_dims(label, "b", inputs[kB], {params.N, num_biases(params.cell), params.H, params.D}, "[N, Gb, H, D]");
  const Dims& lens = inputs[kSequenceLens];
  if (lens.size() != 1 || (lens[0] != 1 && lens[0] != params.B)) {
    refuse(label, ": sequence_lens has shape ", text(lens), ", expected [1] or [B] = ", text({params.B}));
  }
  params.num_lens = lens[0];
  check_dims(label, "initial_states", inputs[kInitialStates], final_states_dims(params), "[S, N, B, H*D]");
}

Dims y_dims(const Params& params) {
  const std::int64_t hidden = params.N * params.H * params.D;
  return params.attributes.layout != 0 ? Dims{params.B, params.T, hidden} : Dims{params.T, params.B, hidden};
}

Dims final_states_dims(const Params& params) {
  return {num_states(params.cell), params.N, params.B, params.H * params.D};
}

}  // namespace flashrnn::ort
