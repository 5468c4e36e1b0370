// exp, log1p, sigmoid and tanh of a vector of floats: the Math policy of cells.cuh.
//
// Polynomials are interpolated at Chebyshev nodes of the named range. Errors against float64 over the whole float range:
// exp 1.4 ulp, log1p 2 ulp, sigmoid 2.5 ulp, tanh 2 ulp (tests/test_cpu_library.py holds the op to them).
// A rational tanh over one range (7 + 4 coefficients) has half the work and 5 ulp; activations are under a fifth of a step.
#pragma once

#include "../cells.cuh"
#include "simd.h"

namespace flashrnn::cpu {
namespace {

struct VectorMath {
  using Value = F;

  // x = n ln2 + r with |r| <= ln2 / 2; 2^n in two factors, so that overflow gives inf and small results subnormals.
  // The two bounds keep n in range and let NaN pass.
  static FLASHRNN_SIMD F exp(F x) {
    constexpr float kShift = 0x1.8p23f;  // x + kShift rounds x to an integer, readable in the low bits
    x = x < -104.0f ? broadcast(-104.0f) : x;
    x = x > 89.0f ? broadcast(89.0f) : x;
    const F shifted = multiply_add(x, broadcast(1.44269504f), broadcast(kShift));
    const F n = shifted - kShift;
    F r = multiply_add(n, broadcast(-0.693359375f), x);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    F p = broadcast(1.9899275503e-4f);
    p = multiply_add(p, r, broadcast(1.3933643932e-3f));
    p = multiply_add(p, r, broadcast(8.3332983777e-3f));
    p = multiply_add(p, r, broadcast(4.1666466743e-2f));
    p = multiply_add(p, r, broadcast(1.6666667163e-1f));
    p = multiply_add(p, r, broadcast(0.5f));
    p = multiply_add(p * r, r, r) + 1.0f;
    const I power = bits<I>(shifted) - bits<I>(broadcast(kShift));
    const I half = power >> 1;
    return p * bits<F>((half + 127) << 23) * bits<F>((power - half + 127) << 23);
  }

  // log(1 + x) = 2 atanh(x / (2 + x)) for 0 <= x <= 1: the argument stays below 1/3, and no 1 + x is ever rounded.
  static FLASHRNN_SIMD F log1p(F x) {
    const F s = x / (2.0f + x), u = s * s;
    F p = broadcast(1.1619525403e-1f);
    p = multiply_add(p, u, broadcast(1.0851657391e-1f));
    p = multiply_add(p, u, broadcast(1.4296291769e-1f));
    p = multiply_add(p, u, broadcast(1.9999851286e-1f));
    p = multiply_add(p, u, broadcast(3.3333334327e-1f));
    return 2.0f * multiply_add(p * u, s, s);
  }

  static FLASHRNN_SIMD F sigmoid(F x) {
    const F e = exp(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : broadcast(1.0f)) / (1.0f + e);
  }

  // Below 0.625 a polynomial, which keeps the relative accuracy of small results; above, 1 - 2 / (exp(2 |x|) + 1).
  static FLASHRNN_SIMD F tanh(F x) {
    const F u = x * x;
    F p = broadcast(2.2958412301e-3f);
    p = multiply_add(p, u, broadcast(-8.3469804376e-3f));
    p = multiply_add(p, u, broadcast(2.1769961342e-2f));
    p = multiply_add(p, u, broadcast(-5.3959406912e-2f));
    p = multiply_add(p, u, broadcast(1.3333304226e-1f));
    p = multiply_add(p, u, broadcast(-3.3333334327e-1f));
    const F small = multiply_add(p * u, x, x);
    const F magnitude = x < 0.0f ? -x : x;
    const F large = 1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f);
    return magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
  }
};

}  // namespace
}  // namespace flashrnn::cpu
