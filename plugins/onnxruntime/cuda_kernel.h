// The kernel of one node on ONNX Runtime's CUDA execution provider: checks, sizes, launches on the session's stream.
#pragma once

#include "../kernels/op.h"
#include "ort_api.h"

namespace flashrnn::ort {

// Constant after creation: any number of threads may call compute() at once.
class CudaKernel {
 public:
  // Reads and checks the attributes. Throws InvalidArgument.
  CudaKernel(const OrtApi& api, const OrtKernelInfo* info, Cell cell, DType dtype);

  // Returns without waiting for the device. Fit for CUDA graphs and for a stream that the user gave the session.
  void compute(OrtKernelContext* context) const;
  const OrtApi& api() const noexcept { return api_; }

 private:
  const OrtApi& api_;
  Params params_;  // cell, dtype and attributes
};

}  // namespace flashrnn::ort
