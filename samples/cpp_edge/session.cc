#include <algorithm>
#include <cstring>

#include "error.h"
#include "flashrnn_edge.h"

namespace flashrnn_edge {
namespace {

// What is left of each row's length in a chunk that starts at `start`.
Array left_of(const Array& lengths, std::int64_t start, std::int64_t steps) {
  Array out = convert(lengths, Type::kInt64, "the lengths");
  for (std::size_t at = 0; at < out.bytes.size(); at += 8) {
    std::int64_t value = 0;
    std::memcpy(&value, &out.bytes[at], 8);
    value = std::clamp<std::int64_t>(value - start, 0, steps);
    std::memcpy(&out.bytes[at], &value, 8);
  }
  return out;
}

}  // namespace

Session::Session(const Engine& engine, bool graph, nvinfer1::IProfiler* profiler)
    : engine_(engine), profile_(engine.take_profile()), use_graph_(graph && profiler == nullptr) {
  try {
    context_.reset(engine.engine().createExecutionContext());
    if (context_ == nullptr) fail("TensorRT makes no execution context: ", engine.log().take());
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a CUDA stream");
    if (profile_ > 0 && !context_->setOptimizationProfileAsync(profile_, stream_)) {
      fail("TensorRT does not take the profile ", profile_, ": ", engine.log().take());
    }
    if (profiler != nullptr) context_->setProfiler(profiler);
    allocate();
    reset();
  } catch (...) {
    close();
    throw;
  }
}

Session::~Session() { close(); }

void Session::close() {
  (void)cudaStreamSynchronize(stream_);
  drop_graph();
  context_.reset();
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  engine_.give_back_profile(profile_);
}

void Session::allocate() {
  for (const TensorInfo& tensor : engine_.tensors()) {
    if (tensor.is_input) set_shape(tensor, tensor.max);
  }
  for (const TensorInfo& tensor : engine_.tensors()) {
    Buffer& buffer = buffers_[tensor.name];
    buffer.bytes = std::max<std::size_t>(bytes_now(tensor), 1);
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, buffer.bytes), "device memory");
    buffer.memory.reset(memory);
    if (!context_->setTensorAddress(tensor.name.c_str(), memory)) fail(tensor.name, ": ", engine_.log().take());
  }
}

void Session::drop_graph() {
  if (graph_ != nullptr) (void)cudaGraphExecDestroy(graph_);
  graph_ = nullptr;
}

std::size_t Session::bytes_now(const TensorInfo& tensor) const {
  const Dims dims = from_nv(context_->getTensorShape(tensor.name.c_str()));
  return static_cast<std::size_t>(num_elements(dims)) * size_of(tensor.type);
}

void Session::set_shape(const TensorInfo& tensor, const Dims& dims) {
  bool fits = dims.size() == tensor.max.size();
  for (std::size_t i = 0; fits && i < dims.size(); ++i) fits = dims[i] >= tensor.min[i] && dims[i] <= tensor.max[i];
  if (!fits) {
    fail("the input ", tensor.name, " has shape ", text(dims), "; the engine takes ", text(tensor.min), " to ",
         text(tensor.max), ": build it with a larger --shape");
  }
  if (shapes_[tensor.name] == dims) return;
  if (!context_->setInputShape(tensor.name.c_str(), to_nv(dims))) {
    fail("TensorRT refuses the shape ", text(dims), " of ", tensor.name, ": ", engine_.log().take());
  }
  shapes_[tensor.name] = dims;
  fresh_shapes_ = true;
}

void Session::reset() {
  for (const auto& [input, output] : engine_.states()) {
    Buffer& buffer = buffers_[input];
    check_cuda(cudaMemsetAsync(buffer.memory.get(), 0, buffer.bytes, stream_), "states");
  }
  check_cuda(cudaStreamSynchronize(stream_), "states");
}

// The engine, then each final state to where the next call reads it.
void Session::enqueue() {
  if (!context_->enqueueV3(stream_)) fail("TensorRT does not run the engine: ", engine_.log().take());
  for (const auto& [input, output] : engine_.states()) {
    check_cuda(cudaMemcpyAsync(buffers_[input].memory.get(), buffers_[output].memory.get(),
                               bytes_now(engine_.tensor(output)), cudaMemcpyDeviceToDevice, stream_),
               "states");
  }
}

// TensorRT wants one call of a shape before it is captured.
void Session::launch() {
  if (fresh_shapes_ || !use_graph_) {
    drop_graph();
    enqueue();
    fresh_shapes_ = false;
    return;
  }
  if (graph_ == nullptr) {
    cudaGraph_t captured = nullptr;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    try {
      enqueue();
    } catch (...) {
      (void)cudaStreamEndCapture(stream_, &captured);
      if (captured != nullptr) (void)cudaGraphDestroy(captured);
      throw;
    }
    check_cuda(cudaStreamEndCapture(stream_, &captured), "capture");
    const cudaError_t made = cudaGraphInstantiateWithFlags(&graph_, captured, 0);
    (void)cudaGraphDestroy(captured);
    check_cuda(made, "the CUDA graph");
  }
  check_cuda(cudaGraphLaunch(graph_, stream_), "the CUDA graph");
}

