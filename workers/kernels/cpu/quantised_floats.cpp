// Codes that become float32 in registers, and activations in float32 (quantised_sums.h).
#include "quantised_sums.h"

namespace quantised {
namespace {

// sums += levels of one position times the rows' numbers there.
template <int rows>
inline void add_position(const floats* levels, const uint8_t* x, int64_t stride, Block<floats, rows>& sums) {
    for (int row = 0; row < rows; row++) {
        const floats number = all(float_at(x + row * stride));
        for (int half = 0; half < halves; half++) {
            sums[row][half] = fused(levels[half], number, sums[row][half]);
            settle(sums[row][half]);
        }
    }
}

struct Floats {
    static constexpr int num_bits = any_bits, number_bytes = 4;
    static constexpr bool may_have_halves = true, may_have_steps = false, may_have_pairs = false, may_be_whole = false;

    template <int rows, int first, int last>
    static void add(const Panels& by, const int32_t* zeros, const uint8_t* codes, const uint8_t* x, int64_t stride,
                    Block<floats, rows>& sums) {
        floats zero[halves];
        for (int half = 0; half < halves; half++)
            zero[half] = to_floats(zeros == nullptr ? all(by.zero) : (ints)load(zeros + half * count));
        for_vectors<any_bits, first, last>([&](auto vector, auto) {
            for (int k = 0; k < 4; k++) {
                floats levels[halves];
                for (int half = 0; half < halves; half++)
                    levels[half] = to_floats((ints)(codes_of<any_bits>(codes, half, vector) >> (8 * k) & 255u)) - zero[half];
                add_position<rows>(levels, x + 16 * (vector - first) + 4 * k, stride, sums);
            }
        });
    }
};

// Of any size, or of 16 numbers, which registers hold.
template <bool in_registers>
struct Table {
    static constexpr int num_bits = any_bits, number_bytes = 4;
    static constexpr bool may_have_halves = false, may_have_steps = false, may_have_pairs = false, may_be_whole = false;

    template <int rows, int first, int last>
    static void add(const Panels& by, const int32_t*, const uint8_t* codes, const uint8_t* x, int64_t stride,
                    Block<floats, rows>& sums) {
        for_vectors<any_bits, first, last>([&](auto vector, auto) {
            for (int k = 0; k < 4; k++) {
                floats levels[halves];
                for (int half = 0; half < halves; half++)
                    levels[half] = looked_up(by, (ints)(codes_of<any_bits>(codes, half, vector) >> (8 * k) & 255u));
                add_position<rows>(levels, x + 16 * (vector - first) + 4 * k, stride, sums);
            }
        });
    }

    static floats looked_up(const Panels& by, ints places) {
        const float* table = static_cast<const float*>(by.table);
#if defined(HAS_WIDE_VNNI)
        if constexpr (in_registers) return (floats)_mm512_permutexvar_ps((__m512i)places, _mm512_loadu_ps(table));
        return (floats)_mm512_i32gather_ps((__m512i)places, table, 4);
#elif defined(HAS_AVX2)
        if constexpr (!in_registers) return (floats)_mm256_i32gather_ps(table, (__m256i)places, 4);
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)places);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + count), (__m256i)places);
        return (floats)_mm256_blendv_ps(low, high, (__m256)(places << 28));
#else
        floats levels;
        for (int lane = 0; lane < count; lane++) levels[lane] = table[places[lane]];
        return levels;
#endif
    }
};

// The bits of e4m3 are those of a float16 that is 2^-8 of it.
struct Fp8 {
    static constexpr int num_bits = 8, number_bytes = 4;
    static constexpr bool may_have_halves = false, may_have_steps = false, may_have_pairs = false, may_be_whole = false;

    template <int rows, int first, int last>
    static void add(const Panels&, const int32_t*, const uint8_t* codes, const uint8_t* x, int64_t stride,
                    Block<floats, rows>& sums) {
        for (int position = 4 * first; position < 4 * last; position++) {
            floats levels[halves];
            const uint8_t* from = codes + position * panel;
#ifdef HAS_AVX2
            const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
            const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xbfff)));
#ifdef HAS_WIDE_VNNI
            levels[0] = (floats)_mm512_cvtph_ps(moved);
#else
            levels[0] = (floats)_mm256_cvtph_ps(_mm256_castsi256_si128(moved));
            levels[1] = (floats)_mm256_cvtph_ps(_mm256_extracti128_si256(moved, 1));
#endif
#else
            uint16_t moved[panel];
            for (int i = 0; i < panel; i++) moved[i] = uint16_t((from[i] & 128) << 8 | (from[i] & 127) << 7);
            for (int half = 0; half < halves; half++)
                levels[half] = from_float16(reinterpret_cast<const uint8_t*>(moved + half * count));
#endif
            add_position<rows>(levels, x + 4 * (position - 4 * first), stride, sums);
        }
    }
};

}  // namespace

Multiply* multiply_floats(const Panels& by, int rows) {
    switch (by.sums) {
        case of_table: return by.bits == 4 ? for_groups<Table<true>>(by, rows) : for_groups<Table<false>>(by, rows);
        case of_fp8: return for_groups<Fp8>(by, rows);
        default: return for_groups<Floats>(by, rows);
    }
}

}  // namespace quantised
