// flashrnn_edge: builds, checks and runs TensorRT engines of recurrent networks.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#ifdef FLASHRNN_EDGE_BUILDER
#include "builder.h"
#endif
#include "error.h"
#include "flashrnn_edge.h"

namespace {

using namespace flashrnn_edge;

constexpr const char* kUsage =
    "usage:\n"
    "  flashrnn_edge build MODEL.onnx -o ENGINE --plugin LIB [--shape NAME=MIN:OPT:MAX]... [--workspace MIB]\n"
    "                [--sessions N] [--tf32] [--cublas]\n"
    "  flashrnn_edge run ENGINE --plugin LIB --input NAME=FILE.npy... -o DIR [--chunk STEPS] [--graph]\n"
    "                [--repeat N] [--profile] [--trust-engine]\n"
    "  flashrnn_edge info ENGINE --plugin LIB [--trust-engine]\n"
    "A shape is written 1x100x64; NAME is an input or a named axis. -v prints what TensorRT says.\n";

struct Arguments {
  std::vector<std::string> words;
  std::map<std::string, std::vector<std::string>> options;

  bool has(const std::string& name) const { return options.count(name) != 0; }
  std::vector<std::string> all(const std::string& name) const {
    const auto found = options.find(name);
    return found == options.end() ? std::vector<std::string>() : found->second;
  }
  std::string one(const std::string& name, const std::string& otherwise = "") const {
    const std::vector<std::string> given = all(name);
    return given.empty() ? otherwise : given.back();
  }
  long number(const std::string& name) const {
    char* end = nullptr;
    const std::string text = one(name, "0");
    const long value = std::strtol(text.c_str(), &end, 10);
    if (*end != '\0' || value < 0 || (has(name) && value == 0)) fail(name, " ", text, ": give a positive number");
    return value;
  }
};

Arguments parse(int argc, char** argv) {
  const std::vector<std::string> with_value = {"-o",         "--plugin", "--shape", "--workspace",
                                               "--sessions", "--input",  "--chunk", "--repeat"};
  const std::vector<std::string> alone = {"--cublas", "--tf32", "--graph", "--profile", "--trust-engine", "-v"};
  const auto is_in = [](const std::vector<std::string>& list, const std::string& word) {
    return std::find(list.begin(), list.end(), word) != list.end();
  };
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (is_in(with_value, word)) {
      if (i + 1 == argc) fail(word, " needs a value\n", kUsage);
      arguments.options[word].push_back(argv[++i]);
    } else if (is_in(alone, word)) {
      arguments.options[word];
    } else if (word.size() > 1 && word[0] == '-') {
      fail("unknown option ", word, "\n", kUsage);
    } else {
      arguments.words.push_back(word);
    }
  }
  if (arguments.words.size() != 2) fail(kUsage);
  return arguments;
}

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
  if (arguments.has("--sessions")) options.sessions = static_cast<int>(arguments.number("--sessions"));
  options.cublas = arguments.has("--cublas");
  options.tf32 = arguments.has("--tf32");
  options.verbose = arguments.has("-v");
  if (!arguments.has("-o")) fail("build needs -o ENGINE");
  build_engine(arguments.words[1], arguments.one("-o"), options);
  std::printf("wrote %s and %s\n", arguments.one("-o").c_str(), sidecar_path(arguments.one("-o")).c_str());
#else
  (void)arguments;
  fail("this flashrnn_edge was compiled without NvOnnxParser.h and cannot build engines");
#endif
}

Engine load(const Arguments& arguments) {
  return Engine(arguments.words[1], arguments.all("--plugin"), arguments.has("--trust-engine"), arguments.has("-v"));
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
  if (!arguments.has("-o")) fail("run needs -o DIR");
  const Engine engine = load(arguments);
  Arrays inputs;
  for (const std::string& input : arguments.all("--input")) {
    const std::size_t equals = input.find('=');
    if (equals == std::string::npos) fail("--input ", input, ": write it as NAME=FILE.npy");
    inputs[input.substr(0, equals)] = read_npy(input.substr(equals + 1));
  }
  Times times;
  Session session(engine, arguments.has("--graph"), arguments.has("--profile") ? &times : nullptr);
  const Arrays outputs =
      arguments.has("--chunk") ? session.run_chunks(inputs, arguments.number("--chunk")) : session.run(inputs);
  const std::filesystem::path folder = arguments.one("-o");
  std::filesystem::create_directories(folder);
  for (const auto& [tensor, array] : outputs) {
    std::string file = tensor;
    std::replace(file.begin(), file.end(), '/', '_');  // a name stays inside the folder
    write_npy((folder / (file + ".npy")).string(), array);
    std::printf("%s %s %s\n", tensor.c_str(), name(array.type), text(array.dims).c_str());
  }
  std::vector<float> ms;
  for (long i = 0; i < arguments.number("--repeat"); ++i) ms.push_back(session.repeat());
  std::sort(ms.begin(), ms.end());
  if (!ms.empty())
    std::printf("median of %zu calls: %.4f ms on the GPU\n", ms.size(), static_cast<double>(ms[ms.size() / 2]));
  times.print();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && (std::strcmp(argv[1], "-h") == 0 || std::strcmp(argv[1], "--help") == 0)) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  try {
    const Arguments arguments = parse(argc, argv);
    const std::string& command = arguments.words[0];
    if (command == "build") {
      build(arguments);
    } else if (command == "run") {
      run(arguments);
    } else if (command == "info") {
      show(arguments);
    } else {
      fail("unknown command ", command, "\n", kUsage);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
