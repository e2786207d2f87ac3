// Kinds of norms, as the elementwise kernels and the compiled layers name them: NormKind in norms.py.
#pragma once

#include <cstdint>

enum class NormKind : int {
    rounded = 0,  // RMS norm, rounded before the weight and after it; the weight has the tensors' type
    wide = 1,     // RMS norm, rounded after the weight, which is in float32
    centred = 2,  // layer norm, rounded after the weight and the bias, which are in float32
    none = 3,     // a copy
};

struct Norm {
    const void* weight;
    const float* bias;  // of layer norms, or null
    float eps;
    NormKind kind;
};
