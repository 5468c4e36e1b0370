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

// tanh.approx is one special-function instruction with an absolute error of 5e-4; by ex2 and rcp it takes two and errs
// by 1e-7. sigmoid from tanh.approx errs by 2.5e-4.
//
// bfloat16: tanh.approx for both. An eighth of the rounding of h; measured, the total error is that of exact forms, and
// they cost 0.03 to 0.12 us per step. float16: tanh by ex2. With tanh.approx for both the largest error came to half of
// what is allowed (Elman); with exact forms for both a step costs 0.04 to 0.06 us more than in bfloat16.
//
// divide, by the sLSTM's normalizer, which grows by 1 per step at most: scaled, since rcp takes a subnormal one for 0,
// and good up to 2^104. `/` covers both ends by comparisons on the critical path.
struct FastMath {
  using Value = float;
  static __device__ __forceinline__ float divide(float a, float b) { return 0x1p24f * a * rcp_approx(0x1p24f * b); }
  static __device__ __forceinline__ float exp(float x) { return exp2_approx(kLog2e * x); }
  static __device__ __forceinline__ float log1p(float x) { return kLn2 * log2_approx(1.0f + x); }
  static __device__ __forceinline__ float tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float sigmoid(float x) { return fmaf(0.5f, tanh(0.5f * x), 0.5f); }
};

struct HalfMath : FastMath {
  static __device__ __forceinline__ float tanh(float x) {
    return fmaf(2.0f, rcp_approx(1.0f + exp2_approx(-2.0f * kLog2e * x)), -1.0f);
  }
};

// float32: tanh and log1p as CUDA has them. exp errs by |x| 2^-24 relative to its value: for the x <= 0 of the cells,
// less than 2^-24 absolute.
struct FloatMath : ScalarMath {
  static __device__ __forceinline__ float exp(float x) { return exp2_approx(kLog2e * x); }
  static __device__ __forceinline__ float sigmoid(float x) {
    const float e = exp(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) * rcp_approx(1.0f + e);
  }
};

template <DType kType>
struct MathOf {
  using Type = HalfMath;
};
template <>
struct MathOf<DType::kBfloat16> {
  using Type = FastMath;
};
template <>
struct MathOf<DType::kFloat32> {
  using Type = FloatMath;
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
