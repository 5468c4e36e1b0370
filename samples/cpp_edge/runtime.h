// What the loader and the builder share: TensorRT's log, plugin libraries, CUDA errors, versions.
#pragma once

#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>
#include <vector>

#include "array.h"
#include "sidecar.h"

namespace flashrnn_edge {

void check_cuda(cudaError_t error, const char* what);  // throws Error

// Keeps the first errors for messages; prints everything on stderr where it is verbose.
class Log final : public nvinfer1::ILogger {
 public:
  explicit Log(bool verbose) : verbose_(verbose) {}
  void log(Severity severity, const char* message) noexcept override;
  std::string take();  // the errors since the last call, in one line

 private:
  bool verbose_;
  std::mutex mutex_;  // TensorRT logs from any thread
  std::string errors_;
};

// Makes the plugins of a library known to TensorRT. Throws Error. Again is safe.
void load_plugin(const std::string& path);
bool has_plugin(const std::string& op_type);

struct Version {
  int major, minor, patch;
  std::string text() const { return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch); }
};
Version tensorrt_version();  // of the loaded library
void check_tensorrt();       // throws Error where it does not have the interfaces that this program was compiled for

// The loaded TensorRT and the current device. Throws Error where there is no device.
Running running(std::vector<std::string> plugins);

Type from_nv(nvinfer1::DataType type, const std::string& tensor);
Dims from_nv(const nvinfer1::Dims& dims);
nvinfer1::Dims to_nv(const Dims& dims);

}  // namespace flashrnn_edge
