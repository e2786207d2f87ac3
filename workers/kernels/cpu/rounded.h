// Keys and values in 8 bits: how they are rounded, and how they become floats again (the twins are in reference.py).
// The cache of a layer as the kernels take it, of any type.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "vectors.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace paged {

enum Kind : int64_t { as_queries = 0, int8 = 1, e4m3 = 2 };

// The fields of `PagedCache` in pages.py. Keys and values are [blocks, heads, block size, head dim], of the queries' type
// or of 8 bits; then with scales: [blocks, heads, block size] of int8, [heads] of e4m3.
struct Cache {
    void *keys, *values;
    float *k_scales, *v_scales;
    int64_t kind;
};

}  // namespace paged

struct Int8 {
    int8_t bits;
};

struct E4m3 {
    uint8_t bits;
};

namespace rounded {

constexpr float least_scale = 0x1p-126f;

// As floats, divided by `factor`, which the reader multiplies the scale with.
inline float widen(Int8 x) { return float(x.bits); }
inline float widen(E4m3 x) {
    const uint32_t size = x.bits & 0x7f, bits = uint32_t(x.bits & 0x80) << 24 | size << 20;
    return size == 0x7f ? std::numeric_limits<float>::quiet_NaN() : std::bit_cast<float>(bits) * 0x1p112f;
}
inline float widen(float x) { return x; }

template <typename E>
constexpr float factor = 1.0f;
template <>
inline constexpr float factor<E4m3> = 256.0f;  // half precision has eight more powers of two below 1 than e4m3

inline vectors::Vector load(const float* from) { return vectors::load(from); }

// NaN, all bits below the sign, alone carries into half precision's exponent when a last bit is added.

#if defined(__AVX512F__) && defined(__F16C__)
inline vectors::Vector load(const Int8* from) {
    return (vectors::Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline vectors::Vector load(const E4m3* from) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)), 7);
    wide = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbfff)));
    const __m256i carried = _mm256_add_epi16(wide, _mm256_set1_epi16(0x80));
    wide = _mm256_or_si256(wide, _mm256_and_si256(carried, _mm256_set1_epi16(0x4000)));
    return (vectors::Vector)_mm512_cvtph_ps(wide);
}
#elif defined(__AVX2__) && defined(__F16C__)
inline vectors::Vector load(const Int8* from) {
    return (vectors::Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline vectors::Vector load(const E4m3* from) {
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from)), 7);
    wide = _mm_and_si128(wide, _mm_set1_epi16(int16_t(0xbfff)));
    const __m128i carried = _mm_add_epi16(wide, _mm_set1_epi16(0x80));
    wide = _mm_or_si128(wide, _mm_and_si128(carried, _mm_set1_epi16(0x4000)));
    return (vectors::Vector)_mm256_cvtph_ps(wide);
}
#else
template <typename E>
inline vectors::Vector load(const E* from) {
    vectors::Vector all;
    for (int lane = 0; lane < vectors::lanes; lane++) all[lane] = widen(from[lane]);
    return all;
}
#endif

// To the nearest, ties to even; beyond 448 it is 448.
inline E4m3 to_e4m3(float x) {
    x = x < 448.0f ? x : 448.0f;
    x = x > -448.0f ? x : -448.0f;
    const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size < 121u << 23) return {uint8_t(sign | uint32_t(std::nearbyint(std::fabs(x) * 512.0f)))};  // below 2^-6
    return {uint8_t(sign | ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3))};
}

// Writes a head's numbers and, of int8, its scale.
inline void write(const float* x, Int8* to, float* scale, int64_t size) {
    int32_t most = 0;  // of the bits without the sign: infinity and NaN are above all numbers
    for (int64_t i = 0; i < size; i++) most = std::max(most, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
    const float found = std::bit_cast<float>(most) * (1.0f / 127.0f), by = found < least_scale ? least_scale : found;
    for (int64_t i = 0; i < size; i++) {
        const float quotient = x[i] / by;
        to[i] = {int8_t(int32_t(std::nearbyint(quotient == quotient ? quotient : 0.0f)))};
    }
    *scale = by;
}

inline void write(const float* x, E4m3* to, const float* scale, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        to[i] = to_e4m3(x[i] / *scale);
        if (!(std::fabs(x[i]) <= std::numeric_limits<float>::max())) to[i] = {0x7f};
    }
}

}  // namespace rounded
