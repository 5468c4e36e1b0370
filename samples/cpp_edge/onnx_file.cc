#include "onnx_file.h"

#include <algorithm>
#include <cstdint>
#include <functional>

#include "error.h"

namespace flashrnn_edge {
namespace {

constexpr const char* kDomain = "flashrnn";

// One field of a message: its number, and its value or bytes.
struct Field {
  std::uint64_t number = 0, value = 0;
  const char* begin = nullptr;  // of a length-delimited field
  const char* end = nullptr;
  std::string text() const { return begin == nullptr ? std::string() : std::string(begin, end); }
};

struct Damaged {};

std::uint64_t read_varint(const char*& at, const char* end) {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (at == end) throw Damaged{};
    const auto byte = static_cast<unsigned char>(*at++);
    value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  throw Damaged{};
}

Field read_field(const char*& at, const char* end) {
  const std::uint64_t tag = read_varint(at, end);
  Field field;
  field.number = tag >> 3;
  const auto skip = [&](std::uint64_t bytes) {
    if (bytes > static_cast<std::uint64_t>(end - at)) throw Damaged{};
    at += bytes;
  };
  switch (tag & 7) {
    case 0:
      field.value = read_varint(at, end);
      return field;
    case 1:
      skip(8);
      return field;
    case 2: {
      const std::uint64_t length = read_varint(at, end);
      field.begin = at;
      skip(length);
      field.end = at;
      return field;
    }
    case 5:
      skip(4);
      return field;
    default:
      throw Damaged{};
  }
}

void for_each_field(const char* begin, const char* end, const std::function<void(const Field&)>& visit) {
  while (begin != end) visit(read_field(begin, end));
}
void for_each_field(const Field& message, const std::function<void(const Field&)>& visit) {
  if (message.begin == nullptr) throw Damaged{};
  for_each_field(message.begin, message.end, visit);
}

std::string text_of(const Field& message, std::uint64_t number) {
  std::string text;
  for_each_field(message, [&](const Field& field) {
    if (field.number == number) text = field.text();
  });
  return text;
}

// The field numbers below are those of onnx.proto: NodeProto, TensorProto, ValueInfoProto, GraphProto, ModelProto.
OnnxNode read_node(const Field& message) {
  OnnxNode node;
  for_each_field(message, [&](const Field& field) {
    if (field.number == 1) node.inputs.push_back(field.text());
    if (field.number == 2) node.outputs.push_back(field.text());
    if (field.number == 3) node.name = field.text();
    if (field.number == 4) node.op_type = field.text();
    if (field.number == 7) node.domain = field.text();
    if (field.number == 5) {
      std::int64_t value = 0;
      bool is_int = false;
      for_each_field(field, [&](const Field& part) {
        if (part.number == 3) value = static_cast<std::int64_t>(part.value);
        if (part.number == 20) is_int = part.value == 2;
      });
      if (is_int) node.ints[text_of(field, 1)] = value;
    }
  });
  return node;
}

void read_initializer(const Field& message, OnnxFile& file) {
  const std::string name = text_of(message, 8);
  Dims dims;
  for_each_field(message, [&](const Field& field) {
    if (field.number == 2) file.types[name] = static_cast<std::int64_t>(field.value);
    if (field.number != 1) return;
    if (field.begin == nullptr) return dims.push_back(static_cast<std::int64_t>(field.value));
    for (const char* at = field.begin; at != field.end;) {  // packed
      dims.push_back(static_cast<std::int64_t>(read_varint(at, field.end)));
    }
  });
  file.initializers[name] = dims;
}

void read_input(const Field& message, OnnxFile& file) {
  std::vector<std::string> names;
  Dims dims;
  for_each_field(message, [&](const Field& type) {
    if (type.number != 2) return;
    for_each_field(type, [&](const Field& tensor) {
      if (tensor.number != 1) return;
      for_each_field(tensor, [&](const Field& shape) {
        if (shape.number == 1) file.types[text_of(message, 1)] = static_cast<std::int64_t>(shape.value);
        if (shape.number != 2) return;
        for_each_field(shape, [&](const Field& dim) {
          names.push_back(text_of(dim, 2));
          dims.push_back(-1);
          for_each_field(dim, [&](const Field& field) {
            if (field.number == 1) dims.back() = static_cast<std::int64_t>(field.value);
          });
        });
      });
    });
  });
  file.inputs[text_of(message, 1)] = names;
  file.input_dims[text_of(message, 1)] = dims;
}

// Protobuf's encoding of what is added.
std::string varint(std::uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
std::string number_field(std::uint64_t number, std::uint64_t value) { return varint(number << 3) + varint(value); }
std::string bytes_field(std::uint64_t number, const std::string& bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + bytes;
}

std::string node_field(const char* op_type, const std::vector<std::string>& inputs, const std::string& output) {
  std::string node;
  for (const std::string& input : inputs) node += bytes_field(1, input);
  return bytes_field(1, node + bytes_field(2, output) + bytes_field(3, output) + bytes_field(4, op_type));
}

std::string int64_field(const std::string& name, std::int64_t value) {
  constexpr std::uint64_t kInt64 = 7;
  std::string raw;
  for (int i = 0; i < 8; ++i) raw += static_cast<char>(static_cast<std::uint64_t>(value) >> 8 * i);
  return bytes_field(5, number_field(1, 1) + number_field(2, kInt64) + bytes_field(8, name) + bytes_field(9, raw));
}

// Shape(start, end) as Shape and Slice.
std::string split_shape(const OnnxNode& node) {
  const auto value = [&](const char* name, std::int64_t otherwise) {
    const auto found = node.ints.find(name);
    return found == node.ints.end() ? otherwise : found->second;
  };
  const std::string& output = node.outputs.at(0);
  const std::string all = output + "/shape", start = output + "/start", end = output + "/end";
  return int64_field(start, value("start", 0)) + int64_field(end, value("end", 0x7fffffff)) +
         node_field("Shape", {node.inputs.at(0)}, all) + node_field("Slice", {all, start, end}, output);
}

// Reads the graph; returns it as it goes to the parser.
std::string read_graph(const Field& graph, OnnxFile& file) {
  std::string bytes;
  for (const char* at = graph.begin; at != graph.end;) {
    const char* const start = at;
    const Field field = read_field(at, graph.end);
    if (field.number == 5) read_initializer(field, file);
    if (field.number == 11) read_input(field, file);
    if (field.number == 1) {
      file.nodes.push_back(read_node(field));
      const OnnxNode& node = file.nodes.back();
      if (node.op_type == "Shape" && node.domain.empty() && node.ints.count("start") + node.ints.count("end") > 0) {
        bytes += split_shape(node);
        continue;
      }
    }
    bytes.append(start, at);
  }
  return bytes;
}

bool is_ours(const OnnxNode& node) { return node.domain == kDomain; }

}  // namespace

OnnxFile read_onnx(const std::string& bytes, const std::string& path) {
  OnnxFile file;
  try {
    const char* const end = bytes.data() + bytes.size();
    for (const char* at = bytes.data(); at != end;) {
      const char* const start = at;
      const Field field = read_field(at, end);
      if (field.number == 25 && text_of(field, 10) == kDomain) continue;  // functions, FunctionProto.domain
      if (field.number == 7) {
        file.bytes += bytes_field(7, read_graph(field, file));
        continue;
      }
      file.bytes.append(start, at);
      if (field.number == 14) file.metadata[text_of(field, 1)] = text_of(field, 2);
    }
  } catch (const Damaged&) {
    fail(path, " is not an ONNX file, or is damaged");
  }
  if (file.nodes.empty()) fail(path, " is not an ONNX file, or holds no nodes");
  return file;
}

std::vector<std::string> length_inputs(const OnnxFile& file) {
  std::map<std::string, const OnnxNode*> produced;
  for (const OnnxNode& node : file.nodes) {
    for (const std::string& output : node.outputs) produced[output] = &node;
  }
  std::vector<std::string> found;
  for (const OnnxNode& node : file.nodes) {
    if (!is_ours(node) || node.inputs.size() < 4) continue;
    std::string name = node.inputs[3];
    while (produced.count(name) != 0 && (produced[name]->op_type == "Cast" || produced[name]->op_type == "Identity")) {
      name = produced[name]->inputs.at(0);
    }
    const bool known = std::find(found.begin(), found.end(), name) != found.end();
    if (file.inputs.count(name) != 0 && file.initializers.count(name) == 0 && !known) found.push_back(name);
  }
  return found;
}

std::string why_no_chunks(const OnnxFile& file) {
  for (const OnnxNode& node : file.nodes) {
    if (!is_ours(node)) continue;
    const auto r = node.inputs.size() > 1 ? file.initializers.find(node.inputs[1]) : file.initializers.end();
    const bool two = r != file.initializers.end() && !r->second.empty() && r->second[0] == 2;
    const auto reverse = node.ints.find("reverse");
    if (two || (reverse != node.ints.end() && reverse->second != 0)) {
      return node.op_type + " " + node.name + " runs backward over the sequence and needs all of it at once";
    }
  }
  const auto states = file.metadata.find("flashrnn.states");
  if (states == file.metadata.end() || states->second.find(':') == std::string::npos) {
    return "the model has no state inputs and outputs (export it with --expose-states)";
  }
  return "";
}

}  // namespace flashrnn_edge
