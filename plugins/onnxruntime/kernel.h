// The kernel of one node on ONNX Runtime's CPU execution provider: checks, sizes, allocates, calls.
#pragma once

#include <memory>

#include "../kernels/op.h"
#include "ort_api.h"

namespace flashrnn::ort {

// A node's attributes, checked. Throws InvalidArgument.
Attributes read_attributes(const OrtApi& api, const OrtKernelInfo* info, Cell cell);

// `node` with the sizes and pointers of one call: inputs checked, outputs allocated.
Params bind(const OrtApi& api, OrtKernelContext* context, Params node);

struct FreeAligned {
  void operator()(void* memory) const noexcept;
};
using Buffer = std::unique_ptr<void, FreeAligned>;

// Constant after creation: any number of threads may call compute() at once.
class CpuKernel {
 public:
  // Reads and checks the attributes, and packs r where it is a constant. Throws InvalidArgument.
  CpuKernel(const OrtApi& api, const OrtKernelInfo* info, Cell cell, DType dtype);

  void compute(OrtKernelContext* context) const;
  const OrtApi& api() const noexcept { return api_; }

 private:
  const OrtApi& api_;
  Params params_;         // cell, dtype and attributes
  Params packed_params_;  // with the N, H and D that packed_ was made for
  Buffer packed_;         // null where r is not a constant
};

}  // namespace flashrnn::ort
