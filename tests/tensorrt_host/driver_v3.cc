// The driver of IPluginV3: a library that exports getCreators and setLoggerFinder.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nv_types.h"

namespace host {
namespace {

using namespace nvinfer1;

class LayerV3 final : public Layer {
 public:
  explicit LayerV3(IPluginV3* plugin)
      : plugin_(plugin),
        build_(static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD))),
        runtime_(static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME))) {}

  bool output_dims(const std::vector<Dims>& inputs, std::vector<Dims>& outputs) override {
    Builder builder;
    std::vector<DimsExprs> in, out(static_cast<std::size_t>(build_->getNbOutputs()));
    for (const Dims& dims : inputs) in.push_back(builder.from(dims));
    const bool good = build_->getOutputShapes(in.data(), count(in), nullptr, 0, out.data(), count(out), builder) == 0;
    outputs.clear();
    for (const DimsExprs& dims : out) outputs.push_back(good ? from_nv(dims) : Dims{});
    return good;
  }

  std::vector<Type> output_types(const std::vector<Type>& inputs) override {
    std::vector<DataType> in, out(static_cast<std::size_t>(build_->getNbOutputs()));
    for (const Type type : inputs) in.push_back(to_nv(type));
    std::vector<Type> types;
    if (build_->getOutputDataTypes(out.data(), count(out), in.data(), count(in)) != 0) return types;
    for (const DataType type : out) types.push_back(from_nv(type));
    return types;
  }

  bool supports(int index, const std::vector<Tensor>& tensors) override {
    const auto all = to_dynamic(tensors);
    return build_->supportsFormatCombination(index, all.data(), 5, count(all) - 5);
  }

  bool configure(const std::vector<Tensor>& largest) override {
    const auto in = to_dynamic(largest);
    const std::vector<DynamicPluginTensorDesc> out(2);
    return build_->configurePlugin(in.data(), count(in), out.data(), 2) == 0;
  }

  std::size_t workspace_bytes(const std::vector<Tensor>& largest) override {
    const auto in = to_dynamic(largest);
    const std::vector<DynamicPluginTensorDesc> out(2);
    return build_->getWorkspaceSize(in.data(), count(in), out.data(), 2);
  }

  bool enqueue(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
               const std::vector<const void*>& in, const std::vector<void*>& out, void* workspace,
               cudaStream_t stream) override {
    const auto in_desc = to_nv(inputs), out_desc = to_nv(outputs);
    if (runtime_->onShapeChange(in_desc.data(), count(in_desc), out_desc.data(), count(out_desc)) != 0) return false;
    return runtime_->enqueue(in_desc.data(), out_desc.data(), in.data(), out.data(), workspace, stream) == 0;
  }

  std::unique_ptr<Layer> for_context() override {
    IPluginV3* attached = runtime_->attachToContext(nullptr);
    return attached == nullptr ? nullptr : std::make_unique<LayerV3>(attached);
  }

  // Name, type and data of each field, as an engine keeps them.
  std::string serialize() override {
    const PluginFieldCollection* fields = runtime_->getFieldsToSerialize();
    std::string bytes;
    for (std::int32_t i = 0; i < fields->nbFields; ++i) {
      const PluginField& field = fields->fields[i];
      bytes += static_cast<char>(field.type);
      bytes.append(static_cast<const char*>(field.data), 4);
      bytes += std::string(field.name) + '\0';
    }
    return bytes;
  }

 private:
  template <class T>
  static std::int32_t count(const std::vector<T>& items) {
    return static_cast<std::int32_t>(items.size());
  }

  std::unique_ptr<IPluginV3> plugin_;
  IPluginV3OneBuild* build_;
  IPluginV3OneRuntime* runtime_;
};

class LibraryV3 final : public CreatorLibrary<IPluginCreatorV3One> {
 public:
  LibraryV3(IPluginCreatorInterface* const* creators, std::int32_t count) {
    for (std::int32_t i = 0; i < count; ++i) creators_.push_back(static_cast<IPluginCreatorV3One*>(creators[i]));
  }
  const char* name() const override { return "IPluginV3"; }
  bool has_bfloat16() const override { return true; }

  std::unique_ptr<Layer> create(const std::string& op, const std::vector<Field>& fields) override {
    return wrap(find(op)->createPlugin("layer", Fields(fields).get(), TensorRTPhase::kBUILD));
  }
  std::unique_ptr<Layer> deserialize(const std::string& op, const std::string& bytes) override {
    std::vector<PluginField> fields;
    for (std::size_t at = 0; at + 5 < bytes.size(); at += 5 + std::strlen(bytes.data() + at + 5) + 1) {
      fields.emplace_back(bytes.data() + at + 5, bytes.data() + at + 1, static_cast<PluginFieldType>(bytes[at]), 1);
    }
    const PluginFieldCollection collection{static_cast<std::int32_t>(fields.size()), fields.data()};
    return wrap(find(op)->createPlugin("layer", &collection, TensorRTPhase::kRUNTIME));
  }

 private:
  static std::unique_ptr<Layer> wrap(IPluginV3* plugin) {
    return plugin == nullptr ? nullptr : std::make_unique<LayerV3>(plugin);
  }
  const std::vector<IPluginCreatorV3One*>& creators() override { return creators_; }

  std::vector<IPluginCreatorV3One*> creators_;
};

}  // namespace

std::unique_ptr<Library> load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  using GetCreators = IPluginCreatorInterface* const*(std::int32_t&);
  using SetLoggerFinder = void(ILoggerFinder*);
  auto* const get = library == nullptr ? nullptr : reinterpret_cast<GetCreators*>(dlsym(library, "getCreators"));
  auto* const set =
      library == nullptr ? nullptr : reinterpret_cast<SetLoggerFinder*>(dlsym(library, "setLoggerFinder"));
  if (get == nullptr || set == nullptr) {
    std::fprintf(stderr, "%s: %s\n", path, dlerror());
    std::exit(2);
  }
  set(nullptr);
  std::int32_t count = 0;
  IPluginCreatorInterface* const* creators = get(count);
  return std::make_unique<LibraryV3>(creators, count);
}

}  // namespace host
