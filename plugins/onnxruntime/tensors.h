// Tensors of a call, and the checks of their shapes against the op's contract.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../kernels/op.h"
#include "ort_api.h"

namespace flashrnn::ort {

using Dims = std::vector<std::int64_t>;

std::string text(const Dims& dims);  // "[2, 3]"
Dims dims_of(const OrtApi& api, const OrtTensorTypeAndShapeInfo* info);

struct Tensor {
  void* data;
  Dims dims;
};
Tensor tensor_of(const OrtApi& api, const OrtValue* value);

// Sets N, H and D of `params` from the dims of r. `label` names the node's op in messages.
void check_weight(const char* label, const Dims& r, Params& params);

// Checks the dims of all inputs, by Input, against `params`' attributes and each other; sets all sizes of `params`.
void check_inputs(const char* label, const Dims (&inputs)[kNumInputs], Params& params);

Dims y_dims(const Params& params);
Dims final_states_dims(const Params& params);

}  // namespace flashrnn::ort
