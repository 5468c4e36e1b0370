// Tensors of a call.
#pragma once

#include <cstdint>
#include <vector>

#include "../contract.h"
#include "ort_api.h"

namespace flashrnn::ort {

using Dims = std::vector<std::int64_t>;

inline Shape shape_of(const Dims& dims) { return {dims.data(), dims.size()}; }
Dims dims_of(const OrtApi& api, const OrtTensorTypeAndShapeInfo* info);

struct Tensor {
  void* data;
  Dims dims;
};
Tensor tensor_of(const OrtApi& api, const OrtValue* value);

}  // namespace flashrnn::ort
