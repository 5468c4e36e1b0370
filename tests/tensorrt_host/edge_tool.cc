// The parts of samples/cpp_edge that need neither TensorRT nor CUDA, for tests/test_cpp_edge.py.
//   edge_tool sidecar ENGINE TENSORRT CAPABILITY [PLUGIN...]   checks as Engine does
//   edge_tool model MODEL.onnx OUT.onnx                        writes what goes to the parser, prints what was read
//   edge_tool npy IN.npy TYPE OUT.npy                          converts
//   edge_tool describe ENGINE MODEL.onnx PLUGIN TENSORRT CAPABILITY [SHAPE...]
//   edge_tool shapes MODEL.onnx [SHAPE...]                     prints the profile of each input
//   edge_tool output ENGINE [INPUT...]                         checks where an engine is to be written
#include <cstdio>
#include <exception>

#include "array.h"
#include "error.h"
#include "files.h"
#include "onnx_file.h"
#include "rebuild.h"
#include "shapes.h"
#include "sidecar.h"

using namespace flashrnn_edge;

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> words(argv + 1, argv + argc);
    const std::string command = words.at(0);
    if (command == "sidecar") {
      const Json sidecar = read_sidecar(words.at(1));
      check_bytes(words[1], read_file(words[1]), sidecar);
      check_place(words[1], sidecar, {words.at(2), words.at(3), {words.begin() + 4, words.end()}});
    } else if (command == "model") {
      const OnnxFile file = read_onnx(read_file(words.at(1)), words[1]);
      write_file(words.at(2), file.bytes);
      Json lengths = Json::array();
      for (const std::string& name : length_inputs(file)) lengths.items.push_back(name);
      std::printf("%s\n", Json::object({{"lengths", lengths}, {"no_chunks", why_no_chunks(file)}}).dump().c_str());
    } else if (command == "npy") {
      for (const Type type : {Type::kFloat32, Type::kFloat16, Type::kBfloat16, Type::kInt32, Type::kInt64}) {
        if (words.at(2) == name(type)) write_npy(words.at(3), convert(read_npy(words.at(1)), type, words[1]));
      }
    } else if (command == "describe") {
      const std::string engine = words.at(1);
      Json facts = describe_engine(read_file(engine), words.at(2), words.at(3), {words.at(4), words.at(5), {}});
      for (const char* key : {"shapes", "axes", "dtypes"}) facts.members.emplace_back(key, Json::object());
      facts.members.emplace_back("states", Json::array({Json::array({"h\"0\u00e9", "hn"})}));
      BuildOptions options;
      options.plugin = words[3];
      options.shapes.assign(words.begin() + 6, words.end());
      options.sessions = 2;
      options.workspace_mib = 64;
      options.tf32 = options.cublas = true;
      add_command(words[2], options, facts);
      write_file(sidecar_path(engine), facts.dump());
    } else if (command == "shapes") {
      const OnnxFile file = read_onnx(read_file(words.at(1)), words[1]);
      const std::vector<std::string> options(words.begin() + 2, words.end());
      check_shapes(file, options);
      for (const auto& [input, dims] : file.input_dims) {
        std::printf("%s", input.c_str());
        for (const Dims& shape : profile_of(input, dims, file, options)) std::printf(" %s", text(shape).c_str());
        std::printf("\n");
      }
    } else if (command == "output") {
      check_output(words.at(1), {words.begin() + 2, words.end()});
    } else {
      fail("unknown command ", command);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
