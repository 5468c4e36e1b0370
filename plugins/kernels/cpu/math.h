// divide, exp, log1p, sigmoid and tanh of one vector of floats or of a pair of them: the Math policy of cells.cuh.
//
// Polynomials are interpolated at Chebyshev nodes of the named range. Errors against float64 over the whole float
// range: exp 1.4 ulp, log1p 2 ulp, sigmoid 2.5 ulp, tanh 2 ulp (tests/test_cpu_library.py holds the op to them). A
// rational tanh (7 + 4 coefficients) has two thirds of the work and 5 ulp.
#pragma once

#include "../cells.cuh"
#include "pair.h"

namespace flashrnn::cpu {
namespace {

template <class V>
struct VectorMath {
  using Value = V;
  static FLASHRNN_SIMD V divide(V a, V b) { return a / b; }

  // x = n ln2 + r with |r| <= ln2 / 2: n, 2^(n + shift), and exp(r) - 1 with the relative accuracy of small r.
  struct Reduced {
    V n, power, expm1_r;
  };
  template <int shift>
  static FLASHRNN_SIMD Reduced reduce(V x) {
    // Adding it rounds to a whole number, and puts the biased exponent of the power into the lowest bits.
    constexpr float kRound = 0x1.8p23f + 127 + shift;
    const V rounded = multiply_add(x, fill<V>(1.44269504f), fill<V>(kRound)), n = rounded - kRound;
    V r = multiply_add(n, fill<V>(-0.693359375f), x);
    r = multiply_add(n, fill<V>(2.12194440e-4f), r);
    V p = fill<V>(1.3933643932e-3f);
    p = multiply_add(p, r, fill<V>(8.3631752059e-3f));
    p = multiply_add(p, r, fill<V>(4.1666466743e-2f));
    p = multiply_add(p, r, fill<V>(1.6666576266e-1f));
    p = multiply_add(p, r, fill<V>(0.5f));
    return {n, as_float(as_integer(rounded) << 23), multiply_add(p * r, r, r)};
  }

  // The bounds are where the result is inf and 0.
  static FLASHRNN_SIMD V exp(V x) {
    const Reduced x_ = reduce<0>(at_least(at_most(x, 89.0f), -104.0f));
    return scale(x_.expm1_r + 1.0f, x_.n);
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

  // With e = exp(-|x|), which no bound above is needed for; 24 more in the exponent keep it normal until it is rounded.
  static FLASHRNN_SIMD V sigmoid(V x) {
    const Reduced x_ = reduce<24>(at_least(as_float(as_integer(x) | kSign), -104.0f));
    const V e = (x_.expm1_r + 1.0f) * x_.power * 0x1p-24f;
    return choose(as_integer(x) < 0, e, fill<V>(1.0f)) / (1.0f + e);
  }

  // With e = exp(2 |x|) - 1, whose small values are as accurate as its large ones: e / (e + 2), and 1 - 2 / (e + 2)
  // where that is nearer to 1 and so halves the error. 1 from 20 on.
  static FLASHRNN_SIMD V tanh(V x) {
    const Reduced x_ = reduce<0>(at_most(as_float(as_integer(x) & ~kSign) * 2.0f, 40.0f));
    const V e = multiply_add(x_.power, x_.expm1_r, x_.power - 1.0f);
    const auto large = e > 2.0f;
    const V ratio = choose(large, fill<V>(2.0f), e) / (e + 2.0f);
    return as_float(as_integer(choose(large, 1.0f - ratio, ratio)) | (as_integer(x) & kSign));
  }

 private:
  static constexpr std::int32_t kSign = static_cast<std::int32_t>(0x80000000u);
};

}  // namespace
}  // namespace flashrnn::cpu
