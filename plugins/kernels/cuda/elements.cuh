// The dtypes of wx, r and y on the device, and the cell templates by Cell.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../cells.cuh"
#include "../op.h"

namespace flashrnn::cuda {

template <DType>
struct ElementOf;
template <>
struct ElementOf<DType::kFloat32> {
  using Type = float;
};
template <>
struct ElementOf<DType::kFloat16> {
  using Type = __half;
};
template <>
struct ElementOf<DType::kBfloat16> {
  using Type = __nv_bfloat16;
};
template <DType kType>
using Element = typename ElementOf<kType>::Type;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class E>
__device__ __forceinline__ E from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <Cell>
struct StepOf;
template <>
struct StepOf<Cell::kLstm> {
  using Type = Lstm;
};
template <>
struct StepOf<Cell::kGru> {
  using Type = Gru;
};
template <>
struct StepOf<Cell::kElman> {
  using Type = Elman;
};
template <>
struct StepOf<Cell::kSlstm> {
  using Type = Slstm;
};
template <Cell kCell>
using StepFor = typename StepOf<kCell>::Type;

}  // namespace flashrnn::cuda
