// Numbers as the kernels load and store them: float, or bfloat16 by its bits, computed in float either way.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

template <typename T>
T narrow(float x);

template <>
inline float narrow<float>(float x) {
    return x;
}

// To the nearest, ties to even, as torch does it; a NaN stays one.
template <>
inline bfloat16 narrow<bfloat16>(float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x == x ? rounded : 0x7fc0)};
}

// 2^x to a few units in the last place (minimax polynomial on [-1/2, 1/2]); 0 below -126, infinity from 128 on,
// and 2^127 just before it.
inline float power_of_two(float x) {
    float clamped = x < -126.0f ? -126.0f : x;
    clamped = clamped > 127.0f ? 127.0f : clamped;
    float whole = std::nearbyint(clamped);
    float part = clamped - whole;
    float y = 1.5353362e-4f;
    y = y * part + 1.3398874e-3f;
    y = y * part + 9.6184370e-3f;
    y = y * part + 5.5503324e-2f;
    y = y * part + 2.4022648e-1f;
    y = y * part + 6.9314720e-1f;
    y = y * part + 1.0f;
    float scale = std::bit_cast<float>(uint32_t(int32_t(whole) + 127) << 23);
    y = x < -126.0f ? 0.0f : y * scale;
    return x >= 128.0f ? std::numeric_limits<float>::infinity() : y;
}

constexpr float log2e = 1.44269504088896341f;
