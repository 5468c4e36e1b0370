#include "builder.h"

#include <NvInfer.h>
#include <NvOnnxParser.h>

#include <algorithm>
#include <memory>

#include "error.h"
#include "files.h"
#include "onnx_file.h"
#include "rebuild.h"
#include "runtime.h"
#include "shapes.h"

namespace flashrnn_edge {
namespace {

using nvinfer1::IBuilderConfig;
using nvinfer1::INetworkDefinition;
using nvinfer1::OptProfileSelector;

constexpr OptProfileSelector kSelectors[] = {OptProfileSelector::kMIN, OptProfileSelector::kOPT,
                                             OptProfileSelector::kMAX};
constexpr const char* kSelectorNames[] = {"min", "opt", "max"};

void check_plugins(const OnnxFile& file) {
  for (const OnnxNode& node : file.nodes) {
    if (node.domain != "flashrnn" || has_plugin(node.op_type)) continue;
    fail("the node ", node.name, " needs the plugin ", node.op_type, ", version ", kPluginVersion, ", namespace '",
         kPluginNamespace,
         "', and no loaded library has it: pass the library with --plugin LIB, built with: "
         "flashrnn-deploy build-plugins MODEL.onnx --gpu GPU --tensorrt-include DIR -o DIR");
  }
}

// The networks of TensorRT 8 are weakly typed: our layers are held to the types of the file. Float16 has to be allowed
// for a model that has it. A layer's precision is no way: it would concern sequence_lens and the states as well.
void constrain([[maybe_unused]] const OnnxFile& file, [[maybe_unused]] INetworkDefinition& network,
               [[maybe_unused]] IBuilderConfig& config, [[maybe_unused]] const BuildOptions& options) {
#if NV_TENSORRT_MAJOR == 8
  using nvinfer1::DataType;
  for (const auto& [name, type] : file.types) {
    if (type == kOnnxBfloat16) fail("TensorRT 8 has no bfloat16: export the model with --dtype float16");
    if (type == kOnnxFloat16) config.setFlag(nvinfer1::BuilderFlag::kFP16);
  }
  if (config.getFlag(nvinfer1::BuilderFlag::kFP16)) {
    config.setFlag(nvinfer1::BuilderFlag::kOBEY_PRECISION_CONSTRAINTS);
    std::map<std::string, bool> halves;  // our layers, by name
    for (const OnnxNode& node : file.nodes) {
      const auto r = node.inputs.size() > 1 ? file.types.find(node.inputs[1]) : file.types.end();
      if (node.domain == "flashrnn" && r != file.types.end()) halves[node.name] = r->second == kOnnxFloat16;
    }
    for (int i = 0; i < network.getNbLayers(); ++i) {
      nvinfer1::ILayer& layer = *network.getLayer(i);
      const auto found = halves.find(layer.getName());
      if (layer.getType() != nvinfer1::LayerType::kPLUGIN_V2 || found == halves.end()) continue;
      layer.setOutputType(0, found->second ? DataType::kHALF : DataType::kFLOAT);
      layer.setOutputType(1, DataType::kFLOAT);
    }
  }
  if (!options.cublas) {
    using nvinfer1::TacticSource;
    config.setTacticSources(1u << static_cast<unsigned>(TacticSource::kEDGE_MASK_CONVOLUTIONS) |
                            1u << static_cast<unsigned>(TacticSource::kJIT_CONVOLUTIONS));
  }
#endif
}

std::uint32_t network_flags() {
#if NV_TENSORRT_MAJOR == 8
  return 1u << static_cast<unsigned>(nvinfer1::NetworkDefinitionCreationFlag::kEXPLICIT_BATCH);
#elif NV_TENSORRT_MAJOR == 10
  return 1u << static_cast<unsigned>(nvinfer1::NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
#else
  return 0;  // all networks are strongly typed
#endif
}

Json shape_json(const Dims& dims) {
  Json list = Json::array();
  for (const std::int64_t dim : dims) list.items.push_back(static_cast<double>(dim));
  return list;
}

// What running needs to know of the model.
void add_model_facts(const OnnxFile& file, Json& facts) {
  const auto metadata = [&](const char* key) {
    const auto found = file.metadata.find(key);
    return found == file.metadata.end() ? Json::object() : parse_json(found->second, std::string("the model's ") + key);
  };
  Json states = Json::array(), lengths = Json::array();
  for (const auto& [input, output] : metadata("flashrnn.states").members) {
    states.items.push_back(Json::array({input, output}));
  }
  for (const std::string& name : length_inputs(file)) lengths.items.push_back(name);
  facts.members.emplace_back("states", states);
  facts.members.emplace_back("axes", metadata("flashrnn.axes"));
  facts.members.emplace_back("lengths", lengths);
  const std::string why = why_no_chunks(file);
  if (!why.empty()) facts.members.emplace_back("no_chunks", why);
}

}  // namespace

void build_engine(const std::string& model, const std::string& engine, const BuildOptions& options) {
  check_tensorrt();
  check_output(engine, {model, options.plugin});
  const OnnxFile file = read_onnx(read_file(model), model);
  check_shapes(file, options.shapes);
  if (!options.plugin.empty()) load_plugin(options.plugin);
  check_plugins(file);
  const Running here = running({});

  Log log(options.verbose);
  const std::unique_ptr<nvinfer1::IBuilder> builder(nvinfer1::createInferBuilder(log));
  if (builder == nullptr) fail("TensorRT ", here.tensorrt, " does not start: ", log.take());
  const std::unique_ptr<INetworkDefinition> network(builder->createNetworkV2(network_flags()));
  const std::unique_ptr<nvonnxparser::IParser> parser(nvonnxparser::createParser(*network, log));
  if (!parser->parse(file.bytes.data(), file.bytes.size(), model.c_str())) {
    const std::string said = parser->getNbErrors() > 0 ? one_line(parser->getError(0)->desc()) : log.take();
    fail("TensorRT ", here.tensorrt, " cannot read ", model, ": ", said);
  }

  const std::unique_ptr<IBuilderConfig> config(builder->createBuilderConfig());
  if (options.workspace_mib > 0) {
    config->setMemoryPoolLimit(nvinfer1::MemoryPoolType::kWORKSPACE, options.workspace_mib << 20);
  }
  if (!options.tf32) config->clearFlag(nvinfer1::BuilderFlag::kTF32);  // TensorRT sets it
  constrain(file, *network, *config, options);
  Json shapes = Json::object(), dtypes = Json::object();
  // Before 8.6 no two contexts may use one profile: each session gets its own.
  const int num_profiles = NV_TENSORRT_MAJOR == 8 ? options.sessions : 1;
  std::vector<nvinfer1::IOptimizationProfile*> profiles;  // the builder's
  for (int k = 0; k < num_profiles; ++k) profiles.push_back(builder->createOptimizationProfile());
  for (int i = 0; i < network->getNbInputs(); ++i) {
    const nvinfer1::ITensor& input = *network->getInput(i);
    const Dims dims = from_nv(input.getDimensions());
    const std::vector<Dims> sizes = profile_of(input.getName(), dims, file, options.shapes);
    Json entry = Json::object();
    for (std::size_t k = 0; k < 3; ++k) entry.members.emplace_back(kSelectorNames[k], shape_json(sizes[k]));
    shapes.members.emplace_back(input.getName(), entry);
    dtypes.members.emplace_back(input.getName(), name(from_nv(input.getType(), input.getName())));
    if (std::find(dims.begin(), dims.end(), -1) == dims.end()) continue;
    for (nvinfer1::IOptimizationProfile* profile : profiles) {
      for (std::size_t k = 0; k < 3; ++k) profile->setDimensions(input.getName(), kSelectors[k], to_nv(sizes[k]));
    }
  }
  for (int i = 0; i < network->getNbOutputs(); ++i) {
    const nvinfer1::ITensor& output = *network->getOutput(i);
    dtypes.members.emplace_back(output.getName(), name(from_nv(output.getType(), output.getName())));
  }
  for (const nvinfer1::IOptimizationProfile* profile : profiles) {
    if (config->addOptimizationProfile(profile) < 0)
      fail("TensorRT refuses the shapes ", shapes.dump(), ": ", log.take());
  }

  const std::unique_ptr<nvinfer1::IHostMemory> memory(builder->buildSerializedNetwork(*network, *config));
  if (memory == nullptr) fail("TensorRT ", here.tensorrt, " cannot build an engine of ", model, ": ", log.take());
  const std::string bytes(static_cast<const char*>(memory->data()), memory->size());
  Json facts = describe_engine(bytes, model, options.plugin, here);
  facts.members.emplace_back("shapes", shapes);
  facts.members.emplace_back("dtypes", dtypes);
  add_model_facts(file, facts);
  add_command(model, options, facts);
  write_file(engine, bytes);
  write_file(sidecar_path(engine), facts.dump() + "\n");
}

}  // namespace flashrnn_edge
