// The driver's types as TensorRT's, and TensorRT's symbolic dims as plain numbers.
#pragma once

#include <NvInferRuntime.h>

#include <cstdio>
#include <cstdlib>
#include <deque>

#include "driver.h"

namespace host {

inline nvinfer1::DataType to_nv(Type type) {
  switch (type) {
    case Type::kFloat32:
      return nvinfer1::DataType::kFLOAT;
    case Type::kFloat16:
      return nvinfer1::DataType::kHALF;
    case Type::kInt32:
      return nvinfer1::DataType::kINT32;
    case Type::kBool:
      return nvinfer1::DataType::kBOOL;
    case Type::kBfloat16:
#if NV_TENSORRT_MAJOR == 8
      return nvinfer1::DataType::kUINT8;  // there is none: another that has to be refused
#else
      return nvinfer1::DataType::kBF16;
#endif
  }
  return nvinfer1::DataType::kINT8;
}

inline Type from_nv(nvinfer1::DataType type) {
  for (const Type known : {Type::kFloat32, Type::kFloat16, Type::kBfloat16, Type::kInt32}) {
    if (to_nv(known) == type) return known;
  }
  return Type::kBool;
}

inline nvinfer1::Dims to_nv(const Dims& dims) {
  nvinfer1::Dims out{};
  out.nbDims = static_cast<std::int32_t>(dims.size());
  for (std::size_t i = 0; i < dims.size(); ++i) out.d[i] = static_cast<decltype(+out.d[0])>(dims[i]);
  return out;
}

inline nvinfer1::PluginTensorDesc to_nv(const Tensor& tensor) {
  nvinfer1::PluginTensorDesc out{};
  out.dims = to_nv(tensor.dims);
  out.type = to_nv(tensor.type);
  out.format = tensor.linear ? nvinfer1::TensorFormat::kLINEAR : nvinfer1::TensorFormat::kCHW32;
  return out;
}

inline std::vector<nvinfer1::PluginTensorDesc> to_nv(const std::vector<Tensor>& tensors) {
  std::vector<nvinfer1::PluginTensorDesc> out;
  for (const Tensor& tensor : tensors) out.push_back(to_nv(tensor));
  return out;
}

// Descriptions during a build: float tensors' dims unknown, the least 1 and the largest as given.
inline std::vector<nvinfer1::DynamicPluginTensorDesc> to_dynamic(const std::vector<Tensor>& largest) {
  std::vector<nvinfer1::DynamicPluginTensorDesc> out;
  for (const Tensor& tensor : largest) {
    nvinfer1::DynamicPluginTensorDesc desc{};
    desc.desc = to_nv(tensor);
    desc.min = desc.max = desc.desc.dims;
    for (std::int32_t i = 0; i < desc.desc.dims.nbDims; ++i) {
      desc.desc.dims.d[i] = -1;
      desc.min.d[i] = 1;
    }
    out.push_back(desc);
  }
  return out;
}

using Number = decltype(+nvinfer1::Dims{}.d[0]);  // int32 up to TensorRT 9, int64 from 10 on
constexpr Number kUnknown = -1;

struct DimValue final : nvinfer1::apiv::VDimensionExpr {
  Number value = 0;
  bool isConstant() const override { return value != kUnknown; }
  Number getConstantValue() const override { return value; }
#if NV_TENSORRT_MAJOR != 8
  bool isSizeTensor() const override { return false; }
#endif
};

struct Dim final : nvinfer1::IDimensionExpr {
  explicit Dim(Number number) {
    value.value = number;
    mImpl = &value;
  }
  ~Dim() noexcept override = default;
  DimValue value;
};

struct BuilderValue final : nvinfer1::apiv::VExprBuilder {
  std::deque<Dim> dims;  // stays where it is
  const nvinfer1::IDimensionExpr* constant(Number value) override {
    dims.emplace_back(value);
    return &dims.back();
  }
  const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation op, const nvinfer1::IDimensionExpr& a,
                                            const nvinfer1::IDimensionExpr& b) override {
    if (!a.isConstant() || !b.isConstant()) return constant(kUnknown);
    if (op != nvinfer1::DimensionOperation::kPROD) return nullptr;
    return constant(a.getConstantValue() * b.getConstantValue());
  }
#if NV_TENSORRT_MAJOR != 8
  const nvinfer1::IDimensionExpr* declareSizeTensor(std::int32_t, const nvinfer1::IDimensionExpr&,
                                                    const nvinfer1::IDimensionExpr&) override {
    return nullptr;
  }
#endif
};

