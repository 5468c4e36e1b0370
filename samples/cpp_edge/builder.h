// From an ONNX file to an engine and its sidecar, on the machine that runs it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace flashrnn_edge {

struct BuildOptions {
  std::string plugin;               // library with the FlashRNN plugins; empty: none
  std::vector<std::string> shapes;  // NAME=MIN:OPT:MAX of an input ("x=1x1x64:100x4x64:512x16x64") or of a named axis
  int sessions = 1;                 // TensorRT 8: how many sessions one loaded engine is to have at once
  std::size_t workspace_mib = 0;    // 0: TensorRT's own limit
  bool cublas = false;              // TensorRT 8: let layers use cuDNN and cuBLAS, which then have to be there
  bool tf32 = false;                // let float32 layers round to 10 bits, which is faster
  bool verbose = false;
};

// Writes `engine` and its sidecar. Throws Error; nothing is written then.
void build_engine(const std::string& model, const std::string& engine, const BuildOptions& options);

}  // namespace flashrnn_edge
