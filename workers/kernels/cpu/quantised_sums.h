// How a panel of codes meets rows: what quantised_integers.cpp and quantised_floats.cpp share. A kind of sums has the codes'
// bits, the bytes of an activation, and `sum` or `add`: they add what a piece of a step, its vectors `first` to `last`, sums
// up to for `rows` rows, `stride` bytes apart. A kind of `any_bits` is compiled once for codes of 2 to 8 bits: a step's codes are
// unpacked to bytes before the rows meet them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "lanes.h"
#include "quantised.h"
#include "quantised_rows.h"

namespace quantised {

constexpr int halves = panel / count;  // of a panel, a vector each
constexpr int vector_bytes = 4 * panel;
constexpr int any_bits = 0;

// Rows of a block: as the registers take them.
#ifdef HAS_WIDE_VNNI
constexpr int most_rows = 8;
#else
constexpr int most_rows = 4;
#endif

template <typename Number, int rows>
using Block = Number[rows][halves];

// What the groups of a panel multiply with, as the sums want it: [group][panel] each.
struct Groups {
    const float *scales, *minimums;  // no minimums: null
    const int32_t* zeros;            // null: `zero` is every group's
};

// Codes that are multiplied next: some are asked for at each step, until `end`.
struct Ahead {
    const uint8_t *at, *end;
    int64_t step_bytes;

