// Two vectors that go through the same arithmetic side by side.
//
// A cell is one chain of some 40 operations, each waiting for the last: 200 cycles in which a processor looks ahead no
// further than the next cell. Two cells interleaved operation by operation take 170 instead of 440 (Zen 3, LSTM).
#pragma once

#include "../cells.cuh"
#include "simd.h"

namespace flashrnn::cpu {
namespace {

template <class V>
struct Pair {
  V a, b;
};
using FF = Pair<F>;
using II = Pair<I>;

template <class V>
FLASHRNN_SIMD V fill(float x) {
  return x - V{};  // as broadcast()
}
template <>
FLASHRNN_SIMD FF fill(float x) {
  return {broadcast(x), broadcast(x)};
}

#define FLASHRNN_PAIR_OPERATOR(op)                                                                            \
  FLASHRNN_SIMD auto operator op(FF x, FF y)->Pair<decltype(x.a op y.a)> { return {x.a op y.a, x.b op y.b}; } \
  FLASHRNN_SIMD auto operator op(FF x, float y) { return x op fill<FF>(y); }                                  \
  FLASHRNN_SIMD auto operator op(float x, FF y) { return fill<FF>(x) op y; }
FLASHRNN_PAIR_OPERATOR(+)
FLASHRNN_PAIR_OPERATOR(-)
FLASHRNN_PAIR_OPERATOR(*)
FLASHRNN_PAIR_OPERATOR(/)
FLASHRNN_PAIR_OPERATOR(>)
#undef FLASHRNN_PAIR_OPERATOR
FLASHRNN_SIMD II operator|(II x, II y) { return {x.a | y.a, x.b | y.b}; }
FLASHRNN_SIMD II operator|(II x, std::int32_t y) { return {x.a | y, x.b | y}; }
FLASHRNN_SIMD II operator&(II x, std::int32_t y) { return {x.a & y, x.b & y}; }
FLASHRNN_SIMD II operator<(II x, std::int32_t y) { return {x.a < y, x.b < y}; }
FLASHRNN_SIMD II operator<<(II x, int y) { return {x.a << y, x.b << y}; }

// What ?: is for vectors, which no type can overload.
FLASHRNN_SIMD F choose(I condition, F x, F y) { return condition ? x : y; }
FLASHRNN_SIMD FF choose(II condition, FF x, FF y) {
  return {choose(condition.a, x.a, y.a), choose(condition.b, x.b, y.b)};
}
FLASHRNN_SIMD I as_integer(F x) { return bits<I>(x); }
FLASHRNN_SIMD F as_float(I x) { return bits<F>(x); }
FLASHRNN_SIMD II as_integer(FF x) { return {bits<I>(x.a), bits<I>(x.b)}; }
FLASHRNN_SIMD FF as_float(II x) { return {bits<F>(x.a), bits<F>(x.b)}; }
FLASHRNN_SIMD FF multiply_add(FF x, FF y, FF z) { return {multiply_add(x.a, y.a, z.a), multiply_add(x.b, y.b, z.b)}; }
FLASHRNN_SIMD FF at_most(FF x, float limit) { return {at_most(x.a, limit), at_most(x.b, limit)}; }
FLASHRNN_SIMD FF at_least(FF x, float limit) { return {at_least(x.a, limit), at_least(x.b, limit)}; }
FLASHRNN_SIMD FF scale(FF x, FF n) { return {scale(x.a, n.a), scale(x.b, n.b)}; }
// In place of the templates of cells.cuh.
FLASHRNN_SIMD FF minimum(FF x, FF y) { return {flashrnn::minimum(x.a, y.a), flashrnn::minimum(x.b, y.b)}; }
FLASHRNN_SIMD FF maximum(FF x, FF y) { return {flashrnn::maximum(x.a, y.a), flashrnn::maximum(x.b, y.b)}; }

}  // namespace
}  // namespace flashrnn::cpu