Arrays Session::run(const Arrays& inputs) {
  for (const auto& [name, array] : inputs) {
    if (!engine_.tensor(name).is_input) fail(name, " is an output of the engine");
  }
  // A state that is not given has the batch of the call: its other axes are fixed.
  for (const TensorInfo& tensor : engine_.tensors()) {
    if (!tensor.is_input) continue;
    const auto given = inputs.find(tensor.name);
    if (given != inputs.end()) {
      set_shape(tensor, given->second.dims);
      continue;
    }
    if (engine_.states().count(tensor.name) == 0) {
      fail("the input ", tensor.name, " is missing; the engine takes ", text(tensor.min), " to ", text(tensor.max));
    }
  }
  for (const auto& [input, output] : engine_.states()) {
    if (inputs.count(input) != 0) continue;
    const TensorInfo& state = engine_.tensor(input);
    Dims dims = shapes_[input];
    for (std::size_t axis = 0; axis < dims.size(); ++axis) {
      if (state.min[axis] != state.max[axis]) dims[axis] = batch_of(inputs);
    }
    set_shape(state, dims);
  }

  std::vector<Array> converted;  // alive until the copies are done
  for (const auto& [name, array] : inputs) {
    converted.push_back(convert(array, engine_.tensor(name).type, "the input " + name));
    const std::vector<char>& bytes = converted.back().bytes;
    if (bytes.empty()) continue;
    check_cuda(
        cudaMemcpyAsync(buffers_[name].memory.get(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream_),
        "inputs");
  }
  launch();
  Arrays outputs;
  for (const TensorInfo& tensor : engine_.tensors()) {
    if (tensor.is_input) continue;
    Array& array = outputs[tensor.name] = Array(tensor.type, from_nv(context_->getTensorShape(tensor.name.c_str())));
    if (array.bytes.empty()) continue;
    check_cuda(cudaMemcpyAsync(array.bytes.data(), buffers_[tensor.name].memory.get(), array.bytes.size(),
                               cudaMemcpyDeviceToHost, stream_),
               "outputs");
  }
  check_cuda(cudaStreamSynchronize(stream_), "the call");
  return outputs;
}

std::int64_t Session::batch_of(const Arrays& inputs) const {
  for (const auto& [name, array] : inputs) {
    const int axis = engine_.tensor(name).batch_axis;
    if (axis >= 0 && static_cast<std::size_t>(axis) < array.dims.size())
      return array.dims[static_cast<std::size_t>(axis)];
  }
  fail("the batch of the states is not known: give them as inputs");
}

Arrays Session::run_chunks(const Arrays& inputs, std::int64_t chunk) {
  if (!engine_.why_no_chunks().empty()) fail("--chunk: ", engine_.why_no_chunks());
  if (chunk < 1) fail("--chunk ", chunk, ": give at least 1");
  std::int64_t steps = -1;
  for (const auto& [name, array] : inputs) {
    const int axis = engine_.tensor(name).time_axis;
    if (axis < 0 || engine_.states().count(name) != 0) continue;
    const std::int64_t here = array.dims.at(static_cast<std::size_t>(axis));
    if (steps >= 0 && here != steps) fail("--chunk: ", name, " has ", here, " steps, another input ", steps);
    steps = here;
  }
  if (steps < 1) fail("--chunk: no input has a time axis with steps");

  std::map<std::string, std::vector<Array>> parts;
  for (std::int64_t start = 0; start < steps; start += chunk) {
    const std::int64_t stop = std::min(start + chunk, steps);
    Arrays now;
    for (const auto& [name, array] : inputs) {
      const int axis = engine_.tensor(name).time_axis;
      if (engine_.states().count(name) != 0) {
        if (start == 0) now[name] = array;
      } else if (axis >= 0) {
        now[name] = slice(array, static_cast<std::size_t>(axis), start, stop);
      } else {
        now[name] = engine_.is_length(name) ? left_of(array, start, stop - start) : array;
      }
    }
    for (auto& [name, array] : run(now)) parts[name].push_back(std::move(array));
  }
  Arrays outputs;
  for (auto& [name, pieces] : parts) {
    const int axis = engine_.tensor(name).time_axis;
    outputs[name] = axis >= 0 ? concatenate(pieces, static_cast<std::size_t>(axis)) : pieces.back();
  }
  return outputs;
}

float Session::repeat() {
  cudaEvent_t before = nullptr, after = nullptr;
  check_cuda(cudaEventCreate(&before), "an event");
  check_cuda(cudaEventCreate(&after), "an event");
  check_cuda(cudaEventRecord(before, stream_), "an event");
  launch();
  check_cuda(cudaEventRecord(after, stream_), "an event");
  check_cuda(cudaEventSynchronize(after), "the call");
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, before, after), "an event");
  (void)cudaEventDestroy(before);
  (void)cudaEventDestroy(after);
  return ms;
}

}  // namespace flashrnn_edge
