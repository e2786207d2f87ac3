// The softmax of sixteen queries at a time, each a column: arithmetic on whole vectors, with no sum across one. Shared by both
// attentions on tiles, so that a token's weights are rounded alike whether it is decoded or prefilled with others.
#pragma once

#include "attention.h"

#include "amx.h"

#ifdef HAS_TILES
namespace tiles {

// 2^x to 8 units in a hundred thousand (fitted on [-1/2, 1/2]), a fiftieth of the rounding of a bfloat16 weight. It is 0
// below -100, because denormal numbers would take a hundred times as long.
inline __m512 power_of_two(__m512 x) {
    const __m512 least = _mm512_set1_ps(-100.0f);
    const __mmask16 counts = _mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ);
    x = _mm512_max_ps(least, x);  // in this order a NaN stays one
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(0.05508868f), part, _mm512_set1_ps(0.24260405f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.69327624f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.99992894f));
    return _mm512_maskz_scalef_ps(counts, y, whole);
}

// Scores of a chunk of sixteen queries become hyperbolic tangents of the scaled ones over the cap, which is then their
// scale. The power of two has the polynomial of numbers.h: an error would be multiplied by the cap.
inline void cap(float* scores, int64_t stride, const paged::Shape& shape) {
    const __m512 factor = _mm512_set1_ps(2.0f * log2e * shape.scale / shape.softcap), one = _mm512_set1_ps(1.0f);
    for (int key = 0; key < paged::chunk; key++) {
        float* here = scores + key * stride;
        __m512 x = _mm512_mul_ps(_mm512_load_ps(here), factor);
        x = _mm512_max_ps(_mm512_set1_ps(-100.0f), _mm512_min_ps(_mm512_set1_ps(100.0f), x));  // a NaN stays one
        const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m512 part = _mm512_sub_ps(x, whole);
        __m512 power = _mm512_set1_ps(1.5353362e-4f);
        for (const float coefficient : {1.3398874e-3f, 9.6184370e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f})
            power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(coefficient));
        power = _mm512_scalef_ps(power, whole);
        const __m512 quotient = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one));
        _mm512_store_ps(here, _mm512_sub_ps(one, quotient));
    }
}

// Scores of sixteen queries, `stride` floats from key to key, become weights relative to the best so far, in pairs of keys
// that are passed to `put` one after the other. Returns the factor for the earlier sums. `aside` is called once per pair.
template <typename Put, typename Aside>
inline __m512 weigh(const float* scores, int64_t stride, const paged::Shape& shape, float* best, float* total, Put put, Aside aside) {
    const __m512 to_log2 = _mm512_set1_ps(shape.to_log2());
    __m512 peaks[4];
    for (int i = 0; i < 4; i++) peaks[i] = _mm512_load_ps(scores + i * stride);
    for (int key = 4; key < paged::chunk; key += 4)
        for (int i = 0; i < 4; i++) peaks[i] = _mm512_max_ps(peaks[i], _mm512_load_ps(scores + (key + i) * stride));
    const __m512 peak = _mm512_max_ps(_mm512_max_ps(peaks[0], peaks[1]), _mm512_max_ps(peaks[2], peaks[3]));
    const __m512 before = _mm512_load_ps(best);
    const __m512 now = _mm512_max_ps(before, _mm512_mul_ps(peak, to_log2));
    const __mmask16 seen = _mm512_cmp_ps_mask(now, _mm512_set1_ps(-paged::infinity), _CMP_NEQ_UQ);
    const __m512 base = _mm512_maskz_mov_ps(seen, now);  // nothing seen yet: all weights are next to 0
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int key = 0; key < paged::chunk; key += 2) {
        aside();
        __m512 weights[2];
        for (int i = 0; i < 2; i++) {
            weights[i] = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + (key + i) * stride), to_log2, base));
            sum[i] = _mm512_add_ps(sum[i], weights[i]);
        }
        put(key / 2, weights[0], weights[1]);
    }
    // Exactly 1 where the best stays: a chunk of which a query sees nothing then leaves its sums as they are.
    const __mmask16 stays = _mm512_cmp_ps_mask(before, now, _CMP_EQ_OQ);
    const __m512 factor = _mm512_mask_mov_ps(power_of_two(_mm512_sub_ps(before, base)), stays, _mm512_set1_ps(1.0f));
    _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_load_ps(total), factor, _mm512_add_ps(sum[0], sum[1])));
    _mm512_store_ps(best, now);
    return factor;
}

// Two keys' weights side by side.
inline __m512i in_pairs(__m512 even, __m512 odd) {
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

}  // namespace tiles
#endif
