#include "node.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "../kernels/cuda/launch.h"

namespace flashrnn::trt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

#if NV_TENSORRT_MAJOR == 8
#define FLASHRNN_HAS_BFLOAT16 0
#else
#define FLASHRNN_HAS_BFLOAT16 1
#endif

bool is_float(DataType type) {
#if FLASHRNN_HAS_BFLOAT16
  if (type == DataType::kBF16) return true;
#endif
  return type == DataType::kFLOAT || type == DataType::kHALF;
}

DType dtype_of(DataType type) {
#if FLASHRNN_HAS_BFLOAT16
  if (type == DataType::kBF16) return DType::kBfloat16;
#endif
  return type == DataType::kHALF ? DType::kFloat16 : DType::kFloat32;
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBfloat16:
      return "bfloat16";
  }
  return "?";
}

PluginFieldType field_type(int) { return PluginFieldType::kINT32; }
PluginFieldType field_type(float) { return PluginFieldType::kFLOAT32; }

template <class T>
T load(const PluginField& field) {
  T value;
  std::memcpy(&value, field.data, sizeof(value));  // a parser's buffers are aligned to bytes
  return value;
}

// Parsers write INT as int32 whatever the release; programs also write int64 and float64.
void read(Cell cell, const PluginField& field, int& value) {
  if (field.type == PluginFieldType::kINT32) {
    value = switch_value(cell, field.name, load<std::int32_t>(field));
    return;
  }
#if FLASHRNN_HAS_BFLOAT16  // kINT64 came with it
  if (field.type == PluginFieldType::kINT64) {
    value = switch_value(cell, field.name, load<std::int64_t>(field));
    return;
  }
#endif
  refuse(info(cell).op_type, ": attribute ", field.name, " is no INT");
}

void read(Cell cell, const PluginField& field, float& value) {
  if (field.type == PluginFieldType::kFLOAT32) {
    value = bound_value(cell, field.name, load<float>(field));
  } else if (field.type == PluginFieldType::kFLOAT64) {
    value = bound_value(cell, field.name, load<double>(field));
  } else {
    refuse(info(cell).op_type, ": attribute ", field.name, " is no FLOAT");
  }
}

const PluginField* find(const PluginFieldCollection& fields, const char* name) {
  const auto end = fields.fields + fields.nbFields;
  const auto found = std::find_if(fields.fields, end, [&](const PluginField& field) {
    return field.name != nullptr && std::strcmp(field.name, name) == 0;
  });
  return found == end ? nullptr : found;
}

void check_names(Cell cell, const PluginFieldCollection& fields) {
  for (std::int32_t i = 0; i < fields.nbFields; ++i) {
    const char* given = fields.fields[i].name != nullptr ? fields.fields[i].name : "";
    bool known = std::strcmp(given, "plugin_version") == 0 || std::strcmp(given, "plugin_namespace") == 0;
    Attributes attributes;
    for_each_attribute(cell, attributes,
                       [&](const char* own, const auto&) { known = known || std::strcmp(given, own) == 0; });
    if (!known) refuse(info(cell).op_type, ": there is no attribute ", given);
  }
}

void check_count(const Node& node, std::int32_t num_inputs) {
  if (num_inputs != kNumInputs) {
    refuse(node.op_type(), ": ", num_inputs, " inputs, expected ", static_cast<int>(kNumInputs));
  }
}

// TensorRT's dims as the contract's, which are int64 in every release.
struct InputShapes {
  std::int64_t dims[kNumInputs][Dims::MAX_DIMS];
  Shape shapes[kNumInputs];

  void set(int input, const Dims& from) {
    const std::int32_t rank = std::max<std::int32_t>(from.nbDims, 0);
    for (std::int32_t i = 0; i < rank; ++i) dims[input][i] = from.d[i];
    shapes[input] = {dims[input], static_cast<std::size_t>(rank)};
  }
};

Params describe(const Node& node, const InputShapes& inputs, DataType wx) {
  Params params;
  params.cell = node.cell;
  params.dtype = dtype_of(wx);
  params.attributes = node.attributes;
  check_inputs(inputs.shapes, params);
  return params;
}

}  // namespace

std::vector<PluginField> field_names(Cell cell) {
  std::vector<PluginField> fields;
  Attributes attributes;
  for_each_attribute(cell, attributes,
                     [&](const char* name, auto value) { fields.emplace_back(name, nullptr, field_type(value), 1); });
  return fields;
}

