// The plugin interface of TensorRT 8.5 and 8.6: IPluginV2DynamicExt, built against the headers of one release.
//
// Loading the library registers the creators with the TensorRT of the process, whose functions are looked up and not
// linked: the library also loads where there is none, and says what it is.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>

#include "../kernels/cuda/launch.h"
#include "node.h"

namespace flashrnn::trt {
namespace {

using namespace nvinfer1;  // NOLINT: the interfaces' own types, in every signature below

// A function of libnvinfer, null where the process has none. Python's package loads it where only its handle finds it.
template <class Function>
Function* runtime_function(const char* name) {
  if (void* symbol = dlsym(RTLD_DEFAULT, name)) return reinterpret_cast<Function*>(symbol);
  void* library = dlopen("libnvinfer.so.8", RTLD_LAZY | RTLD_NOLOAD);
  return library != nullptr ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
}

void log(ILogger::Severity severity, const char* message) noexcept {
  using GetLogger = ILogger*() noexcept;
  static GetLogger* const get_logger = runtime_function<GetLogger>("getLogger");
  ILogger* logger = get_logger != nullptr ? get_logger() : nullptr;
  const std::string line = std::string("flashrnn: ") + message;
  if (logger != nullptr) {
    logger->log(severity, line.c_str());
  } else if (severity <= ILogger::Severity::kERROR) {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
}

}  // namespace

void report(const char* message) noexcept { log(ILogger::Severity::kERROR, message); }

namespace {

// A node inside an engine: a mark, then each attribute's four bytes.
constexpr std::uint32_t kMark = 0x314e4e46;  // "FNN1"

std::size_t serialized_bytes(const Node& node) {
  std::size_t bytes = sizeof(kMark);
  for_each_attribute(node.cell, node.attributes, [&](const char*, const auto& value) { bytes += sizeof(value); });
  return bytes;
}

template <class T>
void put(char*& to, const T& value) {
  std::memcpy(to, &value, sizeof(value));
  to += sizeof(value);
}

void serialize(const Node& node, void* buffer) {
  char* to = static_cast<char*>(buffer);
  put(to, kMark);
  for_each_attribute(node.cell, node.attributes, [&](const char*, const auto& value) { put(to, value); });
}

Node deserialize(Cell cell, const void* data, std::size_t bytes) {
  Node node{cell, {}};
  const char* from = static_cast<const char*>(data);
  std::uint32_t mark = 0;
  if (from != nullptr && bytes == serialized_bytes(node)) std::memcpy(&mark, from, sizeof(mark));
  if (mark != kMark) refuse(node.op_type(), ": the engine's data for this layer is damaged or of another version");
  from += sizeof(mark);
  std::vector<PluginField> fields = field_names(cell);
  for (PluginField& field : fields) {
    field.data = from;
    from += 4;
  }
  const PluginFieldCollection collection{static_cast<std::int32_t>(fields.size()), fields.data()};
  return read_fields(cell, &collection);
}

class Plugin final : public IPluginV2DynamicExt {
 public:
  explicit Plugin(const Node& node) : node_(node) {}

  IPluginV2DynamicExt* clone() const noexcept override {
    Plugin* copy = nullptr;
    guarded([&] { copy = new Plugin(*this); });  // TensorRT calls destroy()
    return copy;
  }
  void destroy() noexcept override { delete this; }

  const char* getPluginType() const noexcept override { return node_.op_type(); }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  void setPluginNamespace(const char* name) noexcept override {
    guarded([&] { namespace_ = name != nullptr ? name : ""; });
  }
  const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

  std::int32_t getNbOutputs() const noexcept override { return kNumOutputs; }
  std::int32_t initialize() noexcept override { return 0; }
  void terminate() noexcept override {}

  DataType getOutputDataType(std::int32_t output, const DataType* inputs, std::int32_t) const noexcept override {
    return output_type(output, inputs[kWx]);
  }

