// The operations between the matrix products, each in one pass over its tensors. The twins in reference.py define the
// results and their rounding. T is the dtype of all tensors but cos and sin. Sizes and strides count elements.
#include <cstring>
#include <type_traits>

#include "numbers.h"

namespace {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t worth_a_thread = 1 << 15;

template <typename T>
void normalize(const T* x, const T* weight, T* out, int64_t size, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += widen(x[i]) * widen(x[i]);
    float factor = 1.0f / std::sqrt(sum / float(size) + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = narrow<T>(widen(weight[i]) * widen(narrow<T>(widen(x[i]) * factor)));
}

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t num_tokens, int64_t token_stride, int64_t num_heads,
              int64_t size, float eps, int num_threads) {
    int64_t total = num_tokens * num_heads * size;
#pragma omp parallel for collapse(2) num_threads(num_threads) if (total > worth_a_thread)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++)
            normalize(x + token * token_stride + head * size, weight, out + (token * num_heads + head) * size, size, eps);
}

template <typename T>
void add_rms_norm(const T* x, const T* residual, const T* weight, T* normed, T* stream, int64_t num_tokens,
                  int64_t size, int64_t normed_stride, float eps, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * size > worth_a_thread)
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t start = token * size;
#pragma omp simd
        for (int64_t i = start; i < start + size; i++) stream[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
        normalize(stream + start, weight, normed + token * normed_stride, size, eps);
    }
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t num_tokens, int64_t size, int64_t out_stride, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * size > worth_a_thread)
    for (int64_t token = 0; token < num_tokens; token++) {
        const T* gate = gate_up + token * 2 * size;
        const T* up = gate + size;
        T* to = out + token * out_stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float x = widen(gate[i]);
            to[i] = narrow<T>(widen(narrow<T>(x / (1.0f + power_of_two(-x * log2e)))) * widen(up[i]));
        }
    }
}

template <typename T>
void turn(const T* x, const float* cos, const float* sin, T* out, int64_t num_pairs) {
#pragma omp simd
    for (int64_t i = 0; i < num_pairs; i++) {
        float first = widen(x[i]), second = widen(x[i + num_pairs]);
        out[i] = narrow<T>(first * cos[i] - second * sin[i]);
        out[i + num_pairs] = narrow<T>(second * cos[i] + first * sin[i]);
    }
}

template <typename T>
void rope_kv_write(const T* q, const T* k, const T* v, const int64_t* strides, const float* cos, const float* sin,
                   T* turned, T* k_cache, T* v_cache, const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                   int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int num_threads) {
    int64_t total = num_tokens * (num_heads + 2 * num_kv_heads) * head_dim;
#pragma omp parallel for num_threads(num_threads) if (total > worth_a_thread)
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t num_pairs = head_dim / 2;
        const float *cos_here = cos + token * num_pairs, *sin_here = sin + token * num_pairs;
        for (int64_t head = 0; head < num_heads; head++)
            turn(q + token * strides[0] + head * head_dim, cos_here, sin_here,
                 turned + token * strides[3] + head * head_dim, num_pairs);
        const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        for (int64_t head = 0; head < num_kv_heads; head++) {
            const int64_t place = ((block * num_kv_heads + head) * block_size + offset) * head_dim;
            turn(k + token * strides[1] + head * head_dim, cos_here, sin_here, k_cache + place, num_pairs);
            std::memcpy(v_cache + place, v + token * strides[2] + head * head_dim, head_dim * sizeof(T));
        }
    }
}

}  // namespace

#define FOR_DTYPE(T, SUFFIX)                                                                                          \
    extern "C" void rms_norm_##SUFFIX(const T* x, const T* weight, T* out, int64_t num_tokens, int64_t token_stride,  \
                                      int64_t num_heads, int64_t size, float eps, int num_threads) {                  \
        rms_norm(x, weight, out, num_tokens, token_stride, num_heads, size, eps, num_threads);                        \
    }                                                                                                                 \
    extern "C" void add_rms_norm_##SUFFIX(const T* x, const T* residual, const T* weight, T* normed, T* stream,       \
                                          int64_t num_tokens, int64_t size, int64_t normed_stride, float eps,         \
                                          int num_threads) {                                                          \
        add_rms_norm(x, residual, weight, normed, stream, num_tokens, size, normed_stride, eps, num_threads);         \
    }                                                                                                                 \
    extern "C" void silu_mul_##SUFFIX(const T* gate_up, T* out, int64_t num_tokens, int64_t size, int64_t out_stride, \
                                      int num_threads) {                                                              \
        silu_mul(gate_up, out, num_tokens, size, out_stride, num_threads);                                            \
    }                                                                                                                 \
    extern "C" void rope_kv_write_##SUFFIX(                                                                           \
        const T* q, const T* k, const T* v, int64_t q_stride, int64_t k_stride, int64_t v_stride,                     \
        int64_t turned_stride, const float* cos, const float* sin, T* turned, T* k_cache, T* v_cache,                 \
        const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,          \
        int64_t block_size, int num_threads) {                                                                        \
        const int64_t strides[] = {q_stride, k_stride, v_stride, turned_stride};                                      \
        rope_kv_write(q, k, v, strides, cos, sin, turned, k_cache, v_cache, slots, num_tokens, num_heads,             \
                      num_kv_heads, head_dim, block_size, num_threads);                                               \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bfloat16, bfloat16)
