// Rounds float weights to whole levels, once, while they are read (workers/checkpoint/rounding.py has the twin in torch).
// A row's results do not depend on the number of threads, which share out rows.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>

#include "numbers.h"
#include "rounded.h"
#include "threads.h"

namespace {

// weight [rows][stride], the first `inputs` of a row -> largest [rows][groups]: of each group the largest magnitude.
template <typename T>
void largest(const T* weight, int64_t stride, float* largest, int64_t rows, int64_t inputs, int64_t group,
             int num_threads) {
    const int64_t groups = (inputs + group - 1) / group;
    threads::each(rows, num_threads, [&](int64_t row) {
        for (int64_t g = 0; g < groups; g++) {
            const T* x = weight + row * stride + g * group;
            const int64_t count = std::min(group, inputs - g * group);
            int32_t most = 0;  // of the bits without the sign: infinity and NaN are above all numbers
            for (int64_t i = 0; i < count; i++)
                most = std::max(most, std::bit_cast<int32_t>(widen(x[i])) & 0x7fffffff);
            largest[row * groups + g] = std::bit_cast<float>(most);
        }
    });
}

template <typename T>
void to_levels(const T* x, float scale, float zero, uint8_t* codes, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float level = std::nearbyint(widen(x[i]) / scale);
        level = level < -zero ? -zero : level;
        level = level > zero - 1.0f ? zero - 1.0f : level;
        codes[i] = uint8_t(int32_t(level + zero));
    }
}

template <typename T>
void to_e4m3(const T* x, float scale, uint8_t* codes, int64_t count) {
    for (int64_t i = 0; i < count; i++) codes[i] = rounded::to_e4m3(widen(x[i]) / scale).bits;
}

// scale [rows][groups] -> codes [rows][bytes of a dense stream]: of 4 or 8 bits, integers with 2^(bits - 1) for level 0,
// or, `bits` 0, e4m3.
template <typename T>
void round_rows(const T* weight, int64_t stride, const float* scale, uint8_t* codes, int64_t rows, int64_t inputs,
                int64_t group, int bits, int num_threads) {
    const int64_t groups = (inputs + group - 1) / group, row_bytes = bits == 4 ? (inputs + 1) / 2 : inputs;
    threads::share(rows, num_threads, [&](threads::Pieces& pieces) {
        const std::unique_ptr<uint8_t[]> single(new uint8_t[inputs + 1]);
        single[inputs] = 0;
        for (int64_t row; (row = pieces.take()) >= 0;) {
            uint8_t *stream = codes + row * row_bytes, *levels = bits == 4 ? single.get() : stream;
            for (int64_t g = 0; g < groups; g++) {
                const T* x = weight + row * stride + g * group;
                const int64_t count = std::min(group, inputs - g * group);
                const float by = scale[row * groups + g];
                if (bits == 0)
                    to_e4m3(x, by, levels + g * group, count);
                else
                    to_levels(x, by, bits == 4 ? 8.0f : 128.0f, levels + g * group, count);
            }
            if (bits == 4)
                for (int64_t i = 0; i < row_bytes; i++) stream[i] = uint8_t(levels[2 * i] | levels[2 * i + 1] << 4);
        }
    });
}

}  // namespace

#define ROUNDING(T, name)                                                                                             \
    extern "C" void largest_##name(const T* weight, int64_t stride, float* most, int64_t rows, int64_t inputs,        \
                                   int64_t group, int num_threads) {                                                  \
        largest(weight, stride, most, rows, inputs, group, num_threads);                                              \
    }                                                                                                                 \
    extern "C" void round_rows_##name(const T* weight, int64_t stride, const float* scale, uint8_t* codes,            \
                                      int64_t rows, int64_t inputs, int64_t group, int bits, int num_threads) {       \
        round_rows(weight, stride, scale, codes, rows, inputs, group, bits, num_threads);                             \
    }

ROUNDING(float, float32)
ROUNDING(bfloat16, bfloat16)
