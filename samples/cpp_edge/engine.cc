#include <algorithm>

#include "error.h"
#include "files.h"
#include "flashrnn_edge.h"

namespace flashrnn_edge {

Engine::Engine(const std::string& path, const std::vector<std::string>& plugins, bool trust, bool verbose)
    : log_(std::make_unique<Log>(verbose)) {
  check_tensorrt();
  const std::string bytes = read_file(path);
  Json sidecar;
  if (!trust) {
    sidecar = read_sidecar(path);
    check_bytes(path, bytes, sidecar);
  }
  const Running here = running(plugins);
  if (!trust) {
    check_place(path, sidecar, here);
    read_sidecar_facts(sidecar);
  }
  for (const std::string& plugin : plugins) load_plugin(plugin);
  runtime_.reset(nvinfer1::createInferRuntime(*log_));
  if (runtime_ == nullptr) fail("TensorRT ", here.tensorrt, " does not start: ", log_->take());
  engine_.reset(runtime_->deserializeCudaEngine(bytes.data(), bytes.size()));
  if (engine_ == nullptr) fail("TensorRT ", here.tensorrt, " cannot load ", path, ": ", log_->take());
  read_tensors();
}

void Engine::read_sidecar_facts(const Json& sidecar) {
  for (const Json& pair : sidecar["states"].items) states_[pair.items[0].string] = pair.items[1].string;
  for (const Json& length : sidecar["lengths"].items) lengths_.push_back(length.string);
  axes_ = sidecar["axes"];
  no_chunks_ = sidecar["no_chunks"].string;
  if (states_.empty() && no_chunks_.empty()) no_chunks_ = "the engine has no state inputs and outputs";
}

void Engine::read_tensors() {
  for (std::int32_t i = 0; i < engine_->getNbIOTensors(); ++i) {
    const char* tensor_name = engine_->getIOTensorName(i);
    TensorInfo tensor;
    tensor.name = tensor_name;
    tensor.type = from_nv(engine_->getTensorDataType(tensor_name), tensor.name);
    tensor.is_input = engine_->getTensorIOMode(tensor_name) == nvinfer1::TensorIOMode::kINPUT;
    if (tensor.is_input) {
      tensor.min = from_nv(engine_->getProfileShape(tensor_name, 0, nvinfer1::OptProfileSelector::kMIN));
      tensor.max = from_nv(engine_->getProfileShape(tensor_name, 0, nvinfer1::OptProfileSelector::kMAX));
    }
    const Json &time = axes_[tensor.name]["time"], &batch = axes_[tensor.name]["batch"];
    if (time.kind == Json::kNumber) tensor.time_axis = static_cast<int>(time.number);
    if (batch.kind == Json::kNumber) tensor.batch_axis = static_cast<int>(batch.number);
    tensors_.push_back(tensor);
  }
  for (const auto& [input, output] : states_) {
    (void)tensor(input);
    (void)tensor(output);
  }
}

const TensorInfo& Engine::tensor(const std::string& name) const {
  std::string names;
  for (const TensorInfo& tensor : tensors_) {
    if (tensor.name == name) return tensor;
    names += (names.empty() ? "" : ", ") + tensor.name;
  }
  fail("the engine has no tensor ", name, "; it has ", names);
}

int Engine::take_profile() const {
#if NV_TENSORRT_MAJOR == 8
  const std::lock_guard<std::mutex> lock(profiles_->mutex);
  std::vector<bool>& taken = profiles_->taken;
  taken.resize(static_cast<std::size_t>(engine_->getNbOptimizationProfiles()));
  const auto free = std::find(taken.begin(), taken.end(), false);
  if (free == taken.end())
    fail("the engine was built for ", taken.size(), " session(s) at once: build it with --sessions");
  *free = true;
  return static_cast<int>(free - taken.begin());
#else
  return 0;
#endif
}

void Engine::give_back_profile(int profile) const {
  const std::lock_guard<std::mutex> lock(profiles_->mutex);
  if (static_cast<std::size_t>(profile) < profiles_->taken.size()) {
    profiles_->taken[static_cast<std::size_t>(profile)] = false;
  }
}

bool Engine::is_length(const std::string& input) const {
  return std::find(lengths_.begin(), lengths_.end(), input) != lengths_.end();
}

}  // namespace flashrnn_edge