struct Builder final : nvinfer1::IExprBuilder {
  Builder() { mImpl = &value; }
  ~Builder() noexcept override = default;
  BuilderValue value;

  nvinfer1::DimsExprs from(const Dims& dims) {
    nvinfer1::DimsExprs out{};
    out.nbDims = static_cast<std::int32_t>(dims.size());
    for (std::size_t i = 0; i < dims.size(); ++i) out.d[i] = value.constant(static_cast<Number>(dims[i]));
    return out;
  }
};

inline Dims from_nv(const nvinfer1::DimsExprs& exprs) {
  Dims out;
  for (std::int32_t i = 0; i < exprs.nbDims; ++i) out.push_back(exprs.d[i]->getConstantValue());
  return out;
}

// Fields with their data, as a parser hands them over: texts have no terminating zero, numbers any alignment.
class Fields {
 public:
  explicit Fields(const std::vector<Field>& fields) {
    using nvinfer1::PluginFieldType;
    for (const Field& field : fields) {
      switch (field.kind) {
        case Field::kInt32:
          add(field, PluginFieldType::kINT32, static_cast<std::int32_t>(field.value));
          break;
        case Field::kInt64:
#if NV_TENSORRT_MAJOR == 8
          add(field, PluginFieldType::kINT32, static_cast<std::int32_t>(field.value));  // there is none
#else
          add(field, PluginFieldType::kINT64, static_cast<std::int64_t>(field.value));
#endif
          break;
        case Field::kFloat32:
          add(field, PluginFieldType::kFLOAT32, static_cast<float>(field.value));
          break;
        case Field::kFloat64:
          add(field, PluginFieldType::kFLOAT64, field.value);
          break;
        case Field::kText:
          data_.emplace_back("?" + field.text);
          push(field, PluginFieldType::kCHAR, static_cast<std::int32_t>(field.text.size()));
          break;
      }
    }
    collection_ = {static_cast<std::int32_t>(fields_.size()), fields_.data()};
  }
  const nvinfer1::PluginFieldCollection* get() const { return &collection_; }

 private:
  template <class T>
  void add(const Field& field, nvinfer1::PluginFieldType type, T value) {
    data_.emplace_back("?" + std::string(reinterpret_cast<const char*>(&value), sizeof(value)));
    push(field, type, field.length);
  }
  void push(const Field& field, nvinfer1::PluginFieldType type, std::int32_t length) {
    fields_.emplace_back(field.name.c_str(), data_.back().data() + 1, type, length);
  }

  std::deque<std::string> data_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

// The half of a library that asks its creators, whichever their interface.
template <class Creator>
class CreatorLibrary : public Library {
 public:
  std::vector<std::string> ops() override {
    std::vector<std::string> names;
    for (const Creator* creator : creators()) names.emplace_back(creator->getPluginName());
    return names;
  }
  std::vector<std::string> fields(const std::string& op) override {
    std::vector<std::string> names;
    const nvinfer1::PluginFieldCollection* fields = find(op)->getFieldNames();
    for (std::int32_t i = 0; i < fields->nbFields; ++i) names.emplace_back(fields->fields[i].name);
    return names;
  }
  std::string version_and_namespace(const std::string& op) override {
    return std::string(find(op)->getPluginVersion()) + " " + find(op)->getPluginNamespace();
  }

 protected:
  virtual const std::vector<Creator*>& creators() = 0;

  Creator* find(const std::string& op) {
    for (Creator* creator : creators()) {
      if (op == creator->getPluginName()) return creator;
    }
    std::fprintf(stderr, "no creator of %s\n", op.c_str());
    std::exit(2);
  }
};

}  // namespace host
