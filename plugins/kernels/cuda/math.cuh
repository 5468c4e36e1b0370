// Math policies of the specialised kernels (cells.cuh has the interface), and packing of 16-bit pairs.
#pragma once

#include "elements.cuh"

namespace flashrnn::cuda {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// Absolute errors near 1e-7; 2 special-function instructions for each function. For float16, where tanh.approx (5e-4)
// comes near the tolerance.
struct AccurateMath {
  using Value = float;
  static __device__ __forceinline__ float exp(float x) { return exp2_approx(kLog2e * x); }
  static __device__ __forceinline__ float log1p(float x) { return kLn2 * log2_approx(1.0f + x); }
  static __device__ __forceinline__ float sigmoid(float x) { return rcp_approx(1.0f + exp2_approx(-kLog2e * x)); }
  static __device__ __forceinline__ float tanh(float x) {
    return fmaf(2.0f, rcp_approx(1.0f + exp2_approx(-2.0f * kLog2e * x)), -1.0f);
  }
};

// tanh.approx: one instruction, absolute error 5e-4, an eighth of bfloat16's own rounding. Measured against
// AccurateMath in bfloat16: the same total error, 0.03 to 0.12 us less per step.
struct FastMath : AccurateMath {
  static __device__ __forceinline__ float tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float sigmoid(float x) { return fmaf(0.5f, tanh(0.5f * x), 0.5f); }
};

template <DType kType>
struct MathOf {
  using Type = AccurateMath;
};
template <>
struct MathOf<DType::kBfloat16> {
  using Type = FastMath;
};

// Two 16-bit elements in a word, the first in the low half.
template <DType kType>
__device__ __forceinline__ float unpack(std::uint32_t word, int half) {
  if constexpr (kType == DType::kBfloat16) {
    return __uint_as_float(half != 0 ? word & 0xffff0000u : word << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(half != 0 ? word >> 16 : word & 0xffffu)));
  }
}
template <DType kType>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t word;
  if constexpr (kType == DType::kBfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

}  // namespace flashrnn::cuda
