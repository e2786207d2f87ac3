// A linear layer's product as compiled layers call it (layers.cpp): packed weights side by side, each multiplied by the
// function of its kind.
#pragma once

#include <cstdint>

// One packed weight: `ProductPart` in products.py. `multiply` computes out = x W^T (+ bias) of [num_rows][x_stride] and
// [num_rows][out_stride]; the dtype of both is the function's own. A row's result does not depend on the other rows.
struct Part {
    using Multiply = void(const Part*, const void* x, void* out, int64_t num_rows, int64_t x_stride, int64_t out_stride,
                          int num_threads);

    Multiply* multiply;
    const void* packed;   // the weight, or a structure that describes it: the function knows
    const float* bias;    // in the order of the packed outputs, or null
    int64_t num_outputs;  // before the gate
    int64_t num_inputs;   // that are read of a row: zeros beyond the weight's own
    int64_t gated;        // 1: num_outputs / 2 columns silu(gate) * up
};

struct Product {
    const Part* parts;
    int64_t num_parts;

    bool gated() const { return parts[0].gated != 0; }  // by its only part
    int64_t num_outputs() const {
        int64_t sum = 0;
        for (int64_t i = 0; i < num_parts; i++) sum += parts[i].num_outputs;
        return sum;
    }
};
