// The plugin interface of TensorRT 10 and 11 and of TensorRT for RTX: IPluginV3, found through getCreators.
//
// The layouts of these interfaces are the same from 10.0 to 11.1, so that one build serves them all. Those of the
// registry and the logger are not: neither is ever called here, and messages go to stderr.
#include <cstdio>
#include <memory>

#include "../kernels/cuda/launch.h"
#include "node.h"

namespace flashrnn::trt {

void report(const char* message) noexcept { std::fprintf(stderr, "flashrnn: %s\n", message); }

namespace {

using namespace nvinfer1;  // NOLINT: the interfaces' own types, in every signature below

std::int32_t status(bool good) { return good ? 0 : -1; }

class Plugin final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  explicit Plugin(const Node& node) : node_(node) {}
  Plugin(const Plugin&) = delete;  // fields_ points into node_
  Plugin& operator=(const Plugin&) = delete;

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
      case PluginCapabilityType::kCORE:
        return static_cast<IPluginV3OneCore*>(this);
      case PluginCapabilityType::kBUILD:
        return static_cast<IPluginV3OneBuild*>(this);
      case PluginCapabilityType::kRUNTIME:
        return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  IPluginV3* clone() noexcept override { return make(node_); }

  const char* getPluginName() const noexcept override { return node_.op_type(); }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  std::int32_t getNbOutputs() const noexcept override { return kNumOutputs; }

  std::int32_t getOutputDataTypes(DataType* outputs, std::int32_t num_outputs, const DataType* inputs,
                                  std::int32_t num_inputs) const noexcept override {
    if (num_inputs != kNumInputs || num_outputs != kNumOutputs) return -1;
    for (std::int32_t i = 0; i < num_outputs; ++i) outputs[i] = output_type(i, inputs[kWx]);
    return 0;
  }

  std::int32_t getOutputShapes(const DimsExprs* inputs, std::int32_t num_inputs, const DimsExprs*, std::int32_t,
                               DimsExprs* outputs, std::int32_t num_outputs, IExprBuilder& builder) noexcept override {
    return status(guarded([&] {
      for (std::int32_t i = 0; i < num_outputs; ++i) outputs[i] = output_dims(node_, i, inputs, num_inputs, builder);
    }));
  }

  bool supportsFormatCombination(std::int32_t index, const DynamicPluginTensorDesc* tensors, std::int32_t num_inputs,
                                 std::int32_t num_outputs) noexcept override {
    return num_inputs + num_outputs == kNumTensors && supports(index, tensors[index].desc, tensors[kWx].desc.type);
  }

  std::int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, std::int32_t num_inputs,
                               const DynamicPluginTensorDesc*, std::int32_t) noexcept override {
    return status(guarded([&] { (void)describe_largest(node_, inputs, num_inputs); }));
  }

  std::size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, std::int32_t num_inputs,
                               const DynamicPluginTensorDesc*, std::int32_t) const noexcept override {
    std::size_t bytes = 0;
    guarded([&] { bytes = cuda::max_workspace_bytes(describe_largest(node_, inputs, num_inputs)); });
    return bytes;
  }

  std::int32_t onShapeChange(const PluginTensorDesc* inputs, std::int32_t, const PluginTensorDesc*,
                             std::int32_t) noexcept override {
    return status(guarded([&] { (void)describe(node_, inputs); }));
  }

  std::int32_t enqueue(const PluginTensorDesc* descriptions, const PluginTensorDesc*, const void* const* inputs,
                       void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    return status(guarded([&] { trt::enqueue(node_, descriptions, inputs, outputs, workspace, stream); }));
  }

  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }

  const PluginFieldCollection* getFieldsToSerialize() noexcept override {
    return guarded([&] {
      fields_ = write_fields(node_);
      collection_ = {static_cast<std::int32_t>(fields_.size()), fields_.data()};
    })
               ? &collection_
               : nullptr;
  }

  static IPluginV3* make(const Node& node) noexcept {
    Plugin* plugin = nullptr;
    guarded([&] { plugin = new Plugin(node); });  // TensorRT deletes it
    return plugin;
  }

 private:
  Node node_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

class Creator final : public IPluginCreatorV3One {
 public:
  explicit Creator(Cell cell) : cell_(cell), names_(field_names(cell)) {
    collection_ = {static_cast<std::int32_t>(names_.size()), names_.data()};
  }

  // The same fields in both phases: a parser's, and those that getFieldsToSerialize() put into the engine.
  IPluginV3* createPlugin(const char*, const PluginFieldCollection* fields, TensorRTPhase) noexcept override {
    IPluginV3* plugin = nullptr;
    guarded([&] { plugin = Plugin::make(read_fields(cell_, fields)); });
    return plugin;
  }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return info(cell_).op_type; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  Cell cell_;
  std::vector<PluginField> names_;
  PluginFieldCollection collection_{};
};

// One creator per op. They are never destroyed: a registry may outlive static objects.
const std::vector<IPluginCreatorInterface*>& creators() {
  static const auto& all = *[] {
    auto* made = new std::vector<IPluginCreatorInterface*>;
    for (const OpInfo& op : kOps) made->push_back(new Creator(op.cell));
    return made;
  }();
  return all;
}

}  // namespace
}  // namespace flashrnn::trt

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    std::int32_t& count) {
  count = 0;
  nvinfer1::IPluginCreatorInterface* const* first = nullptr;
  flashrnn::trt::guarded([&] {
    first = flashrnn::trt::creators().data();
    count = static_cast<std::int32_t>(flashrnn::trt::creators().size());
  });
  return first;
}

// A library of plugins has to have it. The logger behind it is not called: its layout changed in TensorRT 11.
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
