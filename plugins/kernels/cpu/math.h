// divide, exp, log1p, sigmoid and tanh of a vector of floats: the Math policy of cells.cuh.
//
// Polynomials are interpolated at Chebyshev nodes of the named range. Errors against float64 over the whole float
// range: exp 1.4 ulp, log1p 2 ulp, sigmoid 2.5 ulp, tanh 2 ulp (tests/test_cpu_library.py holds the op to them). A
// rational tanh (7 + 4 coefficients) has two thirds of the work and 5 ulp.
#pragma once

#include "../cells.cuh"
#include "simd.h"

namespace flashrnn::cpu {
namespace {

struct VectorMath {
  using Value = F;
  static FLASHRNN_SIMD F divide(F a, F b) { return a / b; }

  // x = n ln2 + r with |r| <= ln2 / 2: n, and exp(r) - 1 with the relative accuracy of small r.
  struct Reduced {
    F n, expm1_r;
  };
  static FLASHRNN_SIMD Reduced reduce(F x) {
    constexpr float kRound = 0x1.8p23f;  // adding and subtracting it rounds to a whole number
    const F n = multiply_add(x, broadcast(1.44269504f), broadcast(kRound)) - kRound;
    F r = multiply_add(n, broadcast(-0.693359375f), x);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    F p = broadcast(1.3933643932e-3f);
    p = multiply_add(p, r, broadcast(8.3631752059e-3f));
    p = multiply_add(p, r, broadcast(4.1666466743e-2f));
    p = multiply_add(p, r, broadcast(1.6666576266e-1f));
    p = multiply_add(p, r, broadcast(0.5f));
    return {n, multiply_add(p * r, r, r)};
  }

  // The bounds are where the result is inf and 0.
  static FLASHRNN_SIMD F exp(F x) { return exp_below_89(at_most(x, 89.0f)); }
  static FLASHRNN_SIMD F exp_below_89(F x) {
    const Reduced x_ = reduce(at_least(x, -104.0f));
    return scale(x_.expm1_r + 1.0f, x_.n);
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
    const F e = exp_below_89(bits<F>(bits<I>(x) | kSign));
    return (x < 0.0f ? e : broadcast(1.0f)) / (1.0f + e);
  }

  // With e = exp(2 |x|) - 1, whose small values are as accurate as its large ones: e / (e + 2), and 1 - 2 / (e + 2)
  // where that is nearer to 1 and so halves the error. 1 from 20 on.
  static FLASHRNN_SIMD F tanh(F x) {
    const Reduced x_ = reduce(at_most(bits<F>(bits<I>(x) & ~kSign) * 2.0f, 40.0f));
    const F power = bits<F>((__builtin_convertvector(x_.n, I) + 127) << 23);
    const F e = multiply_add(power, x_.expm1_r, power - 1.0f);
    const auto large = e > 2.0f;
    const F ratio = (large ? broadcast(2.0f) : e) / (e + 2.0f);
    return bits<F>(bits<I>(large ? 1.0f - ratio : ratio) | (bits<I>(x) & kSign));
  }

 private:
  static constexpr std::int32_t kSign = static_cast<std::int32_t>(0x80000000u);
};

}  // namespace
}  // namespace flashrnn::cpu
