// Runs TensorRT engines of recurrent networks from C++: TensorRT 8.5 to 11, no Python, no other library.
//
//   flashrnn_edge::Engine engine("model.engine", {"libflashrnn.so"});
//   flashrnn_edge::Session session(engine);               // one stream of data; make one per thread
//   auto outputs = session.run({{"x", chunk}});           // states are carried to the next call
//   session.reset();                                      // a new sequence
//
// Everything throws flashrnn_edge::Error with one line that says what to do. After one a session goes on to work.
#pragma once

#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "array.h"
#include "json.h"
#include "runtime.h"

namespace flashrnn_edge {

using Arrays = std::map<std::string, Array>;

struct TensorInfo {
  std::string name;
  Type type;
  bool is_input;
  Dims min, max;                        // of an input: what the engine takes
  int time_axis = -1, batch_axis = -1;  // -1: it has none
};

// An engine that was checked against its sidecar and loaded. Any number of sessions may use it, on any threads.
class Engine {
 public:
  // `trust`: run an engine without a sidecar, or in spite of it.
  Engine(const std::string& path, const std::vector<std::string>& plugins, bool trust = false, bool verbose = false);

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo& tensor(const std::string& name) const;                      // throws Error
  const std::map<std::string, std::string>& states() const { return states_; }  // state input -> output
  const std::string& why_no_chunks() const { return no_chunks_; }               // empty: chunks make the whole
  bool is_length(const std::string& input) const;
  nvinfer1::ICudaEngine& engine() const { return *engine_; }
  Log& log() const { return *log_; }

  // The profile of a new session: the first for all, but one for each with TensorRT 8. Throws Error where none is left.
  int take_profile() const;
  void give_back_profile(int profile) const;

 private:
  void read_sidecar_facts(const Json& sidecar);
  void read_tensors();

  struct Profiles {
    std::mutex mutex;
    std::vector<bool> taken;
  };

  std::unique_ptr<Log> log_;
  std::unique_ptr<Profiles> profiles_ = std::make_unique<Profiles>();
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  Json axes_;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, std::string> states_;
  std::vector<std::string> lengths_;
  std::string no_chunks_;
};

struct Free {
  void operator()(void* memory) const { (void)cudaFree(memory); }
};

// One execution context with its CUDA stream, its device memory and the carried states. Nothing is allocated after the
// constructor but host arrays.
class Session {
 public:
  // `graph`: calls of one shape after the first are replayed as one CUDA graph. `profiler`: may be null.
  explicit Session(const Engine& engine, bool graph = false, nvinfer1::IProfiler* profiler = nullptr);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // One call. State inputs that are not given continue from the call before, from zeros after reset().
  Arrays run(const Arrays& inputs);
  // The same in steps of `chunk` along the time axes; outputs joined.
  Arrays run_chunks(const Arrays& inputs, std::int64_t chunk);
  void reset();
  // The call before once more, on the data that is on the device: milliseconds on the GPU.
  float repeat();

 private:
  struct Buffer {
    std::unique_ptr<void, Free> memory;
    std::size_t bytes = 0;
  };

  void set_shape(const TensorInfo& tensor, const Dims& dims);
  void enqueue();
  void launch();
  void drop_graph();
  void allocate();
  void close();
  std::size_t bytes_now(const TensorInfo& tensor) const;
  std::int64_t batch_of(const Arrays& inputs) const;

  const Engine& engine_;
  int profile_;
  std::unique_ptr<nvinfer1::IExecutionContext> context_;
  cudaStream_t stream_ = nullptr;
  std::map<std::string, Buffer> buffers_;
  std::map<std::string, Dims> shapes_;  // of the inputs, at the last call
  bool use_graph_, fresh_shapes_ = true;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace flashrnn_edge
