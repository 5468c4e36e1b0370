// flashrnn_edge: builds, checks and runs TensorRT engines of recurrent networks.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "arguments.h"
#ifdef FLASHRNN_EDGE_BUILDER
#include "builder.h"
#endif
#include "error.h"
#include "flashrnn_edge.h"

namespace {

using namespace flashrnn_edge;

class Times final : public nvinfer1::IProfiler {
 public:
  void reportLayerTime(const char* layer, float ms) noexcept override { times_[layer].push_back(ms); }
  void print() const {
    for (auto [layer, times] : times_) {
      std::sort(times.begin(), times.end());
      std::printf("%10.4f ms  %s\n", static_cast<double>(times[times.size() / 2]), layer.c_str());
    }
  }

 private:
  std::map<std::string, std::vector<float>> times_;
};

void build(const Arguments& arguments) {
#ifdef FLASHRNN_EDGE_BUILDER
  BuildOptions options;
  options.plugin = arguments.one("--plugin");
  options.shapes = arguments.all("--shape");
  options.workspace_mib = static_cast<std::size_t>(arguments.number("--workspace"));
  if (arguments.has("--sessions")) options.sessions = arguments.number("--sessions");
  options.cublas = arguments.has("--cublas");
  options.tf32 = arguments.has("--tf32");
  options.verbose = arguments.has("-v");
  build_engine(arguments.file, arguments.one("-o"), options);
  std::printf("wrote %s and %s\n", arguments.one("-o").c_str(), sidecar_path(arguments.one("-o")).c_str());
#else
  (void)arguments;
  fail("this flashrnn_edge was compiled without NvOnnxParser.h and cannot build engines");
#endif
}

Engine load(const Arguments& arguments) {
  return Engine(arguments.file, arguments.all("--plugin"), arguments.has("--trust-engine"), arguments.has("-v"));
}

void show(const Arguments& arguments) {
  const Engine engine = load(arguments);
  for (const TensorInfo& tensor : engine.tensors()) {
    std::printf("%s %s %s", tensor.is_input ? "input" : "output", tensor.name.c_str(), name(tensor.type));
    if (tensor.is_input) std::printf(" %s to %s", text(tensor.min).c_str(), text(tensor.max).c_str());
    std::printf("\n");
  }
  for (const auto& [input, output] : engine.states())
    std::printf("state %s continues %s\n", input.c_str(), output.c_str());
  std::printf("chunks: %s\n", engine.why_no_chunks().empty() ? "yes" : engine.why_no_chunks().c_str());
}

void run(const Arguments& arguments) {
  const std::filesystem::path folder = arguments.one("-o");
  std::error_code error;
  if (std::filesystem::exists(folder, error) && !std::filesystem::is_directory(folder, error))
    fail("-o ", folder.string(), " is no folder: choose another");
  const long chunk = arguments.number("--chunk"), repeat = arguments.number("--repeat");
  Arrays inputs;
  for (const std::string& input : arguments.all("--input")) {
    const std::size_t equals = input.find('=');
    if (equals == std::string::npos) fail("--input ", input, ": write it as NAME=FILE.npy");
    const std::string tensor = input.substr(0, equals);
    if (!inputs.emplace(tensor, read_npy(input.substr(equals + 1))).second) fail("--input ", tensor, " is given twice");
  }
  const Engine engine = load(arguments);
  Times times;
  Session session(engine, arguments.has("--graph"), arguments.has("--profile") ? &times : nullptr);
  const Arrays outputs = arguments.has("--chunk") ? session.run_chunks(inputs, chunk) : session.run(inputs);
  std::filesystem::create_directories(folder, error);
  if (error) fail("cannot make the folder ", folder.string(), ": ", error.message());
  for (const auto& [tensor, array] : outputs) {
    std::string file = tensor;
    std::replace(file.begin(), file.end(), '/', '_');  // a name stays inside the folder
    write_npy((folder / (file + ".npy")).string(), array);
    std::printf("%s %s %s\n", tensor.c_str(), name(array.type), text(array.dims).c_str());
  }
  std::vector<float> ms;
  for (long i = 0; i < repeat; ++i) ms.push_back(session.repeat());
  std::sort(ms.begin(), ms.end());
  if (!ms.empty())
    std::printf("median of %zu calls: %.4f ms on the GPU\n", ms.size(), static_cast<double>(ms[ms.size() / 2]));
  times.print();
}

void execute(const Arguments& arguments) {
  if (arguments.command == "--help") {
    std::fputs(help(arguments.file).c_str(), stdout);
  } else if (arguments.command == "--version") {
    std::printf("flashrnn_edge %s for TensorRT %d.%d, with the library of TensorRT %s\n", kToolVersion,
                NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR, tensorrt_version().text().c_str());
  } else if (arguments.command == "build") {
    build(arguments);
  } else if (arguments.command == "run") {
    run(arguments);
  } else {
    show(arguments);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    execute(parse_arguments({argv + 1, argv + argc}));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", one_line(error.what()).c_str());
    return dynamic_cast<const UsageError*>(&error) != nullptr ? 2 : 1;
  }
}
