// RegisterCustomOps: one OrtCustomOp per (op, execution provider, dtype), all dtypes of an op under one name.
#include <array>
#include <list>
#include <mutex>
#include <string>

#include "build_info.h"
#ifdef FLASHRNN_CUDA
#include "cuda_kernel.h"
#endif
#include "kernel.h"
#include "shape_inference.h"
#include "status.h"

namespace flashrnn::ort {
namespace {

ElementType element_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return kFloat;
    case DType::kFloat16:
      return kFloat16;
    case DType::kBfloat16:
      return kBfloat16;
  }
  return kUndefined;
}

struct Op : OrtCustomOp {
  const OrtApi* api;
  Cell cell;
  DType dtype;
};
const Op& self(const OrtCustomOp* op) { return *static_cast<const Op*>(op); }

ElementType input_type(const OrtCustomOp* op, std::size_t index) noexcept {
  if (index == kSequenceLens) return kInt32;
  return index == kWx || index == kR ? element_type(self(op).dtype) : kFloat;
}

ElementType output_type(const OrtCustomOp* op, std::size_t index) noexcept {
  return index == kY ? element_type(self(op).dtype) : kFloat;
}

OrtStatus* create_cpu_kernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out) noexcept {
  return guarded(*api, [&] { *out = new CpuKernel(*api, info, self(op).cell, self(op).dtype); });
}

OrtStatus* compute_cpu(void* kernel, OrtKernelContext* context) noexcept {
  const CpuKernel& cpu = *static_cast<const CpuKernel*>(kernel);
  return guarded(cpu.api(), [&] { cpu.compute(context); });
}

OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) noexcept {
  const Op& o = self(op);
  return guarded(*o.api, [&] { infer_shapes(*o.api, context, o.cell); });
}

// What is the same for every execution provider.
Op describe_op(const OrtApi& api, Cell cell, DType dtype) {
  Op op{};
  op.api = &api;
  op.cell = cell;
  op.dtype = dtype;
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp* o) { return info(self(o).cell).op_type; };
  op.GetInputType = input_type;
  op.GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return kNumInputs; };
  op.GetOutputType = output_type;
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return kNumOutputs; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, std::size_t) { return kRequired; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return kDefaultMemory; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.InferOutputShapeFn = infer;
  op.GetStartVersion = [](const OrtCustomOp*) { return kOpsetVersion; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
  return op;
}

Op cpu_op(const OrtApi& api, Cell cell, DType dtype) {
  Op op = describe_op(api, cell, dtype);
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.CreateKernelV2 = create_cpu_kernel;
  op.KernelComputeV2 = compute_cpu;
  op.KernelDestroy = [](void* kernel) { delete static_cast<CpuKernel*>(kernel); };
  return op;
}

#ifdef FLASHRNN_CUDA
OrtStatus* create_cuda_kernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                              void** out) noexcept {
  return guarded(*api, [&] { *out = new CudaKernel(*api, info, self(op).cell, self(op).dtype); });
}

OrtStatus* compute_cuda(void* kernel, OrtKernelContext* context) noexcept {
  const CudaKernel& cuda = *static_cast<const CudaKernel*>(kernel);
  return guarded(cuda.api(), [&] { cuda.compute(context); });
}

Op cuda_op(const OrtApi& api, Cell cell, DType dtype) {
  Op op = describe_op(api, cell, dtype);
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CUDAExecutionProvider"; };
  op.CreateKernelV2 = create_cuda_kernel;
  op.KernelComputeV2 = compute_cuda;
  op.KernelDestroy = [](void* kernel) { delete static_cast<CudaKernel*>(kernel); };
  return op;
}
#endif

// The domain of one runtime. It lives as long as the process: sessions point to it and to its ops.
struct Domain {
  explicit Domain(const OrtApi& runtime) : api(&runtime) {
    for (const OpInfo& op : kOps) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
        ops.push_back(cpu_op(runtime, op.cell, dtype));
#ifdef FLASHRNN_CUDA
        ops.push_back(cuda_op(runtime, op.cell, dtype));
#endif
      }
    }
    check(runtime, runtime.CreateCustomOpDomain(kDomain, &domain));
    for (const Op& op : ops) check(runtime, runtime.CustomOpDomain_Add(domain, &op));
  }
  const OrtApi* api;
  std::list<Op> ops;
  OrtCustomOpDomain* domain = nullptr;
};

// One domain per runtime in the process (a Python wheel and a C++ program may bring one each).
OrtCustomOpDomain* domain_of(const OrtApi& api) {
  static std::mutex mutex;
  static std::list<Domain>& domains = *new std::list<Domain>;  // never destroyed: sessions may outlive static objects
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Domain& domain : domains) {
    if (domain.api == &api) return domain.domain;
  }
  return domains.emplace_back(api).domain;
}

// A runtime refuses a domain that the session options hold already, so the options themselves remember: the entry is
// copied, and goes, with them, which no table of addresses here could follow.
constexpr const char* kConfigEntry = "flashrnn.library";

bool is_registered(const OrtApi& api, const OrtSessionOptions* options) {
  int has = 0;
  check(api, api.HasSessionConfigEntry(options, kConfigEntry, &has));
  if (has == 0) return false;
  std::size_t size = 0;
  check(api, api.GetSessionConfigEntry(options, kConfigEntry, nullptr, &size));
  std::string build(size, '\0');
  check(api, api.GetSessionConfigEntry(options, kConfigEntry, build.data(), &size));
  build.resize(build.find('\0') == std::string::npos ? size : build.find('\0'));
  if (build != FLASHRNN_BUILD_ID) {
    refuse("flashrnn: another build (", build, ") is registered with these session options, this one is ",
           FLASHRNN_BUILD_ID, "; register one library only");
  }
  return true;
}

void register_ops(const OrtApi& api, OrtSessionOptions* options) {
  if (is_registered(api, options)) return;
  check(api, api.AddCustomOpDomain(options, domain_of(api)));
  check(api, api.AddSessionConfigEntry(options, kConfigEntry, FLASHRNN_BUILD_ID));
}

OrtStatus* refuse_runtime(const OrtApiBase& base) {
  const OrtApi* oldest = base.GetApi(1);
  if (oldest == nullptr) return nullptr;  // there is no way to say anything: the session fails at the unknown op
  const std::string message = std::string("flashrnn: needs ONNX Runtime 1.") + std::to_string(kApiVersion) +
                              " or newer, this is " + base.GetVersionString();
  return oldest->CreateStatus(kFail, message.c_str());
}

}  // namespace
}  // namespace flashrnn::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const flashrnn::ort::OrtApiBase* base) noexcept {
  const flashrnn::ort::OrtApi* api = base->GetApi(flashrnn::ort::kApiVersion);
  if (api == nullptr) return flashrnn::ort::refuse_runtime(*base);
  return flashrnn::ort::guarded(*api, [&] { flashrnn::ort::register_ops(*api, options); });
}
