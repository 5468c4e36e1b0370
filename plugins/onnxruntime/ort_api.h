// The part of ONNX Runtime's C API that this library uses: a declaration of its own, so that no header of a particular
// release is needed and one binary serves every runtime from 1.17 on.
//
// OrtApi is a table of functions that only ever grows at its end; `_N` members stand for N functions not used here. A
// test compiles this file beside the official header and compares every slot's place and signature.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtValue;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtLogger;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;

namespace flashrnn::ort {

inline constexpr std::uint32_t kApiVersion = 17;  // of ONNX Runtime 1.17

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum ElementType : int { kUndefined = 0, kFloat = 1, kInt32 = 6, kFloat16 = 10, kBfloat16 = 16 };
enum Characteristic : int { kRequired = 0 };
enum MemoryType : int { kDefaultMemory = 0 };
enum LoggingLevel : int { kWarning = 2 };

using Unused = void (*)();

struct OrtApi {
  OrtStatus* (*CreateStatus)(ErrorCode code, const char* message);
  Unused _1[1];
  const char* (*GetErrorMessage)(const OrtStatus* status);
  Unused _3[23];
  OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain* domain, const struct OrtCustomOp* op);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);
  Unused _29[22];
  OrtStatus* (*GetTensorMutableData)(OrtValue* value, void** out);
  Unused _52[5];
  OrtStatus* (*CreateTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo** out);
  OrtStatus* (*SetTensorElementType)(OrtTensorTypeAndShapeInfo* info, ElementType type);
  OrtStatus* (*SetDimensions)(OrtTensorTypeAndShapeInfo* info, const std::int64_t* dims, std::size_t count);
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo* info, ElementType* out);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, std::size_t* out);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo* info, std::int64_t* dims, std::size_t count);
  OrtStatus* (*GetSymbolicDimensions)(const OrtTensorTypeAndShapeInfo* info, const char* names[], std::size_t count);
  Unused _64[1];
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** out);
  Unused _66[19];
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo* info, const char* name, float* out);
  OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo* info, const char* name, std::int64_t* out);
  Unused _87[3];
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext* context, std::size_t index, const OrtValue** out);
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext* context, std::size_t index, const std::int64_t* dims,
                                        std::size_t count, OrtValue** out);
  Unused _92[1];
  void (*ReleaseStatus)(OrtStatus* status);
  Unused _94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info);
  Unused _100[30];
  OrtStatus* (*AddSessionConfigEntry)(OrtSessionOptions* options, const char* key, const char* value);
  Unused _131[62];
  OrtStatus* (*KernelContext_GetGPUComputeStream)(const OrtKernelContext* context, void** out);
  Unused _194[43];
  OrtStatus* (*HasSessionConfigEntry)(const OrtSessionOptions* options, const char* key, int* out);
  OrtStatus* (*GetSessionConfigEntry)(const OrtSessionOptions* options, const char* key, char* value,
                                      std::size_t* size);
  Unused _239[6];
  OrtStatus* (*KernelInfo_GetLogger)(const OrtKernelInfo* info, const OrtLogger** logger);
  Unused _246[1];
  OrtStatus* (*Logger_LogMessage)(const OrtLogger* logger, LoggingLevel level, const char* message, const char* file,
                                  int line, const char* function);
  Unused _248[1];
  OrtStatus* (*KernelInfoGetConstantInput_tensor)(const OrtKernelInfo* info, std::size_t index, int* is_constant,
                                                  const OrtValue** out);
  Unused _250[18];
  OrtStatus* (*ShapeInferContext_GetInputTypeShape)(const OrtShapeInferContext* context, std::size_t index,
                                                    OrtTensorTypeAndShapeInfo** info);
  Unused _269[1];
  OrtStatus* (*ShapeInferContext_SetOutputTypeShape)(const OrtShapeInferContext* context, std::size_t index,
                                                     const OrtTensorTypeAndShapeInfo* info);
  OrtStatus* (*SetSymbolicDimensions)(OrtTensorTypeAndShapeInfo* info, const char* names[], std::size_t count);
  Unused _272[2];
  OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext* context, void (*task)(void*, std::size_t),
                                          std::size_t count, std::size_t num_batch, void* argument);
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(std::uint32_t version);
  const char* (*GetVersionString)();
};

// As of API 17; a runtime reads no further for an op of this version.
struct OrtCustomOp {
  std::uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info);
  const char* (*GetName)(const OrtCustomOp* op);
  const char* (*GetExecutionProviderType)(const OrtCustomOp* op);
  ElementType (*GetInputType)(const OrtCustomOp* op, std::size_t index);
  std::size_t (*GetInputTypeCount)(const OrtCustomOp* op);
  ElementType (*GetOutputType)(const OrtCustomOp* op, std::size_t index);
  std::size_t (*GetOutputTypeCount)(const OrtCustomOp* op);
  void (*KernelCompute)(void* kernel, OrtKernelContext* context);
  void (*KernelDestroy)(void* kernel);
  Characteristic (*GetInputCharacteristic)(const OrtCustomOp* op, std::size_t index);
  Characteristic (*GetOutputCharacteristic)(const OrtCustomOp* op, std::size_t index);
  MemoryType (*GetInputMemoryType)(const OrtCustomOp* op, std::size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp* op);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp* op);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext* context);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp* op, OrtShapeInferContext* context);
  int (*GetStartVersion)(const OrtCustomOp* op);
  int (*GetEndVersion)(const OrtCustomOp* op);
  // What follows in newer releases is read only from ops of a newer version.
};

}  // namespace flashrnn::ort
