// Vectors of kLanes floats for one instruction set, and the loads, stores and conversions of the three dtypes.
//
// Included only by step.cc, which is compiled once per instruction set. Everything is in an unnamed namespace: no
// symbol compiled for a newer processor may replace its twin elsewhere in the library at link time. GCC and Clang
// vector extensions carry the arithmetic, so the same text serves SSE2, AVX2, AVX-512 and NEON.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif

#define FLASHRNN_SIMD inline __attribute__((always_inline))

namespace flashrnn::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

using F = float __attribute__((vector_size(kLanes * 4)));
using I = std::int32_t __attribute__((vector_size(kLanes * 4)));
using U16 = std::uint16_t __attribute__((vector_size(kLanes * 2)));

template <class To, class From>
FLASHRNN_SIMD To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &x, sizeof to);
  return to;
}
template <class V>
FLASHRNN_SIMD V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
template <class V>
FLASHRNN_SIMD void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}
FLASHRNN_SIMD F broadcast(float x) { return x - F{}; }  // F{} + x costs an addition: it would turn -0 into 0

// a * b + c, fused where the instruction set has it. The compiler's own contraction is off: whether it fuses would
// depend on what it inlines where, and with it the last bit of a result.
FLASHRNN_SIMD F multiply_add(F a, F b, F c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return bits<F>(vfmaq_f32(bits<float32x4_t>(c), bits<float32x4_t>(a), bits<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

// Lane l of the result is lane index[l] of a (index < kLanes) or of b.
template <int... index>
FLASHRNN_SIMD F shuffle(F a, F b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, index...);
#else
  return __builtin_shuffle(a, b, I{index...});
#endif
}

// min and max against a bound; NaN stays. Compilers write the plain ?: as a comparison and a blend.
FLASHRNN_SIMD F at_most(F x, float limit) {
#if defined(__AVX512F__)
  return _mm512_min_ps(broadcast(limit), x);
#elif defined(__AVX2__)
  return _mm256_min_ps(broadcast(limit), x);
#else
  return x > limit ? broadcast(limit) : x;
#endif
}
FLASHRNN_SIMD F at_least(F x, float limit) {
#if defined(__AVX512F__)
  return _mm512_max_ps(broadcast(limit), x);
#elif defined(__AVX2__)
  return _mm256_max_ps(broadcast(limit), x);
#else
  return x < limit ? broadcast(limit) : x;
#endif
}

// x * 2^n for whole numbers -150 <= n <= 128 and 0.5 < x < 2: inf, subnormal and 0 come out as they should.
FLASHRNN_SIMD F scale(F x, F n) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(x, n);
#else
  const I power = __builtin_convertvector(n, I), half = power >> 1;
  return x * bits<F>((half + 127) << 23) * bits<F>((power - half + 127) << 23);
#endif
}

template <int... i>
struct Sequence {};
template <int n, int... i>
struct MakeSequence : MakeSequence<n - 1, n - 1, i...> {};
template <int... i>
struct MakeSequence<0, i...> {
  using Type = Sequence<i...>;
};

// Merge step `j` of deinterleave: keep the lanes of gate `g` that vectors 0..j-1 held, take the rest from vector j.
template <int G, int g, int j, int... lane>
FLASHRNN_SIMD F merge(F kept, F next, Sequence<lane...>) {
  return shuffle<(lane * G + g < j * kLanes         ? (j == 1 ? (lane * G + g) % kLanes : lane)
                  : lane * G + g < (j + 1) * kLanes ? kLanes + (lane * G + g) % kLanes
                                                    : lane)...>(kept, next);
}
template <int G, int g, int j = 1>
FLASHRNN_SIMD F gather_gate(F kept, const F (&in)[G]) {
  if constexpr (j < G) {
    const F merged = merge<G, g, j>(kept, in[j], typename MakeSequence<kLanes>::Type{});
    return gather_gate<G, g, j + 1>(merged, in);
  } else {
    return kept;
  }
}
// [unit][gate] in memory order to one vector per gate.
template <int G, int g = 0>
FLASHRNN_SIMD void deinterleave(const F (&in)[G], F (&out)[G]) {
  if constexpr (g < G) {
    out[g] = gather_gate<G, g>(in[0], in);
    deinterleave<G, g + 1>(in, out);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// AVX2 shuffles two vectors in three instructions. Four gates are a transposition of 4 x 4 in each half of the vectors;
// the lanes of one of three gates stand in eight different places, 3 l + g modulo 8: two blends and a permutation.
FLASHRNN_SIMD void deinterleave(const F (&in)[4], F (&out)[4]) {
  const __m256 a = _mm256_permute2f128_ps(in[0], in[2], 0x20), b = _mm256_permute2f128_ps(in[0], in[2], 0x31);
  const __m256 c = _mm256_permute2f128_ps(in[1], in[3], 0x20), d = _mm256_permute2f128_ps(in[1], in[3], 0x31);
  const auto ab01 = bits<__m256d>(_mm256_unpacklo_ps(a, b)), cd01 = bits<__m256d>(_mm256_unpacklo_ps(c, d));
  const auto ab23 = bits<__m256d>(_mm256_unpackhi_ps(a, b)), cd23 = bits<__m256d>(_mm256_unpackhi_ps(c, d));
  out[0] = bits<F>(_mm256_unpacklo_pd(ab01, cd01));
  out[1] = bits<F>(_mm256_unpackhi_pd(ab01, cd01));
  out[2] = bits<F>(_mm256_unpacklo_pd(ab23, cd23));
  out[3] = bits<F>(_mm256_unpackhi_pd(ab23, cd23));
}
FLASHRNN_SIMD void deinterleave(const F (&in)[3], F (&out)[3]) {
  const __m256 a = _mm256_blend_ps(_mm256_blend_ps(in[0], in[1], 0x92), in[2], 0x24);
  const __m256 b = _mm256_blend_ps(_mm256_blend_ps(in[0], in[1], 0x24), in[2], 0x49);
  const __m256 c = _mm256_blend_ps(_mm256_blend_ps(in[0], in[1], 0x49), in[2], 0x92);
  out[0] = _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 3, 6, 1, 4, 7, 2, 5));
  out[1] = _mm256_permutevar8x32_ps(b, _mm256_setr_epi32(1, 4, 7, 2, 5, 0, 3, 6));
  out[2] = _mm256_permutevar8x32_ps(c, _mm256_setr_epi32(2, 5, 0, 3, 6, 1, 4, 7));
}
#endif

// The three dtypes. kRounds: round() changes values.
struct Float32 {
  static constexpr bool kRounds = false;
  using Element = float;
  static FLASHRNN_SIMD F read(const Element* from) { return load<F>(from); }
  static FLASHRNN_SIMD void write(Element* to, F x) { store(to, x); }
  static FLASHRNN_SIMD F round(F x) { return x; }
};

struct Bfloat16 {
  static constexpr bool kRounds = true;
  using Element = std::uint16_t;
  static FLASHRNN_SIMD F widen(U16 x) { return bits<F>(__builtin_convertvector(x, I) << 16); }
  static FLASHRNN_SIMD U16 narrow(F x) {
    const I b = bits<I>(x);
    const I nearest_even = b + 0x7fff + ((b >> 16) & 1);
    const I nan = b | 0x00400000;
    return __builtin_convertvector((x != x ? nan : nearest_even) >> 16, U16);
  }
  static FLASHRNN_SIMD F read(const Element* from) { return widen(load<U16>(from)); }
  static FLASHRNN_SIMD void write(Element* to, F x) { store(to, narrow(x)); }
  static FLASHRNN_SIMD F round(F x) { return widen(narrow(x)); }
};

struct Float16 {
  static constexpr bool kRounds = true;
  using Element = std::uint16_t;
#if defined(__AVX512F__)
  static FLASHRNN_SIMD F widen(U16 x) { return _mm512_cvtph_ps(bits<__m256i>(x)); }
  static FLASHRNN_SIMD U16 narrow(F x) { return bits<U16>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__AVX2__)
  static FLASHRNN_SIMD F widen(U16 x) { return _mm256_cvtph_ps(bits<__m128i>(x)); }
  static FLASHRNN_SIMD U16 narrow(F x) { return bits<U16>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__aarch64__)
  static FLASHRNN_SIMD F widen(U16 x) { return bits<F>(vcvt_f32_f16(bits<float16x4_t>(x))); }
  static FLASHRNN_SIMD U16 narrow(F x) { return bits<U16>(vcvt_f16_f32(bits<float32x4_t>(x))); }
#else
  // The exponent moves by a multiplication with 2^112, exact for subnormal halves too.
  static FLASHRNN_SIMD F widen(U16 x) {
    const I h = __builtin_convertvector(x, I);
    const I magnitude = (h & 0x7fff) << 13;
    const I finite = bits<I>(bits<F>(magnitude) * 0x1p112f);
    const I special = magnitude | 0x7f800000;
    return bits<F>(((h & 0x7fff) >= 0x7c00 ? special : finite) | ((h & 0x8000) << 16));
  }
  // Below 2^-14 the addition of 0.5 puts the unit of a half's last place where float addition rounds.
  static FLASHRNN_SIMD U16 narrow(F x) {
    const I b = bits<I>(x), magnitude = b & 0x7fffffff;
    const I subnormal = bits<I>(bits<F>(magnitude) + 0.5f) - 0x3f000000;
    const I normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const I overflow = magnitude > 0x7f800000 ? I{} + 0x7e00 : I{} + 0x7c00;
    const I finite = magnitude < 0x38800000 ? subnormal : normal;
    return __builtin_convertvector((magnitude >= 0x477ff000 ? overflow : finite) | ((b >> 16) & 0x8000), U16);
  }
#endif
  static FLASHRNN_SIMD F read(const Element* from) { return widen(load<U16>(from)); }
  static FLASHRNN_SIMD void write(Element* to, F x) { store(to, narrow(x)); }
  static FLASHRNN_SIMD F round(F x) { return widen(narrow(x)); }
};

}  // namespace
}  // namespace flashrnn::cpu
