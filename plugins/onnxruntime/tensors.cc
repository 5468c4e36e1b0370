#include "tensors.h"

#include "status.h"

namespace flashrnn::ort {
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

}  // namespace flashrnn::ort
