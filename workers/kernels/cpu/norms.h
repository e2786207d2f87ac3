// Kinds of norms and activations, as the elementwise kernels and the compiled layers name them: norms.py.
#pragma once

#include <cstdint>

enum class NormKind : int {
    rounded = 0,  // RMS norm, rounded before the weight and after it; the weight has the tensors' type
    wide = 1,     // RMS norm, rounded after the weight, which is in float32
    centred = 2,  // layer norm, rounded after the weight and the bias, which are in float32
    none = 3,     // a copy
};

// Functions of an MLP, as `CompiledActivation` in norms.py numbers them.
enum class Activation : int { silu = 0, gelu_tanh = 1, relu2 = 2 };

struct Norm {
    const void* weight;
    const float* bias;  // of layer norms, or null
    float eps;
    NormKind kind;
};
