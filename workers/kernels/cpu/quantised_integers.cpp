// Codes and activations of 8 bits: sums of integers (quantised_sums.h).
#include <bit>

#include "quantised_sums.h"

namespace quantised {
namespace {

#ifdef HAS_VNNI
inline ints sum4(ints sum, words codes, words x) {
#if defined(HAS_WIDE_VNNI)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (ints)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#else
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#endif
}
#else
inline ints sum4(ints sum, words codes, words x) {
    for (int k = 0; k < 32; k += 8) sum += (ints)(codes >> k & 255u) * ((ints)(x << (24 - k)) >> 24);
    return sum;
}
#endif

#ifdef HAS_AVX2
// Codes of fewer than 8 bits, which meet activations of 8.
template <int bits>
struct Integers {
    static constexpr int num_bits = bits, number_bytes = 1;
    static constexpr bool may_have_halves = bits <= 4 || bits == 6, may_have_steps = bits == 4 || bits == 5;
    static constexpr bool may_have_pairs = bits >= 4 && bits <= 6, may_be_whole = bits == 4;

    template <int rows, int first, int last>
    static void sum(const Panels&, const uint8_t* codes, const uint8_t* x, int64_t stride, Block<ints, rows>& sums) {
#ifndef HAS_VNNI
        // As many products as fit are added in 16 bits.
        constexpr int together = std::min<int>(std::bit_floor(32767u / (((1u << bits) - 1) * 2 * 128)), last - first);
        __m256i pairs[rows][halves];
        for_vectors<bits, first, last>([&](auto vector, auto number) {
            for (int half = 0; half < halves; half++) {
                const __m256i here = (__m256i)codes_of<bits>(codes, half, vector);
                for (int row = 0; row < rows; row++) {
                    __m256i& sum = pairs[row][half];
                    const __m256i products = _mm256_maddubs_epi16(here, (__m256i)spread4(x + row * stride + 4 * (vector - first)));
                    sum = number % together == 0 ? products : _mm256_add_epi16(sum, products);
                    if constexpr (rows > 1) settle(sum);
                    if (number % together < together - 1) continue;
                    const ints part = (ints)_mm256_madd_epi16(sum, _mm256_set1_epi16(1));
                    sums[row][half] += part;
                }
            }
        });
#else
        for_vectors<bits, first, last>([&](auto vector, auto) {
            for (int half = 0; half < halves; half++) {
                const words here = codes_of<bits>(codes, half, vector);
                for (int row = 0; row < rows; row++)
                    sums[row][half] = sum4(sums[row][half], here, spread4(x + row * stride + 4 * (vector - first)));
            }
        });
#endif
    }
};
#endif

// Bytes of 8 bits: codes, or those that a table of 16 has for codes of 4. Where bytes have no instruction of their own,
// activations have 16 bits, of every four the even ones first.
template <int bits, bool in_table>
struct Bytes {
    static constexpr int num_bits = bits, number_bytes = has_wide_pieces ? 2 : 1;
    static constexpr bool may_have_halves = !in_table, may_have_steps = bits == 8, may_have_pairs = bits == 8;
    static constexpr bool may_be_whole = bits == 8 || bits == any_bits;

    template <int rows, int first, int last>
    static void sum(const Panels& by, const uint8_t* codes, const uint8_t* x, int64_t stride, Block<ints, rows>& sums) {
        for_vectors<bits, first, last>([&](auto vector, auto) {
            words here[halves];
            for (int half = 0; half < halves; half++) {
                here[half] = codes_of<bits>(codes, half, vector);
                if constexpr (in_table) here[half] = looked_up(by, here[half]);
            }
#if defined(HAS_AVX2) && !defined(HAS_VNNI)
            __m256i parts[2][halves];
            for (int half = 0; half < halves; half++) {
                parts[0][half] = (__m256i)(here[half] & 0x00ff00ffu);
                parts[1][half] = _mm256_srli_epi16((__m256i)here[half], 8);
            }
            for (int row = 0; row < rows; row++)
                for (int part = 0; part < 2; part++) {
                    const __m256i numbers = (__m256i)spread4(x + row * stride + 8 * (vector - first) + 4 * part);
                    for (int half = 0; half < halves; half++) {
                        sums[row][half] += (ints)_mm256_madd_epi16(parts[part][half], numbers);
                        settle(sums[row][half]);
                    }
                }
#else
            for (int row = 0; row < rows; row++)
                for (int half = 0; half < halves; half++)
                    sums[row][half] = sum4(sums[row][half], here[half], spread4(x + row * stride + 4 * (vector - first)));
#endif
        });
    }

    static words looked_up(const Panels& by, words codes) {
#if defined(HAS_WIDE_VNNI)
        const __m128i table = _mm_loadu_si128(static_cast<const __m128i*>(by.table));
        return (words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(HAS_AVX2)
        const __m128i table = _mm_loadu_si128(static_cast<const __m128i*>(by.table));
        return (words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#else
        uint8_t bytes[sizeof(words)];
        std::memcpy(bytes, &codes, sizeof(words));
        for (uint8_t& byte : bytes) byte = static_cast<const uint8_t*>(by.table)[byte];
        return load(bytes);
#endif
    }
};

#ifdef HAS_AVX2
template <int most_bits>
Multiply* for_bits(const Panels& by, int rows) {
    if (by.bits == most_bits) return for_groups<Integers<most_bits>>(by, rows);
    if constexpr (most_bits > 2) return for_bits<most_bits - 1>(by, rows);
    else return nullptr;
}
#endif

}  // namespace

Multiply* multiply_integers(const Panels& by, int rows) {
#ifdef HAS_AVX2
    if (by.sums == of_small_table) return for_groups<Bytes<4, true>>(by, rows);
    return by.bits == 8 ? for_groups<Bytes<8, false>>(by, rows) : for_bits<7>(by, rows);
#else
    return by.sums == of_small_table ? for_groups<Bytes<any_bits, true>>(by, rows) : for_groups<Bytes<any_bits, false>>(by, rows);
#endif
}

}  // namespace quantised
