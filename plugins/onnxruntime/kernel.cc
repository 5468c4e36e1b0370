#include "kernel.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "../kernels/cpu/cpu_kernel.h"
#include "status.h"
#include "tensors.h"

namespace flashrnn::ort {
namespace {

// Weights of megabytes are streamed once per step: huge pages are worth 1.05 at D = 512.
constexpr std::size_t kHugePage = 2 << 20;

Buffer allocate(std::size_t bytes) {
  const bool huge = bytes >= kHugePage;
  const std::size_t alignment = huge ? kHugePage : cpu::kAlignment;
  const std::size_t rounded = (bytes / alignment + 1) * alignment;
  void* memory = std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  if (huge) madvise(memory, rounded, MADV_HUGEPAGE);  // a wish: its refusal changes nothing
  return Buffer(memory);
}

// Reads one attribute of a node, by the type that the record of attributes has for it.
struct AttributeReader {
  const OrtApi& api;
  const OrtKernelInfo* node;
  Cell cell;

  void operator()(const char* name, int& value) const {
    std::int64_t read = 0;
    check(api, api.KernelInfoGetAttribute_int64(node, name, &read));
    value = switch_value(cell, name, read);
  }
  void operator()(const char* name, float& value) const {
    check(api, api.KernelInfoGetAttribute_float(node, name, &value));
    value = bound_value(cell, name, value);
  }
};

struct Call {
  const OrtApi& api;
  OrtKernelContext* context;

  static void parallel_for(void* self, void (*task)(void*, std::size_t), std::size_t count, void* argument) {
    const Call& call = *static_cast<Call*>(self);
    OrtStatus* status = call.api.KernelContext_ParallelFor(call.context, task, count, 0, argument);
    if (status == nullptr) return;
    call.api.ReleaseStatus(status);
    for (std::size_t i = 0; i < count; ++i) task(argument, i);  // a task done before finds nothing left to do
  }
};

template <std::size_t kRank>
void* output(const OrtApi& api, OrtKernelContext* context, Output index, const std::array<std::int64_t, kRank>& dims) {
  OrtValue* value = nullptr;
  check(api, api.KernelContext_GetOutput(context, index, dims.data(), kRank, &value));
  void* data = nullptr;
  check(api, api.GetTensorMutableData(value, &data));
  return data;
}

}  // namespace

Attributes read_attributes(const OrtApi& api, const OrtKernelInfo* node, Cell cell) {
  Attributes attributes;
  for_each_attribute(cell, attributes, AttributeReader{api, node, cell});
  check_attributes(cell, attributes);
  return attributes;
}

Params bind(const OrtApi& api, OrtKernelContext* context, Params params) {
  Tensor inputs[kNumInputs];
  Shape shapes[kNumInputs];
  for (std::size_t i = 0; i < kNumInputs; ++i) {
    const OrtValue* value = nullptr;
    check(api, api.KernelContext_GetInput(context, i, &value));
    inputs[i] = tensor_of(api, value);
    shapes[i] = shape_of(inputs[i].dims);
  }
  check_inputs(shapes, params);
  params.wx = inputs[kWx].data;
  params.r = inputs[kR].data;
  params.b = static_cast<const float*>(inputs[kB].data);
  params.sequence_lens = static_cast<const std::int32_t*>(inputs[kSequenceLens].data);
  params.initial_states = static_cast<const float*>(inputs[kInitialStates].data);
  params.y = output(api, context, kY, y_dims(params));
  params.final_states = static_cast<float*>(output(api, context, kFinalStates, final_states_dims(params)));
  return params;
}

void FreeAligned::operator()(void* memory) const noexcept { std::free(memory); }

CpuKernel::CpuKernel(const OrtApi& api, const OrtKernelInfo* node, Cell cell, DType dtype) : api_(api) {
  params_.cell = cell;
  params_.dtype = dtype;
  params_.attributes = read_attributes(api, node, cell);
  int is_constant = 0;
  const OrtValue* weight = nullptr;
  check(api, api.KernelInfoGetConstantInput_tensor(node, kR, &is_constant, &weight));
  if (is_constant == 0 || weight == nullptr) return;
  const Tensor r = tensor_of(api, weight);
  packed_params_ = params_;
  check_weight(shape_of(r.dims), packed_params_);
  packed_params_.r = r.data;
  packed_ = allocate(cpu::packed_bytes(packed_params_));
  cpu::pack(packed_params_, packed_.get());
}

void CpuKernel::compute(OrtKernelContext* context) const {
  const Params params = bind(api_, context, params_);
  Buffer packed_now;
  if (packed_ == nullptr) {
    packed_now = allocate(cpu::packed_bytes(params));
    cpu::pack(params, packed_now.get());
  }
  const Buffer workspace = allocate(cpu::workspace_bytes(params));
  Call call{api_, context};
  cpu::run(params, packed_ != nullptr ? packed_.get() : packed_now.get(), workspace.get(), {Call::parallel_for, &call});
}

}  // namespace flashrnn::ort
