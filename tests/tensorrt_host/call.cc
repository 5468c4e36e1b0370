// The plugin's enqueue for tests/gpu/pycuda_runner.py: one call on the caller's device memory and stream.
#include <map>
#include <memory>

#include "problem.h"

namespace {

// A layer as an execution context has it, with the workspace that TensorRT would give it.
struct Ready {
  std::unique_ptr<host::Layer> built, layer;
  void* workspace = nullptr;
};

}  // namespace

// `sizes`: T, B, N, H, D. 0 where the plugin runs; else a number of the step that failed.
extern "C" __attribute__((visibility("default"))) int flashrnn_host_enqueue(const char* library, int cell, int dtype,
                                                                            const std::int64_t* sizes,
                                                                            const void* const* in, void* const* out,
                                                                            void* stream) {
  static const std::unique_ptr<host::Library> plugins = host::load(library);
  static std::map<std::string, Ready> ready;
  host::Problem problem;
  problem.cell = static_cast<flashrnn::Cell>(cell);
  problem.dtype = static_cast<flashrnn::DType>(dtype);
  problem.T = sizes[0];
  problem.B = sizes[1];
  problem.N = sizes[2];
  problem.H = sizes[3];
  problem.D = sizes[4];
  Ready& found = ready[problem.text()];
  if (found.layer == nullptr) {
    found.built = plugins->create(problem.op().op_type, problem.fields());
    if (found.built == nullptr || !found.built->configure(problem.inputs())) return 1;
    found.layer = found.built->for_context();
    if (found.layer == nullptr) return 2;
    if (cudaMalloc(&found.workspace, found.built->workspace_bytes(problem.inputs()) + 1) != cudaSuccess) return 3;
  }
  const std::vector<const void*> inputs(in, in + problem.inputs().size());
  const std::vector<void*> outputs(out, out + problem.outputs().size());
  const bool good = found.layer->enqueue(problem.inputs(), problem.outputs(), inputs, outputs, found.workspace,
                                         static_cast<cudaStream_t>(stream));
  return good ? 0 : 4;
}