Node read_fields(Cell cell, const PluginFieldCollection* fields) {
  if (fields == nullptr) refuse(info(cell).op_type, ": no attributes");
  check_names(cell, *fields);
  Node node{cell, {}};
  for_each_attribute(cell, node.attributes, [&](const char* name, auto& value) {
    const PluginField* field = find(*fields, name);
    if (field == nullptr || field->data == nullptr) refuse(info(cell).op_type, ": attribute ", name, " is missing");
    if (field->length != 1) refuse(info(cell).op_type, ": attribute ", name, " has ", field->length, " values");
    read(cell, *field, value);
  });
  check_attributes(cell, node.attributes);
  return node;
}

std::vector<PluginField> write_fields(const Node& node) {
  std::vector<PluginField> fields;
  for_each_attribute(node.cell, node.attributes, [&](const char* name, const auto& value) {
    fields.emplace_back(name, &value, field_type(value), 1);
  });
  return fields;
}

bool supports(std::int32_t index, const nvinfer1::PluginTensorDesc& tensor, DataType wx) {
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
  switch (index) {
    case kWx:
    case kR:
    case kNumInputs + kY:
      return is_float(tensor.type) && tensor.type == wx;
    case kSequenceLens:
      return tensor.type == DataType::kINT32;
    default:
      return tensor.type == DataType::kFLOAT;
  }
}

DataType output_type(std::int32_t output, DataType wx) { return output == kY ? wx : DataType::kFLOAT; }

DimsExprs output_dims(const Node& node, std::int32_t output, const DimsExprs* inputs, std::int32_t num_inputs,
                      nvinfer1::IExprBuilder& builder) {
  check_count(node, num_inputs);
  constexpr std::int32_t kRanks[kNumInputs] = {3, 5, 4, 1, 4};
  for (int i = 0; i < kNumInputs; ++i) {
    if (inputs[i].nbDims != kRanks[i]) {
      refuse(node.op_type(), ": ", kInputs[i], " has rank ", inputs[i].nbDims, ", expected ", kRanks[i]);
    }
  }
  if (output == kFinalStates) return inputs[kInitialStates];
  const auto product = [&](const nvinfer1::IDimensionExpr* a, const nvinfer1::IDimensionExpr* b) {
    return builder.operation(nvinfer1::DimensionOperation::kPROD, *a, *b);
  };
  DimsExprs y = inputs[kWx];
  const DimsExprs& r = inputs[kR];
  y.d[2] = product(product(r.d[0], r.d[2]), r.d[3]);  // N H D
  return y;
}

Params describe(const Node& node, const nvinfer1::PluginTensorDesc* inputs) {
  InputShapes shapes;
  for (int i = 0; i < kNumInputs; ++i) shapes.set(i, inputs[i].dims);
  return describe(node, shapes, inputs[kWx].type);
}

Params describe_largest(const Node& node, const nvinfer1::DynamicPluginTensorDesc* inputs, std::int32_t num_inputs) {
  check_count(node, num_inputs);
  InputShapes shapes;
  for (int i = 0; i < kNumInputs; ++i) shapes.set(i, inputs[i].max);
  return describe(node, shapes, inputs[kWx].desc.type);
}

void enqueue(const Node& node, const nvinfer1::PluginTensorDesc* descriptions, const void* const* inputs,
             void* const* outputs, void* workspace, cudaStream_t stream) {
  Params params = describe(node, descriptions);
  params.wx = inputs[kWx];
  params.r = inputs[kR];
  params.b = static_cast<const float*>(inputs[kB]);
  params.sequence_lens = static_cast<const std::int32_t*>(inputs[kSequenceLens]);
  params.initial_states = static_cast<const float*>(inputs[kInitialStates]);
  params.y = outputs[kY];
  params.final_states = static_cast<float*>(outputs[kFinalStates]);
  const cudaError_t error = cuda::launch(params, workspace, stream);
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // it is reported here; TensorRT's next call must not find it
  throw std::runtime_error(text(params) + ": launch: " + cudaGetErrorString(error));
}

std::string text(const Params& params) {
  std::ostringstream out;
  out << info(params.cell).op_type << ": " << name(params.dtype) << ", T " << params.T << ", B " << params.B << ", N "
      << params.N << ", H " << params.H << ", D " << params.D;
  return out.str();
}

}  // namespace flashrnn::trt
