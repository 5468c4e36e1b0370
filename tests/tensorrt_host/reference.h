// The op by the CPU kernel, on this thread.
#pragma once

#include <cstdlib>
#include <memory>

#include "../../plugins/kernels/cpu/cpu_kernel.h"

namespace host {

inline void run_reference(const flashrnn::Params& params) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  const auto allocate = [](std::size_t bytes) {
    using flashrnn::cpu::kAlignment;
    return std::unique_ptr<void, Free>(std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment));
  };
  const auto packed = allocate(flashrnn::cpu::packed_bytes(params));
  const auto workspace = allocate(flashrnn::cpu::workspace_bytes(params));
  flashrnn::cpu::pack(params, packed.get());
  const auto run = [](void*, void (*task)(void*, std::size_t), std::size_t count, void* argument) {
    for (std::size_t i = 0; i < count; ++i) task(argument, i);
  };
  flashrnn::cpu::run(params, packed.get(), workspace.get(), {run, nullptr});
}

}  // namespace host
