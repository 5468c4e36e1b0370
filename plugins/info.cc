// flashrnn_info: what this library is, as JSON, for tools that have only the file.
#include <cctype>
#include <string>

#include "build_info.h"
#include "kernels/cpu/cpu_kernel.h"

namespace {

// One line of kernel_configs.inc (kernels/cuda/config.h), as text.
struct Line {
  const char *cell, *dtype, *mode;
  int numbers[16];
};
constexpr const char* kNumbers[] = {
    "compute_capability", "min_batch", "max_batch",        "clips",            "padded_head_dim", "cluster_size",
    "units_per_block",    "batch_tile", "tiles_per_block", "row_warps",        "k_warps",         "register_k_steps",
    "accumulator_sets",   "ring_depth", "replicas",        "spare_warp",
};
static_assert(sizeof(kNumbers) / sizeof(kNumbers[0]) == 16, "a name for each number");

#define FLASHRNN_KERNEL(cell, dtype, capability, min_batch, max_batch, clips, mode, ...) \
  {#cell, #dtype, #mode, {capability, min_batch, max_batch, clips, __VA_ARGS__}},
constexpr Line kLines[] = {
#ifdef FLASHRNN_CUDA
#include "cuda/kernel_configs.inc"
#endif
    {nullptr, nullptr, nullptr, {}},  // the end
};
#undef FLASHRNN_KERNEL

// kBfloat16 -> "bfloat16"
std::string name(const char* enumerator) {
  std::string text = enumerator + 1;
  text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return '"' + text + '"';
}

std::string kernels() {
  std::string text;
  for (const Line* line = kLines; line->cell != nullptr; ++line) {
    text += std::string(text.empty() ? "" : ", ") + "{\"cell\": " + name(line->cell) +
            ", \"dtype\": " + name(line->dtype) + ", \"mode\": " + name(line->mode);
    for (int i = 0; i < 16; ++i) text += ", \"" + std::string(kNumbers[i]) + "\": " + std::to_string(line->numbers[i]);
    text += '}';
  }
  return text;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* flashrnn_info() {
  static const std::string text = std::string("{" FLASHRNN_BUILD_INFO ", \"cpu_selected\": \"") +
                                  flashrnn::cpu::instruction_set() + "\", \"kernels\": [" + kernels() + "]}";
  return text.c_str();
}
