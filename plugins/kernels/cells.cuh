// One step of each recurrent cell, for GPU and CPU: the device twin of flashrnn_deploy/cells.py.
//
// A cell is a template over a Math policy: Math::Value is a float, or a vector of floats in which every lane is a unit
// of its own; Math::divide, exp, log1p, sigmoid and tanh work on Values. ScalarMath below is the exact form for one
// float on host and device. Every function propagates NaN as NumPy does.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define FLASHRNN_INLINE __host__ __device__ __forceinline__
#else
#define FLASHRNN_INLINE inline __attribute__((always_inline))
#endif

namespace flashrnn {

struct CellOptions {
  float clip;
  int relu;
  float normalizer_floor;
};

struct ScalarMath {
  using Value = float;
  static FLASHRNN_INLINE float divide(float a, float b) { return a / b; }
  static FLASHRNN_INLINE float exp(float x) { return expf(x); }
  // log(1 + x) for 0 <= x <= 1.
  static FLASHRNN_INLINE float log1p(float x) { return log1pf(x); }
  static FLASHRNN_INLINE float tanh(float x) { return tanhf(x); }
  // (tanh(x / 2) + 1) / 2 loses the relative accuracy of small results; this form keeps it and never overflows.
  static FLASHRNN_INLINE float sigmoid(float x) {
    const float e = expf(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
  }
};

// `|`, not `||`, and no fminf: these also compile for vectors, and a NaN on either side is the result.
template <class V>
FLASHRNN_INLINE V minimum(V a, V b) {
  return ((a < b) | (a != a)) ? a : b;
}
template <class V>
FLASHRNN_INLINE V maximum(V a, V b) {
  return ((a > b) | (a != a)) ? a : b;
}
// -|x|
template <class V>
FLASHRNN_INLINE V negative_magnitude(V x) {
  return x < 0.0f ? x : -x;
}
template <>
FLASHRNN_INLINE float negative_magnitude(float x) {
  return -fabsf(x);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// One instruction in place of two comparisons and a choice, four times on the sLSTM's critical path.
template <>
FLASHRNN_INLINE float minimum(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
template <>
FLASHRNN_INLINE float maximum(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
#endif

template <class V>
FLASHRNN_INLINE V constant(float x) {
  return x - V{};  // V{} + x would turn -0 into 0
}
template <class V>
FLASHRNN_INLINE V bound(V x, float clip) {
  return clip > 0.0f ? minimum(maximum(x, constant<V>(-clip)), constant<V>(clip)) : x;
}

// In every step: x the input projection, rh = R h', b the biases, s the states, previous on entry and new on return.
// s[0] is the hidden state h. The orders of gates, biases and states are those of op.h.

// c = f c' + i z, h = o tanh(c). c itself is not clipped, the input of its tanh is.
struct Lstm {
  static constexpr int G = 4, Gb = 4, S = 2;

  template <class Math, class V = typename Math::Value>
  static FLASHRNN_INLINE void step(const V (&x)[G], const V (&rh)[G], const V (&b)[Gb], V (&s)[S],
                                   const CellOptions& options) {
    step_c<Math>(x, rh, b, s, options);
    step_h<Math>(s, options);
  }
  // The two parts of a step. Between them o is in the place of h.
  template <class Math, class V = typename Math::Value>
  static FLASHRNN_INLINE void step_c(const V (&x)[G], const V (&rh)[G], const V (&b)[Gb], V (&s)[S],
                                     const CellOptions& options) {
    const V i = Math::sigmoid(bound(x[0] + rh[0] + b[0], options.clip));
    const V f = Math::sigmoid(bound(x[1] + rh[1] + b[1], options.clip));
    const V z = Math::tanh(bound(x[2] + rh[2] + b[2], options.clip));
    s[0] = Math::sigmoid(bound(x[3] + rh[3] + b[3], options.clip));
    s[1] = f * s[1] + i * z;
  }
  template <class Math, class V = typename Math::Value>
  static FLASHRNN_INLINE void step_h(V (&s)[S], const CellOptions& options) {
    s[0] = s[0] * Math::tanh(bound(s[1], options.clip));
  }
};

// n = tanh(x_n + b_n + r (R_n h' + b_q)), h = u h' + (1 - u) n.
struct Gru {
  static constexpr int G = 3, Gb = 4, S = 1;

  template <class Math, class V = typename Math::Value>
  static FLASHRNN_INLINE void step(const V (&x)[G], const V (&rh)[G], const V (&b)[Gb], V (&s)[S],
                                   const CellOptions& options) {
    const V r = Math::sigmoid(bound(x[0] + rh[0] + b[0], options.clip));
    const V u = Math::sigmoid(bound(x[1] + rh[1] + b[1], options.clip));
    const V n = Math::tanh(bound(x[2] + b[2] + r * (rh[2] + b[3]), options.clip));
    s[0] = u * s[0] + (1.0f - u) * n;
  }
};

// h = tanh(x + R h' + b), or ReLU in place of tanh.
struct Elman {
  static constexpr int G = 1, Gb = 1, S = 1;

  template <class Math, class V = typename Math::Value>
  static FLASHRNN_INLINE void step(const V (&x)[G], const V (&rh)[G], const V (&b)[Gb], V (&s)[S],
                                   const CellOptions& options) {
    const V a = bound(x[0] + rh[0] + b[0], options.clip);
    s[0] = options.relu != 0 ? maximum(a, constant<V>(0.0f)) : Math::tanh(a);
  }
};

// Beck et al., "xLSTM" (2024), equations 8 to 17, with the stabilizer m. Where n' is 0 (an empty state) m starts at the
// input gate.
struct Slstm {
  static constexpr int G = 4, Gb = 4, S = 4;

  template <class Math, class V = typename Math::Value>
  static FLASHRNN_INLINE void step(const V (&x)[G], const V (&rh)[G], const V (&b)[Gb], V (&s)[S],
                                   const CellOptions& options) {
    const V zero = constant<V>(0.0f), infinity = constant<V>(INFINITY);
    const V input = x[0] + rh[0] + b[0], forget = x[1] + rh[1] + b[1];
    // log(sigmoid(forget)) = min(forget, 0) - log1p(exp(-|forget|)), stable at both ends.
    const V late = Math::log1p(Math::exp(negative_magnitude(forget))), early = minimum(forget, zero);
    const auto empty = s[2] == 0.0f;
    // Of the two gates divided by exp(m) one is 1, the other exp(-|d|). d follows from `late` by one subtraction: the
    // rest of a step waits for it. The bounds are 0, or NaN where the equations have inf - inf.
    const V d = early + (s[3] - input) - late;
    const V f = Math::exp(minimum(d, s[3] < infinity ? zero : s[3] - s[3]));
    const V i = Math::exp(empty ? input - input : minimum(-d, input < infinity ? zero : input - input));
    s[3] = empty ? input : maximum(input, early - late + s[3]);
    s[1] = f * s[1] + i * Math::tanh(x[2] + rh[2] + b[2]);
    s[2] = maximum(f * s[2] + i, constant<V>(options.normalizer_floor));
    s[0] = Math::divide(Math::sigmoid(x[3] + rh[3] + b[3]) * s[1], s[2]);
  }
};

}  // namespace flashrnn
