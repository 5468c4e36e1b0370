#include "runtime.h"

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <set>

#include "error.h"
#include "files.h"

namespace flashrnn_edge {

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(what, ": ", cudaGetErrorString(error));
}

void Log::log(Severity severity, const char* message) noexcept {
  if (verbose_) std::fprintf(stderr, "[TensorRT] %s\n", message);
  if (severity > Severity::kERROR) return;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (errors_.size() > 500) return;
    errors_ += (errors_.empty() ? "" : "; ") + one_line(message);
  } catch (...) {
    std::fprintf(stderr, "[TensorRT] %s\n", message);
  }
}

std::string Log::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string said = errors_.empty() ? "it does not say why" : errors_;
  errors_.clear();
  return said;
}

// A library for TensorRT 8 registers itself; one for newer releases is registered by TensorRT.
void load_plugin(const std::string& path) {
  static std::set<std::string> loaded;
  if (loaded.count(path) != 0) return;
  if (path.find('/') == std::string::npos) return load_plugin("./" + path);  // else the system's folders are searched
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail("cannot load the plugin library: ", dlerror());
#if NV_TENSORRT_MAJOR >= 10
  if (dlsym(library, "getCreators") == nullptr) {
    fail(path, " holds no plugins for TensorRT 10 and newer: build it with --tensorrt-include");
  }
  if (getPluginRegistry()->loadLibrary(path.c_str()) == nullptr) fail("TensorRT does not take the plugins of ", path);
#else
  if (dlsym(library, "getCreators") != nullptr) {
    fail(path,
         " is the library for TensorRT 10 and newer, and this is TensorRT 8: pass libflashrnn_trt8.so, which "
         "`flashrnn-deploy build-plugins MODEL.onnx --gpu GPU --tensorrt 8 --tensorrt-include DIR -o DIR` makes");
  }
#endif
  loaded.insert(path);
}

bool has_plugin(const std::string& op_type) {
#if NV_TENSORRT_MAJOR >= 10
  return getPluginRegistry()->getCreator(op_type.c_str(), kPluginVersion, kPluginNamespace) != nullptr;
#else
  return getPluginRegistry()->getPluginCreator(op_type.c_str(), kPluginVersion, kPluginNamespace) != nullptr;
#endif
}

Version tensorrt_version() {
  const int version = getInferLibVersion();  // 8503 is 8.5.3, 101401 is 10.14.1
  const int unit = version < 10000 ? 1000 : 10000;
  return {version / unit, version % unit / 100, version % 100};
}

// A newer minor version of the library keeps the interfaces of the older ones (TensorRT's component versioning).
void check_tensorrt() {
  const Version library = tensorrt_version();
  if (library.major == NV_TENSORRT_MAJOR && library.minor >= NV_TENSORRT_MINOR) return;
  fail("this program was compiled with the headers of TensorRT ", NV_TENSORRT_MAJOR, ".", NV_TENSORRT_MINOR,
       " and runs with the library of TensorRT ", library.text(), ", whose interfaces are others: compile it with the ",
       "headers of that library (cmake -DTENSORRT_ROOT=DIR), or put the library of ", NV_TENSORRT_MAJOR, ".",
       NV_TENSORRT_MINOR, " into LD_LIBRARY_PATH");
}

Running running(std::vector<std::string> plugins) {
  Running here;
  here.tensorrt = tensorrt_version().text();
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), "no CUDA device");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "no CUDA device");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "no CUDA device");
  here.compute_capability = std::to_string(major) + "." + std::to_string(minor);
  here.plugins = std::move(plugins);
  return here;
}

Type from_nv(nvinfer1::DataType type, const std::string& tensor) {
  switch (type) {
    case nvinfer1::DataType::kFLOAT:
      return Type::kFloat32;
    case nvinfer1::DataType::kHALF:
      return Type::kFloat16;
    case nvinfer1::DataType::kINT32:
      return Type::kInt32;
    case nvinfer1::DataType::kBOOL:
      return Type::kBool;
#if NV_TENSORRT_MAJOR >= 10
    case nvinfer1::DataType::kBF16:
      return Type::kBfloat16;
    case nvinfer1::DataType::kINT64:
      return Type::kInt64;
#endif
    default:
      fail("the tensor ", tensor, " has a type that this program does not know");
  }
}

Dims from_nv(const nvinfer1::Dims& dims) {
  Dims out;
  for (int i = 0; i < dims.nbDims; ++i) out.push_back(dims.d[i]);
  return out;
}

nvinfer1::Dims to_nv(const Dims& dims) {
  nvinfer1::Dims out{};
  out.nbDims = static_cast<std::int32_t>(dims.size());
  for (std::size_t i = 0; i < dims.size(); ++i) out.d[i] = static_cast<decltype(+out.d[0])>(dims[i]);
  return out;
}

}  // namespace flashrnn_edge
