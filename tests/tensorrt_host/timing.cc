// Microseconds per step of the plugin's enqueue alone: what an engine's layer costs is compared with
// (docs/tensorrt.md).
#include <algorithm>
#include <cstdio>

#include "checks.h"
#include "problem.h"

namespace host {

void print_times(Library& library) {
  for (const std::int64_t B : {1, 16}) {
    Problem problem;
    problem.dtype = flashrnn::DType::kFloat16;
    problem.T = 1024;
    problem.B = B;
    problem.H = 1;
    problem.D = 256;
    const auto layer = library.create(problem.op().op_type, problem.fields())->for_context();
    std::vector<const void*> in;
    std::vector<void*> out;
    const auto allocate = [](std::size_t bytes) {
      void* memory = nullptr;
      if (cudaMalloc(&memory, bytes) != cudaSuccess) std::exit(2);
      return memory;  // the process ends soon
    };
    for (const Bytes& bytes : make_inputs(problem, 1)) {
      in.push_back(allocate(bytes.size()));
      (void)cudaMemcpy(const_cast<void*>(in.back()), bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    }
    for (int i = 0; i < 2; ++i) out.push_back(allocate(1 << 26));
    void* workspace = allocate(layer->workspace_bytes(problem.inputs()) + 1);
    cudaEvent_t before = nullptr, after = nullptr;
    (void)cudaEventCreate(&before);
    (void)cudaEventCreate(&after);
    std::vector<float> times;
    for (int i = 0; i < 60; ++i) {
      (void)cudaEventRecord(before, nullptr);
      if (!layer->enqueue(problem.inputs(), problem.outputs(), in, out, workspace, nullptr)) std::exit(2);
      (void)cudaEventRecord(after, nullptr);
      float ms = 0;
      if (cudaEventSynchronize(after) != cudaSuccess || cudaEventElapsedTime(&ms, before, after) != cudaSuccess)
        std::exit(2);
      if (i >= 10) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    const double ms = static_cast<double>(times[times.size() / 2]);
    std::printf("%s: %.4f ms, %.3f us per step\n", problem.text().c_str(), ms,
                1e3 * ms / static_cast<double>(problem.T));
  }
}

}  // namespace host
