// A plugin library driven as TensorRT drives it, without TensorRT: one interface over the plugin interfaces of all
// releases. driver_v3.cc and driver_v2.cc implement it, each compiled against one release's headers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace host {

enum class Type { kFloat32, kFloat16, kBfloat16, kInt32, kBool };

using Dims = std::vector<std::int64_t>;  // -1: only known at run time

struct Tensor {
  Dims dims;
  Type type = Type::kFloat32;
  bool linear = true;
};

struct Field {
  enum Kind { kInt32, kInt64, kFloat32, kFloat64, kText } kind;
  std::string name;
  double value = 0;
  std::string text = "";
  int length = 1;
};

class Layer {
 public:
  virtual ~Layer() = default;
  virtual bool output_dims(const std::vector<Dims>& inputs, std::vector<Dims>& outputs) = 0;
  virtual std::vector<Type> output_types(const std::vector<Type>& inputs) = 0;
  virtual bool supports(int index, const std::vector<Tensor>& tensors) = 0;  // inputs, then outputs

  // `largest`: the inputs at the end of a profile whose other dims are unknown. False where the layer refuses; V2 has
  // no way to.
  virtual bool configure(const std::vector<Tensor>& largest) = 0;
  virtual std::size_t workspace_bytes(const std::vector<Tensor>& largest) = 0;
  virtual bool enqueue(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
                       const std::vector<const void*>& in, const std::vector<void*>& out, void* workspace,
                       cudaStream_t stream) = 0;

  virtual std::unique_ptr<Layer> for_context() = 0;  // what an execution context gets
  virtual std::string serialize() = 0;               // the bytes that go into an engine
};

class Library {
 public:
  virtual ~Library() = default;
  virtual const char* name() const = 0;
  virtual bool has_bfloat16() const = 0;
  virtual std::vector<std::string> ops() = 0;                            // op types, in the library's order
  virtual std::vector<std::string> fields(const std::string& op) = 0;    // names of attributes
  virtual std::string version_and_namespace(const std::string& op) = 0;  // "1 "
  // Null where the library refuses.
  virtual std::unique_ptr<Layer> create(const std::string& op, const std::vector<Field>& fields) = 0;
  virtual std::unique_ptr<Layer> deserialize(const std::string& op, const std::string& bytes) = 0;
};

// Loads it; exits with a message where that fails.
std::unique_ptr<Library> load(const char* path);

}  // namespace host
