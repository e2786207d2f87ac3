// A row of activations as the kernels of quantised.cpp read it: for each piece (a step, or half of one where groups are
// halves) its scale, the sum of its numbers, and the numbers: 8 bits with what the zero and minimum of a group are
// multiplied with, or floats.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes.h"
#include "numbers.h"
#include "quantised.h"
#include "scratch.h"

namespace quantised {

using namespace lanes;

struct PieceHead {
    float scale;     // of the numbers
    int32_t start;   // of sums of integers: minus theirs, times the weight's zero if that is every group's
    float offset;    // scale * sum, or the sum of floats
    int32_t unused;  // so that vectors are aligned
};

// Do codes of 8 bits meet activations of 16? Without an instruction for bytes their products do not fit 16 bits.
#if defined(HAS_AVX2) && !defined(HAS_VNNI)
constexpr bool has_wide_pieces = true;
#else
constexpr bool has_wide_pieces = false;
#endif

inline bool is_wide(const Panels& by) {
    return has_wide_pieces && (by.sums == of_small_table || (by.sums == of_integers && by.bits == 8));
}

inline int64_t piece_size(const Panels& by) { return by.by_halves() ? step_size / 2 : step_size; }

inline int64_t piece_bytes(const Panels& by) {
    return int64_t(sizeof(PieceHead)) + piece_size(by) * (by.sums_floats() ? 4 : is_wide(by) ? 2 : 1);
}

inline int64_t row_bytes(const Panels& by) { return by.num_steps * step_size / piece_size(by) * piece_bytes(by); }

// To the nearest number of e4m3, ties to even, at most 448.
inline float round_to_fp8(float x) {
    const float size = std::min(std::fabs(x), 448.0f);
    const uint32_t bits = std::bit_cast<uint32_t>(size);
    const float normal = std::bit_cast<float>((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000u);
    const float rounded = size < 0x1p-6f ? std::nearbyint(size * 512.0f) / 512.0f : normal;
    return x == x ? std::copysign(rounded, x) : x;
}

class RowWriter {
  public:
    explicit RowWriter(const Panels& by)
        : by_(by), size_(piece_size(by)), num_positions_(by.num_steps * step_size), bytes_(piece_bytes(by)) {}

    // `outliers` has room for one more than the row has positions, where the weight has any.
    template <typename T>
    void write(const T* x, uint8_t* to, Outlier* outliers) const {
        static thread_local Scratch<float> memory;
        float* row = memory.at_least(num_positions_);
        gather(x, row);
        if (by_.outliers_from > 0.0f) take_outliers(row, outliers);
        if (by_.sums_floats()) write_floats(row, to);
        else write_integers(row, to);
    }

  private:
    template <typename T>
    void gather(const T* x, float* row) const {
        // A position without an input has level 0.
        const float nothing = by_.rounding == int8_static ? -float(by_.activation_zero) * by_.activation_scale : 0.0f;
        if (by_.inputs != nullptr) {
            for (int64_t i = 0; i < num_positions_; i++) row[i] = by_.inputs[i] < 0 ? nothing : widen(x[by_.inputs[i]]);
            return;
        }
        for (int64_t i = 0; i < by_.num_inputs; i++) row[i] = widen(x[i]);
        std::fill(row + by_.num_inputs, row + num_positions_, nothing);
    }

    void take_outliers(float* row, Outlier* outliers) const {
        Outlier* last = outliers;
        for (int64_t i = 0; i < num_positions_; i++)
            if (std::fabs(row[i]) >= by_.outliers_from) *++last = {int32_t(i), row[i]}, row[i] = 0.0f;
        outliers->position = int32_t(last - outliers);
    }

    // `size` is a multiple of 16. NaN where a number is infinite or none.
    static float scale_of(const float* row, int64_t size, float largest_level) {
        ints sizes{};
        for (int64_t i = 0; i < size; i += count) sizes = larger(size_of(load_floats(row + i)), sizes);
        const float largest = std::bit_cast<float>(largest_of(sizes));
        if (!(largest <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
        return largest > 0.0f ? largest / largest_level : 1.0f;
    }

    // The checkpoint's scale, or NaN as in `scale_of`.
    float static_scale(const float* row) const {
        const float scale = scale_of(row, num_positions_, 1.0f);
        return scale == scale ? by_.activation_scale : scale;
    }

    void write_integers(const float* row, uint8_t* to) const {
        const bool is_static = by_.rounding == int8_static, wide = is_wide(by_);
        float scale = is_static ? static_scale(row) : 1.0f;
        if (by_.rounding == int8_of_tokens) scale = scale_of(row, num_positions_, 127.0f);
        const ints zero = all(is_static ? by_.activation_zero : 0), least = all(is_static ? -128 : -127), most = all(127);
        const int32_t times = by_.zeros == nullptr ? by_.zero : 1;
        const auto level_at = [&](const float* from) {
            return smaller(larger(rounded(load_floats(from) / all(scale)) + zero, least), most);
        };
        for (int64_t first = 0; first < num_positions_; first += size_, to += bytes_) {
            if (by_.rounding == int8_of_pieces) scale = scale_of(row + first, size_, 127.0f);
            ints sums{};
            for (int i = 0; i < size_; i += 16) {
                Sixteen levels;
                for (int j = 0; j < 16 / count; j++) sums += levels[j] = level_at(row + first + i + j * count);
                if (wide) store_shorts(levels, to + sizeof(PieceHead) + 2 * i);
                else store_bytes(levels, to + sizeof(PieceHead) + i);
            }
            const int32_t sum = sum_of(sums);
            const PieceHead head{scale, -sum * times, scale * float(sum), 0};
            std::memcpy(to, &head, sizeof(head));
        }
    }

    void write_floats(float* row, uint8_t* to) const {
        if (by_.rounding == fp8_static) round_fp8(row, num_positions_, static_scale(row));
        if (by_.rounding == fp8_of_tokens) round_fp8(row, num_positions_, scale_of(row, num_positions_, 448.0f));
        if (by_.rounding == fp8_of_groups)
            for (int64_t first = 0; first < num_positions_; first += by_.rounding_group) {
                const int64_t size = std::min(by_.rounding_group, num_positions_ - first);
                round_fp8(row + first, size, scale_of(row + first, size, 448.0f));
            }
        for (int64_t first = 0; first < num_positions_; first += size_, to += bytes_) {
            PieceHead head{1.0f, 0, 0.0f, 0};
            floats sums{};
            for (int64_t i = 0; i < size_; i += count) sums += load_floats(row + first + i);
            head.offset = sum_of(sums);
            std::memcpy(to, &head, sizeof(head));
            std::memcpy(to + sizeof(head), row + first, size_ * 4);
        }
    }

    static void round_fp8(float* row, int64_t size, float scale) {
        for (int64_t i = 0; i < size; i++) row[i] = round_to_fp8(row[i] / scale) * scale;
    }

    const Panels& by_;
    const int64_t size_, num_positions_, bytes_;
};

}  // namespace quantised
