// 16 x 16 numbers of 32 bits in sixteen registers.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>

// Within quarters of the registers first, then the quarters themselves.
inline void transpose(__m512i rows[16]) {
    __m512i two[16], four[16];
    for (int i = 0; i < 16; i += 2) {
        two[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        two[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        four[i] = _mm512_unpacklo_epi64(two[i], two[i + 2]);
        four[i + 1] = _mm512_unpackhi_epi64(two[i], two[i + 2]);
        four[i + 2] = _mm512_unpacklo_epi64(two[i + 1], two[i + 3]);
        four[i + 3] = _mm512_unpackhi_epi64(two[i + 1], two[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(four[i], four[i + 4], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(four[i], four[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(four[i + 8], four[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(four[i + 8], four[i + 12], 0xdd);
        rows[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        rows[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        rows[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}
#endif
