#include "cuda_kernel.h"

#include <cuda_runtime_api.h>

#include <sstream>

#include "../kernels/cuda/launch.h"
#include "kernel.h"
#include "status.h"

namespace flashrnn::ort {
namespace {

void check_cuda(const Params& params, const char* what, cudaError_t error) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // it has been reported here; the runtime's next call must not find it
  throw std::runtime_error(std::string(info(params.cell).op_type) + ": " + what + ": " + cudaGetErrorString(error));
}

// Scratch memory in the order of the stream: it is given back behind the kernels that use it, also where several
// streams are at work, and a CUDA graph captures it. ONNX Runtime's allocator, as API 17 offers it, knows no stream: a
// concurrent run may be handed the memory while a kernel still uses it.
class Workspace {
 public:
  Workspace(const Params& params, cudaStream_t stream) : stream_(stream) {
    const std::size_t bytes = cuda::workspace_bytes(params);
    if (bytes > 0) check_cuda(params, "scratch memory", cudaMallocAsync(&memory_, bytes, stream));
  }
  ~Workspace() {
    if (memory_ != nullptr) (void)cudaFreeAsync(memory_, stream_);  // a failure shows in the next call on the stream
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* get() const { return memory_; }

 private:
  cudaStream_t stream_;
  void* memory_ = nullptr;
};

}  // namespace

CudaKernel::CudaKernel(const OrtApi& api, const OrtKernelInfo* node, Cell cell, DType dtype) : api_(api) {
  params_.cell = cell;
  params_.dtype = dtype;
  params_.attributes = read_attributes(api, node, cell);
  check(api, api.KernelInfo_GetLogger(node, &logger_));
}

void CudaKernel::tell_of_fallback(const Params& params) const {
  if (params.B == 0 || cuda::is_specialised(params)) return;
  std::call_once(told_, [&] {
    std::ostringstream text;
    text
        << info(params.cell).op_type << " of " << params.H << " heads of " << params.D
        << " units: this library holds no kernel of its own for it on this GPU, and the slower alternating kernel runs "
           "it; flashrnn-deploy build-plugins MODEL --gpu NAME builds what there is for a model";
    check(api_, api_.Logger_LogMessage(logger_, kWarning, text.str().c_str(), __FILE__, __LINE__, __func__));
  });
}

void CudaKernel::compute(OrtKernelContext* context) const {
  const Params params = bind(api_, context, params_);
  tell_of_fallback(params);
  void* stream = nullptr;
  check(api_, api_.KernelContext_GetGPUComputeStream(context, &stream));
  const Workspace workspace(params, static_cast<cudaStream_t>(stream));
  check_cuda(params, "launch", cuda::launch(params, workspace.get(), static_cast<cudaStream_t>(stream)));
}

}  // namespace flashrnn::ort
