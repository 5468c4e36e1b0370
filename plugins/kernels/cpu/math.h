// divide, exp, log1p, sigmoid and tanh of one vector of floats or of a pair of them: the Math policy of cells.cuh.
//
// Polynomials are interpolated at Chebyshev nodes of the named range. Errors against float64 over the whole float
// range: exp 1.4 ulp, log1p 2 ulp, sigmoid 2.5 ulp, tanh 2.5 ulp (tests/test_cpu_library.py holds the op to them);
// absolute, sigmoid 9e-8 and tanh 1.5e-7. A rational tanh (4 + 4 coefficients in x^2) takes as long and has 4.7 ulp.
// Divisions are free: with three of an LSTM's five left out a step takes as long (AVX2).
#pragma once

#include "../cells.cuh"
#include "pair.h"

namespace flashrnn::cpu {
namespace {

template <class V>
struct VectorMath {
  using Value = V;
  static FLASHRNN_SIMD V divide(V a, V b) { return a / b; }

  // The bounds are where the result is inf and 0.
  static FLASHRNN_SIMD V exp(V x) {
    x = at_least(at_most(x, 89.0f), -104.0f);
    const V n = multiply_add(x, fill<V>(kLog2E), fill<V>(kRound)) - kRound;
    const V r = remainder(x, n);
    V p = fill<V>(kExp[4]);
    p = multiply_add(p, r, fill<V>(kExp[3]));
    p = multiply_add(p, r, fill<V>(kExp[2]));
    p = multiply_add(p, r, fill<V>(kExp[1]));
    p = multiply_add(p, r, fill<V>(kExp[0]));
    return scale(multiply_add(p * r, r, r) + 1.0f, n);
  }

  // log(1 + x) = 2 atanh(x / (2 + x)) for 0 <= x <= 1: the argument stays below 1/3, and no 1 + x is ever rounded.
  static FLASHRNN_SIMD V log1p(V x) {
    const V s = x / (2.0f + x), u = s * s;
    V p = fill<V>(1.1619525403e-1f);
    p = multiply_add(p, u, fill<V>(1.0851657391e-1f));
    p = multiply_add(p, u, fill<V>(1.4296291769e-1f));
    p = multiply_add(p, u, fill<V>(1.9999851286e-1f));
    p = multiply_add(p, u, fill<V>(3.3333334327e-1f));
    return 2.0f * multiply_add(p * u, s, s);
  }

  // 1 / (1 + exp(-x)) with both sides times 2^-24: exp(104) has no float, and its part of the result is subnormal.
  // Below exp(-60) nothing is left of it. Pairs of terms of the polynomial side by side: 3.1 ulp.
  static FLASHRNN_SIMD V sigmoid(V x) {
    constexpr float kScale = 0x1p-24f, kScaledRound = kRound - 24;
    x = at_most(at_least(x, -104.0f), 60.0f);
    const V rounded = multiply_add(x, fill<V>(-kLog2E), fill<V>(kScaledRound));
    const V minus_r = remainder(x, kScaledRound - rounded);
    V p = fill<V>(kExp[4]);
    p = multiply_add(p, minus_r, fill<V>(-kExp[3]));
    p = multiply_add(p, minus_r, fill<V>(kExp[2]));
    p = multiply_add(p, minus_r, fill<V>(-kExp[1]));
    p = multiply_add(p, minus_r, fill<V>(kExp[0]));
    p = multiply_add(p, minus_r, fill<V>(-1.0f));
    p = multiply_add(p, minus_r, fill<V>(1.0f));
    return fill<V>(kScale) / multiply_add(p, power_of_two(rounded), fill<V>(kScale));
  }

  // e / (e + 2) with e = exp(2 x) - 1, whose values near 0 and near -1 are as accurate as its large ones. 2 r is what
  // exp() calls r; +-1 from the bounds on.
  static FLASHRNN_SIMD V tanh(V x) {
    x = at_most(at_least(x, -20.0f), 20.0f);
    const V rounded = multiply_add(x, fill<V>(2 * kLog2E), fill<V>(kRound)), n = rounded - kRound;
    const V r = multiply_add(n, fill<V>(-0.34657359f), x), u = r * r;
    const V low = multiply_add(r, fill<V>(8 * kExp[1]), fill<V>(4 * kExp[0]));
    V p = multiply_add(r, fill<V>(32 * kExp[3]), fill<V>(16 * kExp[2]));
    p = multiply_add(u, fill<V>(64 * kExp[4]), p);
    p = multiply_add(p, u, low);
    const V power = power_of_two(rounded), expm1_2r = multiply_add(p, u, r + r);
    const V e = multiply_add(power, expm1_2r, power - 1.0f);
    return e / (e + 2.0f);
  }

 private:
  // exp(r) = 1 + r + r^2 (kExp[0] + kExp[1] r + ...) for |r| <= ln2 / 2.
  static constexpr float kExp[] = {0.5f, 1.6666576266e-1f, 4.1666466743e-2f, 8.3631752059e-3f, 1.3933643932e-3f};
  static constexpr float kLog2E = 1.44269504f;

  // Adding it rounds to a whole number n, and leaves the biased exponent of 2^n in the lowest bits.
  static constexpr float kRound = 0x1.8p23f + 127;
  static FLASHRNN_SIMD V power_of_two(V rounded) { return as_float(as_integer(rounded) << 23); }

  // x - n ln2, of which the first product is exact.
  static FLASHRNN_SIMD V remainder(V x, V n) {
    return multiply_add(n, fill<V>(2.12194440e-4f), multiply_add(n, fill<V>(-0.693359375f), x));
  }
};

}  // namespace
}  // namespace flashrnn::cpu