  DimsExprs getOutputDimensions(std::int32_t output, const DimsExprs* inputs, std::int32_t num_inputs,
                                IExprBuilder& builder) noexcept override {
    DimsExprs dims{};
    const bool good = guarded([&] { dims = output_dims(node_, output, inputs, num_inputs, builder); });
    // What TensorRT takes for a failure. Set here and not before: GCC 12 lets the callee write into `dims` directly,
    // and what it leaves there when it throws is not what was there.
    if (!good) dims.nbDims = -1;
    return dims;
  }

  bool supportsFormatCombination(std::int32_t index, const PluginTensorDesc* tensors, std::int32_t num_inputs,
                                 std::int32_t num_outputs) noexcept override {
    return num_inputs + num_outputs == kNumTensors && supports(index, tensors[index], tensors[kWx].type);
  }

  // The interface has no way to refuse here; enqueue() refuses what is wrong.
  void configurePlugin(const DynamicPluginTensorDesc* inputs, std::int32_t num_inputs, const DynamicPluginTensorDesc*,
                       std::int32_t) noexcept override {
    guarded([&] {
      log(ILogger::Severity::kVERBOSE, ("configured for " + text(describe_largest(node_, inputs, num_inputs))).c_str());
    });
  }

  std::size_t getWorkspaceSize(const PluginTensorDesc* inputs, std::int32_t, const PluginTensorDesc*,
                               std::int32_t) const noexcept override {
    std::size_t bytes = 0;
    guarded([&] { bytes = cuda::max_workspace_bytes(describe(node_, inputs)); });
    return bytes;
  }

  std::int32_t enqueue(const PluginTensorDesc* descriptions, const PluginTensorDesc*, const void* const* inputs,
                       void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    return guarded([&] { trt::enqueue(node_, descriptions, inputs, outputs, workspace, stream); }) ? 0 : 1;
  }

  std::size_t getSerializationSize() const noexcept override { return serialized_bytes(node_); }
  void serialize(void* buffer) const noexcept override { trt::serialize(node_, buffer); }

 private:
  Node node_;
  std::string namespace_;
};

class Creator final : public IPluginCreator {
 public:
  explicit Creator(Cell cell) : cell_(cell), names_(field_names(cell)) {
    collection_ = {static_cast<std::int32_t>(names_.size()), names_.data()};
  }

  const char* getPluginName() const noexcept override { return info(cell_).op_type; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  void setPluginNamespace(const char* name) noexcept override {
    guarded([&] { namespace_ = name != nullptr ? name : ""; });
  }
  const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

  IPluginV2* createPlugin(const char*, const PluginFieldCollection* fields) noexcept override {
    return make([&] { return read_fields(cell_, fields); });
  }
  IPluginV2* deserializePlugin(const char*, const void* data, std::size_t bytes) noexcept override {
    return make([&] { return deserialize(cell_, data, bytes); });
  }

 private:
  template <class Read>
  IPluginV2* make(Read&& read) noexcept {
    std::unique_ptr<Plugin> plugin;
    guarded([&] {
      auto made = std::make_unique<Plugin>(read());
      made->setPluginNamespace(namespace_.c_str());
      plugin = std::move(made);
    });
    return plugin.release();  // TensorRT calls destroy()
  }

  Cell cell_;
  std::vector<PluginField> names_;
  PluginFieldCollection collection_{};
  std::string namespace_;
};

// Runs when the library is loaded. The creators are never destroyed: the registry keeps them until the process ends.
__attribute__((constructor)) void register_creators() {
  guarded([] {
    using GetRegistry = IPluginRegistry*() noexcept;
    GetRegistry* const get_registry = runtime_function<GetRegistry>("getPluginRegistry");
    if (get_registry == nullptr) return;
    for (const OpInfo& op : kOps) get_registry()->registerCreator(*new Creator(op.cell), kPluginNamespace);
  });
}

}  // namespace
}  // namespace flashrnn::trt
