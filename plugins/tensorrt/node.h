// One FlashRNN layer of an engine: what the plugin interfaces of all TensorRT releases share. An adapter (plugin_v3.cc,
// plugin_v2.cc) adds the calls of one interface and nothing else.
//
// Only types that every release since 8.5 has are used, so that this file compiles against any release's headers.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "../contract.h"

namespace flashrnn::trt {

inline constexpr const char* kPluginVersion = "1";
inline constexpr const char* kPluginNamespace = "";
inline constexpr std::int32_t kNumTensors =
    static_cast<std::int32_t>(kNumInputs) + static_cast<std::int32_t>(kNumOutputs);

struct Node {
  Cell cell;
  Attributes attributes;

  const char* op_type() const { return info(cell).op_type; }
};

// The names and types of an op's attributes, for a creator to announce; the entries hold no data.
std::vector<nvinfer1::PluginField> field_names(Cell cell);

// A node from the fields of a creator's caller: a parser, an engine that is loaded, a program. Throws InvalidArgument.
Node read_fields(Cell cell, const nvinfer1::PluginFieldCollection* fields);

// The fields that read_fields() makes the node of. They point into `node`.
std::vector<nvinfer1::PluginField> write_fields(const Node& node);

// Whether tensor `index`, inputs counted before outputs, may be `tensor` where wx has the type `wx`.
bool supports(std::int32_t index, const nvinfer1::PluginTensorDesc& tensor, nvinfer1::DataType wx);
nvinfer1::DataType output_type(std::int32_t output, nvinfer1::DataType wx);

// Throws InvalidArgument where a rank is wrong.
nvinfer1::DimsExprs output_dims(const Node& node, std::int32_t output, const nvinfer1::DimsExprs* inputs,
                                std::int32_t num_inputs, nvinfer1::IExprBuilder& builder);

// Sizes and dtype of a call from its inputs. Throws InvalidArgument where they contradict the op's contract.
Params describe(const Node& node, const nvinfer1::PluginTensorDesc* inputs);
// The same for the largest shapes of a profile.
Params describe_largest(const Node& node, const nvinfer1::DynamicPluginTensorDesc* inputs, std::int32_t num_inputs);

// Enqueues the call, without allocating; `workspace` has max_workspace_bytes(). Throws where the launch fails.
void enqueue(const Node& node, const nvinfer1::PluginTensorDesc* descriptions, const void* const* inputs,
             void* const* outputs, void* workspace, cudaStream_t stream);

// "FlashLSTM: float16, T 1, B 16, N 1, H 4, D 64", for logs.
std::string text(const Params& params);

// Tells the user, by what the adapter's interface has.
void report(const char* message) noexcept;

// Runs `body`; reports what it throws, and says whether it threw nothing.
template <class Body>
bool guarded(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return true;
  } catch (const std::exception& error) {
    report(error.what());
  } catch (...) {
    report("flashrnn: unknown error");
  }
  return false;
}

}  // namespace flashrnn::trt
