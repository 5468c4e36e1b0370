// flashrnn_info: what this library is, as JSON, for tools that have only the file.
#include <string>

#include "build_info.h"
#include "kernels/cpu/cpu_kernel.h"

extern "C" __attribute__((visibility("default"))) const char* flashrnn_info() {
  static const std::string text = std::string("{" FLASHRNN_BUILD_INFO ", \"cpu_selected\": \"") +
                                  flashrnn::cpu::instruction_set() + "\", \"cuda_architectures\": []}";
  return text.c_str();
}
