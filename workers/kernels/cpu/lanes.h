// Lanes of 32 bits, one for each output: 16 of them, a whole panel, where AVX-512 multiplies bytes (VNNI), else 8. Vectors
// that gcc and clang compile for any processor, and the few operations that have an instruction of their own on x86.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_AVX2 1
#include <immintrin.h>
#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
#define HAS_VNNI 1
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define HAS_WIDE_VNNI 1
#endif
#endif

namespace lanes {

#ifdef HAS_WIDE_VNNI
constexpr int count = 16;
#else
constexpr int count = 8;
#endif

typedef float floats __attribute__((vector_size(4 * count)));
typedef int32_t ints __attribute__((vector_size(4 * count)));
typedef uint32_t words __attribute__((vector_size(4 * count)));

inline words load(const void* from) {
    words value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline floats load_floats(const float* from) {
    floats value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline void store(float* to, floats value) { std::memcpy(to, &value, sizeof(value)); }

#ifdef HAS_WIDE_VNNI
inline floats all(float x) { return (floats)_mm512_set1_ps(x); }
inline ints all(int32_t x) { return (ints)_mm512_set1_epi32(x); }
#else
inline floats all(float x) { return floats{x, x, x, x, x, x, x, x}; }
inline ints all(int32_t x) { return ints{x, x, x, x, x, x, x, x}; }
#endif
inline floats to_floats(ints x) { return __builtin_convertvector(x, floats); }

// Computed here and now: gcc otherwise puts off sums until their summands fill the stack.
template <typename Vector>
inline void settle([[maybe_unused]] Vector& x) {
#if defined(HAS_WIDE_VNNI)
    asm volatile("" : "+v"(x));
#elif defined(HAS_AVX2)
    asm volatile("" : "+x"(x));
#endif
}

// a * b + c, rounded once where the processor can: the file is compiled without contraction, so that the sum is the same
// wherever it is inlined.
inline floats fused(floats a, floats b, floats c) {
#if defined(HAS_WIDE_VNNI)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(HAS_AVX2)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline floats from_float16(const uint8_t* from) {
#if defined(HAS_WIDE_VNNI)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(HAS_AVX2)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    floats out;
    for (int lane = 0; lane < count; lane++) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * lane, 2);
        const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
        if (exponent == 0) {
            const float small = float(mantissa) * 0x1p-24f;
            out[lane] = sign ? -small : small;
        } else {
            const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
            out[lane] = std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
        }
    }
    return out;
#endif
}

inline floats from_bfloat16(const uint8_t* from) {
#if defined(HAS_WIDE_VNNI)
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif defined(HAS_AVX2)
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#else
    floats out;
    for (int lane = 0; lane < count; lane++) {
        bfloat16 number;
        std::memcpy(&number, from + 2 * lane, 2);
        out[lane] = widen(number);
    }
    return out;
#endif
}

// To the nearest integer, ties to even; of numbers that an int32 holds.
inline ints rounded(floats x) {
#if defined(HAS_WIDE_VNNI)
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(HAS_AVX2)
    return (ints)_mm256_cvtps_epi32((__m256)x);
#else
    ints out;
    for (int lane = 0; lane < count; lane++) out[lane] = int32_t(std::nearbyint(x[lane]));
    return out;
#endif
}

inline ints larger(ints a, ints b) { return a > b ? a : b; }
inline ints smaller(ints a, ints b) { return a < b ? a : b; }

// Sizes of floats compare as integers do, infinity and NaN above all others.
inline ints size_of(floats x) { return (ints)x & 0x7fffffff; }

#ifdef HAS_WIDE_VNNI
inline int32_t sum_of(ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
inline int32_t largest_of(ints x) { return _mm512_reduce_max_epi32((__m512i)x); }
inline float sum_of(floats x) { return _mm512_reduce_add_ps((__m512)x); }
#else
template <typename Together>
inline int32_t reduced(ints x, Together together) {
    x = together(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = together(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    return together(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}

inline int32_t sum_of(ints x) { return reduced(x, [](ints a, ints b) { return a + b; }); }
inline int32_t largest_of(ints x) { return reduced(x, [](ints a, ints b) { return larger(a, b); }); }

inline float sum_of(floats x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }
#endif

// 16 integers of 8 bits.
using Sixteen = ints[16 / count];

inline void store_bytes(const Sixteen& numbers, uint8_t* to) {
#if defined(HAS_WIDE_VNNI)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)numbers[0]));
#elif defined(HAS_AVX2)
    const __m256i packed = _mm256_packs_epi32((__m256i)numbers[0], (__m256i)numbers[1]);
    const __m256i shorts = _mm256_permute4x64_epi64(packed, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
    for (int i = 0; i < 16; i++) to[i] = uint8_t(numbers[i / count][i % count]);
#endif
}

// As 16 bits each, and of every four the even ones first.
inline void store_shorts(const Sixteen& numbers, uint8_t* to) {
#if defined(HAS_AVX2) && !defined(HAS_WIDE_VNNI)
    const __m256i packed = _mm256_packs_epi32((__m256i)numbers[0], (__m256i)numbers[1]);
    const __m256i shorts = _mm256_permute4x64_epi64(packed, 0xd8);
    const __m256i even_first = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(shorts, 0xd8), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), even_first);
#else
    for (int i = 0; i < 16; i++) {
        const int from = i / 4 * 4 + (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4);
        const int16_t number = int16_t(numbers[from / count][from % count]);
        std::memcpy(to + 2 * i, &number, 2);
    }
#endif
}

inline ints from_bytes(const uint8_t* from) {
#if defined(HAS_WIDE_VNNI)
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(HAS_AVX2)
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    ints out;
    for (int lane = 0; lane < count; lane++) out[lane] = from[lane];
    return out;
#endif
}

inline ints from_signed_bytes(const uint8_t* from) {
#if defined(HAS_WIDE_VNNI)
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(HAS_AVX2)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    ints out;
    for (int lane = 0; lane < count; lane++) out[lane] = int8_t(from[lane]);
    return out;
#endif
}

}  // namespace lanes