    void ask() {
        if (at >= end) return;
        for (int64_t line = 0; line < step_bytes; line += 64) __builtin_prefetch(at + line, 0, 2);
        at += step_bytes;
    }
};

// A panel times rows `stride` bytes apart, into [rows][panel].
using Multiply = void(const Panels&, const Groups&, int64_t panel_index, const uint8_t* x, int64_t stride, Ahead ahead,
                      float* out);

// For 1, 2, 4 or `most_rows` rows; null where there is none for 2.
Multiply* multiply_integers(const Panels& by, int rows);
Multiply* multiply_floats(const Panels& by, int rows);

namespace {

inline words spread4(const uint8_t* from) {
    int32_t value;
    std::memcpy(&value, from, 4);
    return (words)all(value);
}

inline float float_at(const uint8_t* from) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
}

template <int left>
inline words shifted(words x) {
    if constexpr (left >= 0) return x << left;
    else return x >> -left;
}

// `from` is where the lanes' first vector is.
template <int bits, int j>
inline words code_vector(const uint8_t* from) {
    constexpr uint32_t each = 0x01010101u;
    constexpr int of_two = bits & 4, of_one = bits & 6;
    if constexpr (bits == 8) return load(from + vector_bytes * j);
    words found{};
    if constexpr ((bits & 4) != 0) found = shifted<j < 4 ? 0 : -4>(load(from + vector_bytes * (j % 4))) & 15 * each;
    if constexpr ((bits & 2) != 0)
        found |= shifted<of_two - j / 2 * 2>(load(from + (bits & 4) * vector_bytes + vector_bytes * (j % 2))) & (3 * each << of_two);
    if constexpr ((bits & 1) != 0) found |= shifted<of_one - j>(load(from + (bits & 6) * vector_bytes)) & (each << of_one);
    return found;
}

// Calls `use` with each vector of a piece, those that share memory one after the other, and how many came before. Codes of
// `any_bits` share none in bytes: their loop is compiled as one, in the same order.
template <int bits, int first, int last, typename Use>
inline void for_vectors(Use use) {
    constexpr bool whole = last - first == 8;
    if constexpr (bits == any_bits) {
#pragma GCC unroll 1
        for (int i = 0; i < last - first; i++) use(whole ? i / 2 + i % 2 * 4 : first + i, i);
    } else {
        [&]<int... i>(std::integer_sequence<int, i...>) {
            (use(std::integral_constant<int, whole ? i / 2 + i % 2 * 4 : first + i>(), std::integral_constant<int, i>()), ...);
        }(std::make_integer_sequence<int, last - first>());
    }
}

template <int bits>
inline words codes_of(const uint8_t* codes, int half, auto vector) {
    codes += half * sizeof(words);
    if constexpr (bits == any_bits) return load(codes + vector * vector_bytes);
    else return code_vector<bits, vector>(codes);
}

using Unpack = void(const uint8_t* codes, uint8_t* bytes);

// A step's codes as codes of 8 bits stand.
template <int bits>
void unpack(const uint8_t* codes, uint8_t* bytes) {
    for (int half = 0; half < halves; half++)
        for_vectors<bits, 0, 8>([&](auto vector, auto) {
            const words found = codes_of<bits>(codes, half, vector);
            std::memcpy(bytes + vector * vector_bytes + half * sizeof(words), &found, sizeof(words));
        });
}

// Null where they stand so already.
template <int most_bits = 7>
Unpack* unpack_of(int bits) {
    if (bits == most_bits) return unpack<most_bits>;
    if constexpr (most_bits > 2) return unpack_of<most_bits - 1>(bits);
    else return nullptr;
}

// integers += what a piece of a step sums up to, less what the zero of its codes does.
template <typename Kind, int rows, int first, int last>
inline void add_integers(const Panels& by, const int32_t* zeros, const uint8_t* codes, const uint8_t* x, int64_t stride,
                         Block<ints, rows>& integers) {
    for (int row = 0; row < rows; row++) {
        const ints start = (ints)spread4(x + row * stride + offsetof(PieceHead, start));
        for (int half = 0; half < halves; half++)
            integers[row][half] += zeros == nullptr ? start : (ints)load(zeros + half * count) * start;
    }
    Kind::template sum<rows, first, last>(by, codes, x + sizeof(PieceHead), stride, integers);
}

// sums += integers * scales of the activations of a piece.
template <int rows>
inline void add_scaled(const Block<ints, rows>& integers, const uint8_t* x, int64_t stride, Block<floats, rows>& sums) {
    for (int row = 0; row < rows; row++) {
        const floats scale = all(float_at(x + row * stride + offsetof(PieceHead, scale)));
        for (int half = 0; half < halves; half++)
            sums[row][half] = fused(to_floats(integers[row][half]), scale, sums[row][half]);
    }
}

// sums += scales of activations * what a piece of a step sums up to.
template <typename Kind, int rows, int first, int last>
inline void add_piece(const Panels& by, const int32_t* zeros, const uint8_t* codes, const uint8_t* x, int64_t stride,
                      Block<floats, rows>& sums) {
    if constexpr (Kind::number_bytes < 4) {
        Block<ints, rows> integers{};
        add_integers<Kind, rows, first, last>(by, zeros, codes, x, stride, integers);
        add_scaled<rows>(integers, x, stride, sums);
    } else {
        Kind::template add<rows, first, last>(by, zeros, codes, x + sizeof(PieceHead), stride, sums);
    }
}

// How many groups are in a step, if not one or two.
constexpr int steps_of_group = 0;        // any number of steps each
constexpr int steps_of_whole_group = -1;  // likewise, and a row has one scale: a group's sum is one of integers

// A panel times `rows` rows, into [rows][panel].
template <typename Kind, int rows, int groups_of_step>
[[gnu::flatten]] void multiply(const Panels& by, const Groups& groups, int64_t panel_index, const uint8_t* x, int64_t stride,
              Ahead ahead, float* out) {
    const int64_t step_bytes = (Kind::num_bits == any_bits ? by.bits : Kind::num_bits) * panel * step_size / 8;
    constexpr int64_t piece = sizeof(PieceHead) + Kind::number_bytes * step_size / std::max(1, groups_of_step);
    const uint8_t* codes = by.codes + panel_index * by.num_steps * step_bytes;
    Unpack* const unpack = Kind::num_bits == any_bits ? unpack_of(by.bits) : nullptr;
    alignas(words) uint8_t bytes[Kind::num_bits == any_bits ? panel * step_size : 1];
    const uint8_t* step_codes = codes;
    Block<floats, rows> sums{};
    const auto zeros_of = [&](int64_t group) { return groups.zeros == nullptr ? nullptr : groups.zeros + group * panel; };
    const auto end_piece = [&](int64_t group) {
        if (groups.minimums != nullptr)
            for (int half = 0; half < halves; half++) {
                const floats minimum = -load_floats(groups.minimums + group * panel + half * count);
                for (int row = 0; row < rows; row++) {
                    const floats offset = all(float_at(x + row * stride + offsetof(PieceHead, offset)));
                    sums[row][half] = fused(minimum, offset, sums[row][half]);
                }
            }
        x += piece;
    };
    const auto add = [&]<int first, int last>(int64_t group, Block<floats, rows>& inner) {
        add_piece<Kind, rows, first, last>(by, zeros_of(group), step_codes, x, stride, inner);
        end_piece(group);
    };
    const auto finish = [&](int64_t group, const Block<floats, rows>& inner) {
        for (int half = 0; half < halves; half++) {
            const floats scale = load_floats(groups.scales + group * panel + half * count);
            for (int row = 0; row < rows; row++) sums[row][half] = fused(inner[row][half], scale, sums[row][half]);
        }
    };
    const auto fetch = [&] {
        ahead.ask();
        step_codes = codes;
        if constexpr (Kind::num_bits == any_bits)
            if (unpack != nullptr) unpack(codes, bytes), step_codes = bytes;
    };
    if constexpr (groups_of_step == steps_of_whole_group) {
        for (int64_t group = 0; group < by.num_groups; group++) {
            Block<ints, rows> integers{};
            const uint8_t* first = x;
            for (int step = 0; step < by.group_steps[group]; step++, codes += step_bytes) {
                fetch();
                add_integers<Kind, rows, 0, 8>(by, zeros_of(group), step_codes, x, stride, integers);
                end_piece(group);
            }
            Block<floats, rows> inner{};
            add_scaled<rows>(integers, first, stride, inner);
            finish(group, inner);
        }
    } else if constexpr (groups_of_step == steps_of_group) {
        for (int64_t group = 0; group < by.num_groups; group++) {
            Block<floats, rows> inner{};
            for (int step = 0; step < by.group_steps[group]; step++, codes += step_bytes) {
                fetch();
                add.template operator()<0, 8>(group, inner);
            }
            finish(group, inner);
        }
    } else {
        for (int64_t step = 0; step < by.num_steps; step++, codes += step_bytes) {
            fetch();
            Block<floats, rows> inner{};
            add.template operator()<0, 8 / groups_of_step>(step * groups_of_step, inner);
            finish(step * groups_of_step, inner);
            if constexpr (groups_of_step == 2) {
                Block<floats, rows> others{};
                add.template operator()<4, 8>(2 * step + 1, others);
                finish(2 * step + 1, others);
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < halves; half++) store(out + row * panel + half * count, sums[row][half]);
}

template <typename Kind, int groups_of_step>
Multiply* for_rows(int rows) {
    if (rows == 1) return multiply<Kind, 1, groups_of_step>;
    if constexpr (Kind::may_have_pairs)
        if (rows == 2) return multiply<Kind, 2, groups_of_step>;
    if (rows == most_rows) return multiply<Kind, most_rows, groups_of_step>;
    return rows == 4 ? multiply<Kind, 4, groups_of_step> : nullptr;
}

template <typename Kind>
Multiply* for_groups(const Panels& by, int rows) {
    if constexpr (Kind::may_have_halves)
        if (by.by_halves()) return for_rows<Kind, 2>(rows);
    if constexpr (Kind::may_be_whole)
        if (by.has_whole_sums()) return for_rows<Kind, steps_of_whole_group>(rows);
    if constexpr (Kind::may_have_steps)
        if (by.groups_are_steps != 0) return for_rows<Kind, 1>(rows);
    return for_rows<Kind, steps_of_group>(rows);
}

}  // namespace
}  // namespace quantised
