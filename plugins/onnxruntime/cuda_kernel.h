// The kernel of one node on ONNX Runtime's CUDA execution provider: checks, sizes, launches on the session's stream.
#pragma once

#include <mutex>

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
  // Logs a warning, once a node, where only the alternating kernel fits the call.
  void tell_of_fallback(const Params& params) const;

  const OrtApi& api_;
  Params params_;  // cell, dtype and attributes
  const OrtLogger* logger_ = nullptr;  // the session's, which outlives its kernels
  mutable std::once_flag told_;
};

}  // namespace flashrnn::ort
