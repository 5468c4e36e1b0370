#pragma once

#include "../kernels/op.h"
#include "ort_api.h"

namespace flashrnn::ort {

// Sets the shapes of y and final_states from those of the inputs, symbolic dims included. Throws InvalidArgument where
// a known rank contradicts the contract.
void infer_shapes(const OrtApi& api, OrtShapeInferContext* context, Cell cell);

}  // namespace flashrnn::ort
