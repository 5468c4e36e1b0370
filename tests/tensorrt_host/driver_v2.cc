// The driver of IPluginV2DynamicExt: a library that registers itself with the registry that this program exports, and
// logs to its logger, as it does with those of libnvinfer.so.8.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nv_types.h"

namespace host {
namespace {

using namespace nvinfer1;

std::vector<IPluginCreator*> registered;

class Registry final : public IPluginRegistry {
 public:
  bool registerCreator(IPluginCreator& creator, const char*) noexcept override {
    registered.push_back(&creator);
    return true;
  }
  IPluginCreator* const* getPluginCreatorList(std::int32_t*) const noexcept override { return nullptr; }
  IPluginCreator* getPluginCreator(const char*, const char*, const char*) noexcept override { return nullptr; }
  void setErrorRecorder(IErrorRecorder*) noexcept override {}
  IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
  bool deregisterCreator(const IPluginCreator&) noexcept override { return false; }
#if NV_TENSORRT_MINOR >= 6
  bool isParentSearchEnabled() const override { return false; }
  void setParentSearchEnabled(bool) override {}
  PluginLibraryHandle loadLibrary(const char*) noexcept override { return nullptr; }
  void deregisterLibrary(PluginLibraryHandle) noexcept override {}
#endif
};

class Logger final : public ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override {
    if (severity <= Severity::kERROR) std::fprintf(stderr, "%s\n", message);
  }
};

class LayerV2 final : public Layer {
 public:
  explicit LayerV2(IPluginV2* plugin) : plugin_(static_cast<IPluginV2DynamicExt*>(plugin)) { plugin_->initialize(); }
  ~LayerV2() override {
    plugin_->terminate();
    plugin_->destroy();
  }

  bool output_dims(const std::vector<Dims>& inputs, std::vector<Dims>& outputs) override {
    Builder builder;
    std::vector<DimsExprs> in;
    for (const Dims& dims : inputs) in.push_back(builder.from(dims));
    outputs.clear();
    bool good = true;
    for (std::int32_t i = 0; i < plugin_->getNbOutputs(); ++i) {
      const DimsExprs out = plugin_->getOutputDimensions(i, in.data(), count(in), builder);
      good = good && out.nbDims >= 0;
      outputs.push_back(from_nv(out));
    }
    return good;
  }

  std::vector<Type> output_types(const std::vector<Type>& inputs) override {
    std::vector<DataType> in;
    for (const Type type : inputs) in.push_back(to_nv(type));
    std::vector<Type> types;
    for (std::int32_t i = 0; i < plugin_->getNbOutputs(); ++i) {
      types.push_back(from_nv(plugin_->getOutputDataType(i, in.data(), count(in))));
    }
    return types;
  }

  bool supports(int index, const std::vector<Tensor>& tensors) override {
    const auto all = to_nv(tensors);
    return plugin_->supportsFormatCombination(index, all.data(), 5, count(all) - 5);
  }

  bool configure(const std::vector<Tensor>& largest) override {
    const auto in = to_dynamic(largest);
    const std::vector<DynamicPluginTensorDesc> out(2);
    plugin_->configurePlugin(in.data(), count(in), out.data(), 2);
    return true;
  }

  std::size_t workspace_bytes(const std::vector<Tensor>& largest) override {
    const auto in = to_nv(largest);
    const std::vector<PluginTensorDesc> out(2);
    return plugin_->getWorkspaceSize(in.data(), count(in), out.data(), 2);
  }

  bool enqueue(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
               const std::vector<const void*>& in, const std::vector<void*>& out, void* workspace,
               cudaStream_t stream) override {
    const auto in_desc = to_nv(inputs), out_desc = to_nv(outputs);
    return plugin_->enqueue(in_desc.data(), out_desc.data(), in.data(), out.data(), workspace, stream) == 0;
  }

  std::unique_ptr<Layer> for_context() override {
    IPluginV2* copy = plugin_->clone();
    return copy == nullptr ? nullptr : std::make_unique<LayerV2>(copy);
  }

  std::string serialize() override {
    std::string bytes(plugin_->getSerializationSize(), '\0');
    plugin_->serialize(bytes.data());
    return bytes;
  }

 private:
  template <class T>
  static std::int32_t count(const std::vector<T>& items) {
    return static_cast<std::int32_t>(items.size());
  }

  IPluginV2DynamicExt* plugin_;
};

class LibraryV2 final : public CreatorLibrary<IPluginCreator> {
 public:
  const char* name() const override { return "IPluginV2DynamicExt"; }
  bool has_bfloat16() const override { return false; }

  std::unique_ptr<Layer> create(const std::string& op, const std::vector<Field>& fields) override {
    return wrap(find(op)->createPlugin("layer", Fields(fields).get()));
  }
  std::unique_ptr<Layer> deserialize(const std::string& op, const std::string& bytes) override {
    const std::string moved = "?" + bytes;  // at any alignment
    return wrap(find(op)->deserializePlugin("layer", moved.data() + 1, bytes.size()));
  }

 private:
  static std::unique_ptr<Layer> wrap(IPluginV2* plugin) {
    return plugin == nullptr ? nullptr : std::make_unique<LayerV2>(plugin);
  }
  const std::vector<IPluginCreator*>& creators() override { return registered; }
};

}  // namespace

std::unique_ptr<Library> load(const char* path) {
  if (dlopen(path, RTLD_NOW | RTLD_LOCAL) == nullptr) {
    std::fprintf(stderr, "%s: %s\n", path, dlerror());
    std::exit(2);
  }
  return std::make_unique<LibraryV2>();
}

}  // namespace host

// Declared by the headers; the library finds them as it finds those of TensorRT.
__attribute__((visibility("default"))) nvinfer1::IPluginRegistry* getPluginRegistry() noexcept {
  static host::Registry registry;
  return &registry;
}

__attribute__((visibility("default"))) nvinfer1::ILogger* getLogger() noexcept {
  static host::Logger logger;
  return &logger;
}
