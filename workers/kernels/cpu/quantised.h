// A quantised weight as the kernels multiply with it: `PackedQuantised` in quantised.py describes and fills it.
//
// Outputs stand in panels of 16, one lane of 32 bits each. A step is 32 positions of a panel, which belong to one group (or
// to two groups of 16); where a group fills no step, positions without an input are left. The bits of a step's codes stand
// in planes of 8, or of 4, 2 and 1 bits, from the lowest on, in vectors of 64 bytes: a lane has four neighbouring positions
// of its output, one in each byte.
//
//     plane of 8 bits   vector j has positions 4 j to 4 j + 3
//     plane of 4 bits   vector k has those of j = k in the low halves of its bytes, those of j = k + 4 in the high ones
//     plane of 2 bits   vector k has those of j = k + 2 s in field s of each byte
//     plane of 1 bit    bit j of each byte
//
// Memory is read once, in order: all steps of a panel, then the next panel's. What belongs to groups stands in arrays of its
// own, [panel][group or block][16].
#pragma once

#include <cstdint>

namespace quantised {

constexpr int panel = 16;
constexpr int step_size = 32;

enum NumberType : int32_t { float32_type, float16_type, bfloat16_type, uint8_type, int8_type };

// A number for each group: one of `values`, or that of the group's block times its factor.
struct GroupNumbers {
    const uint8_t* values;   // null: there is no such number
    const uint8_t* factors;  // or null
    int32_t value_type, factor_type;
    int64_t num_values;      // of a panel
    int64_t groups_per_value;
    int64_t first_group;     // the first group's place in its block
};

enum Rounding : int32_t {  // of activations
    none,
    int8_of_pieces,  // our own: a scale for each step, or half of one where groups are halves
    int8_of_tokens,  // from here on the checkpoint's
    int8_static,
    fp8_of_tokens,
    fp8_of_groups,
    fp8_static,
};

enum Sums : int32_t {
    of_integers,       // codes and activations of 8 bits
    of_small_table,    // likewise, codes being places in a table of 16 integers
    of_floats,         // codes less their zero and activations in float32
    of_table,          // numbers of a table of floats, likewise
    of_fp8,            // numbers of e4m3, likewise; the codes stand [position][16]
};

struct Panels {
    const uint8_t* codes;
    GroupNumbers scale, minimum;
    const uint8_t* zeros;        // [panel][group][16], or null: `zero` is every group's
    const void* table;           // uint8 [16], 128 more than each level; float [2^bits]
    const int32_t* inputs;       // of each position the input, -1 for none; null: as they come
    const int32_t* group_steps;  // [num_groups]; null: each group is half a step
    int64_t num_inputs, num_steps, num_groups;
    int64_t rounding_group;      // of fp8_of_groups
    int32_t bits, zero, sums, rounding, groups_are_steps;
    float activation_scale;      // static
    int32_t activation_zero;
    float outliers_from;         // inputs of that size or more are not rounded; 0: all are. Only codes of 8 bits, one group

    int64_t step_bytes() const { return int64_t(bits) * panel * step_size / 8; }
    bool by_halves() const { return group_steps == nullptr; }
    bool sums_floats() const { return sums >= of_floats; }

    // Has a row one scale, and do the products of a group with it fit 32 bits?
    bool has_whole_sums() const {
        return !by_halves() && (rounding == int8_of_tokens || rounding == int8_static) && num_steps * step_size < 1 << 16;
    }
};

// An input that is multiplied as it is. Of a row, the first has in its place how many follow.
struct Outlier {
    int32_t position;
    float number;
};

}  // namespace quantised
