// What building an engine needs to know of an ONNX file, read from its protobuf encoding without a protobuf library.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "array.h"

namespace flashrnn_edge {

struct OnnxNode {
  std::string op_type, domain, name;
  std::vector<std::string> inputs, outputs;
  std::map<std::string, std::int64_t> ints;  // attributes of type INT
};

struct OnnxFile {
  // As TensorRT's parsers need it: without the function bodies of our ops, which those up to TensorRT 10.6 prefer to a
  // plugin, and with Shape(start, end) as Shape and Slice, since those of TensorRT 8 do not see the two attributes.
  std::string bytes;
  std::map<std::string, std::string> metadata;
  std::vector<OnnxNode> nodes;                             // of the graph, without those of inner graphs
  std::map<std::string, Dims> initializers;                // dims by name
  std::map<std::string, std::int64_t> types;               // of initializers and inputs: TensorProto.DataType
  std::map<std::string, std::vector<std::string>> inputs;  // of the graph: names of dims, "" where they are sizes
  std::map<std::string, Dims> input_dims;                  // sizes of the same, -1 where they are names
};

inline constexpr std::int64_t kOnnxFloat16 = 10, kOnnxBfloat16 = 16;

// Throws Error where `bytes`, of a file called `path`, is not a model.
OnnxFile read_onnx(const std::string& bytes, const std::string& path);

// Graph inputs that reach the sequence_lens of our ops unchanged.
std::vector<std::string> length_inputs(const OnnxFile& file);

// Why a sequence in chunks is not the whole sequence; empty where nothing here says so.
std::string why_no_chunks(const OnnxFile& file);

}  // namespace flashrnn_edge
