// The operations between the matrix products, each in one pass over its tensors. The twins in reference.py define the
// results and their rounding. T is the dtype of all tensors but cos and sin. Sizes and strides count elements.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "norms.h"
#include "numbers.h"
#include "rounded.h"
#include "threads.h"

namespace {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t worth_a_thread = 1 << 15;

int threads_for(int64_t total, int num_threads) { return total > worth_a_thread ? num_threads : 1; }

// `x` may be `out`.
template <typename T>
void normalize(const T* x, const Norm& norm, T* out, int64_t size) {
    if (norm.kind == NormKind::none) {
        std::memcpy(out, x, size * sizeof(T));
        return;
    }
    float mean = 0.0f, sum = 0.0f;
    if (norm.kind == NormKind::centred) {
#pragma omp simd reduction(+ : mean)
        for (int64_t i = 0; i < size; i++) mean += widen(x[i]);
        mean /= float(size);
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += (widen(x[i]) - mean) * (widen(x[i]) - mean);
    const float factor = 1.0f / std::sqrt(sum / float(size) + norm.eps);
    if (norm.kind == NormKind::rounded) {
        const T* weight = static_cast<const T*>(norm.weight);
#pragma omp simd
        for (int64_t i = 0; i < size; i++)
            out[i] = narrow<T>(widen(weight[i]) * widen(narrow<T>(widen(x[i]) * factor)));
        return;
    }
    const float* weight = static_cast<const float*>(norm.weight);
    if (norm.bias == nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[i] = narrow<T>(weight[i] * ((widen(x[i]) - mean) * factor));
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        out[i] = narrow<T>(weight[i] * ((widen(x[i]) - mean) * factor) + norm.bias[i]);
}

template <typename T>
void normalize_heads(const T* x, const Norm& norm, T* out, int64_t num_tokens, int64_t token_stride, int64_t out_stride,
                     int64_t num_heads, int64_t size, int num_threads) {
    threads::each(num_tokens, threads_for(num_tokens * num_heads * size, num_threads), [&](int64_t token) {
        for (int64_t head = 0; head < num_heads; head++)
            normalize(x + token * token_stride + head * size, norm, out + token * out_stride + head * size, size);
    });
}

template <typename T>
void add_normalize(const T* x, const T* residual, const Norm& norm, T* normed, T* stream, int64_t num_tokens,
                   int64_t size, int64_t normed_stride, int num_threads) {
    threads::each(num_tokens, threads_for(num_tokens * size, num_threads), [&](int64_t token) {
        const int64_t start = token * size;
#pragma omp simd
        for (int64_t i = start; i < start + size; i++) stream[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
        normalize(stream + start, norm, normed + token * normed_stride, size);
    });
}

struct Silu {
    float operator()(float x) const { return x / (1.0f + power_of_two(-x * log2e)); }
};

// (1 + tanh(u)) / 2 is 1 / (1 + e^(-2u)).
struct GeluTanh {
    float operator()(float x) const {
        const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        return x / (1.0f + power_of_two(-2.0f * log2e * u));
    }
};

template <typename T, typename Activate>
void gate(const T* gate_up, T* out, int64_t num_tokens, int64_t size, int64_t out_stride, int num_threads,
          Activate activate) {
    threads::each(num_tokens, threads_for(num_tokens * size, num_threads), [&](int64_t token) {
        const T* from = gate_up + token * 2 * size;
        const T* up = from + size;
        T* to = out + token * out_stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++)
            to[i] = narrow<T>(widen(narrow<T>(activate(widen(from[i])))) * widen(up[i]));
    });
}

struct Relu2 {
    float operator()(float x) const { return x > 0.0f || x != x ? x * x : 0.0f; }
};

// `x` may be `out`, if the strides are the same.
template <typename T, typename Activate>
void activate(const T* x, T* out, int64_t num_tokens, int64_t size, int64_t x_stride, int64_t out_stride, int num_threads,
              Activate activate) {
    threads::each(num_tokens, threads_for(num_tokens * size, num_threads), [&](int64_t token) {
        const T* from = x + token * x_stride;
        T* to = out + token * out_stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = narrow<T>(activate(widen(from[i])));
    });
}

template <typename Body>
void for_all(int64_t count, int num_threads, Body body) {
    constexpr int64_t at_once = 4096;
    threads::each((count + at_once - 1) / at_once, threads_for(count, num_threads), [&](int64_t part) {
        const int64_t end = std::min(count, (part + 1) * at_once);
#pragma omp simd
        for (int64_t i = part * at_once; i < end; i++) body(i);
    });
}

template <typename T>
void add(T* x, const T* y, int64_t count, int num_threads) {
    for_all(count, num_threads, [=](int64_t i) { x[i] = narrow<T>(widen(x[i]) + widen(y[i])); });
}

template <typename T>
void scale(T* x, float factor, int64_t count, int num_threads) {
    for_all(count, num_threads, [=](int64_t i) { x[i] = narrow<T>(widen(x[i]) * factor); });
}

template <typename T>
void scale_rows(T* x, const float* factors, int64_t num_tokens, int64_t size, int64_t stride, int num_threads) {
    threads::each(num_tokens, threads_for(num_tokens * size, num_threads), [&](int64_t token) {
        T* row = x + token * stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) row[i] = narrow<T>(widen(row[i]) * factors[token]);
    });
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

// A token's keys and values in their place of the cache: as they are, or in 8 bits. `spare` has room for two heads.
template <typename T>
void write_heads(const T* k, const T* v, const float* cos, const float* sin, const paged::Cache& cache, int64_t place,
                 int64_t, int64_t size, float*) {
    turn(k, cos, sin, static_cast<T*>(cache.keys) + place * size, size / 2);
    std::memcpy(static_cast<T*>(cache.values) + place * size, v, size * sizeof(T));
}

template <typename T, typename E>
void round_heads(const T* k, const T* v, const float* cos, const float* sin, const paged::Cache& cache, int64_t place,
                 int64_t scale, int64_t size, float* spare) {
    T* turned = reinterpret_cast<T*>(spare + size);
    turn(k, cos, sin, turned, size / 2);
    for (int64_t i = 0; i < size; i++) spare[i] = widen(turned[i]);
    rounded::write(spare, static_cast<E*>(cache.keys) + place * size, cache.k_scales + scale, size);
    for (int64_t i = 0; i < size; i++) spare[i] = widen(v[i]);
    rounded::write(spare, static_cast<E*>(cache.values) + place * size, cache.v_scales + scale, size);
}

template <typename T>
void rope_kv_write(const T* q, const T* k, const T* v, const int64_t* strides, const float* cos, const float* sin,
                   T* turned, const paged::Cache& cache, const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                   int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int num_threads) {
    const auto write = cache.kind == paged::int8 ? round_heads<T, Int8>
                       : cache.kind == paged::e4m3 ? round_heads<T, E4m3>
                                                   : write_heads<T>;
    int64_t total = num_tokens * (num_heads + 2 * num_kv_heads) * head_dim;
    threads::share(num_tokens, threads_for(total, num_threads), [&](threads::Pieces& pieces) {
        std::vector<float> spare(cache.kind == paged::as_queries ? 0 : 2 * head_dim);
        for (int64_t token; (token = pieces.take()) >= 0;) {
            const int64_t num_pairs = head_dim / 2;
            const float *cos_here = cos + token * num_pairs, *sin_here = sin + token * num_pairs;
            for (int64_t head = 0; head < num_heads; head++)
                turn(q + token * strides[0] + head * head_dim, cos_here, sin_here,
                     turned + token * strides[3] + head * head_dim, num_pairs);
            const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
            for (int64_t head = 0; head < num_kv_heads; head++) {
                const int64_t place = (block * num_kv_heads + head) * block_size + offset;
                write(k + token * strides[1] + head * head_dim, v + token * strides[2] + head * head_dim, cos_here, sin_here,
                      cache, place, cache.kind == paged::int8 ? place : head, head_dim, spare.data());
            }
        }
    });
}

// A token's latent, of which the first `rank` numbers are normed and the others turn, in its place of the cache; and the
// part of each head's query that turns, at its place behind `rank` numbers of `queries`.
template <typename T>
void latent_write(const T* q, int64_t q_stride, int64_t head_stride, const T* latents, int64_t latent_stride,
                  const Norm& norm, const float* cos, const float* sin, T* queries, T* cache, const int64_t* slots,
                  int64_t num_tokens, int64_t num_heads, int64_t rank, int64_t num_pairs, int num_threads) {
    const int64_t width = rank + 2 * num_pairs, total = num_tokens * (width + num_heads * num_pairs);
    threads::each(num_tokens, threads_for(total, num_threads), [&](int64_t token) {
        const float *cos_here = cos + token * num_pairs, *sin_here = sin + token * num_pairs;
        const T* latent = latents + token * latent_stride;
        T* place = cache + slots[token] * width;
        normalize(latent, norm, place, rank);
        turn(latent + rank, cos_here, sin_here, place + rank, num_pairs);
        for (int64_t head = 0; head < num_heads; head++)
            turn(q + token * q_stride + head * head_stride, cos_here, sin_here,
                 queries + (token * num_heads + head) * width + rank, num_pairs);
    });
}

}  // namespace

#define FOR_DTYPE(T, SUFFIX)                                                                                          \
    extern "C" void norm_##SUFFIX(const T* x, const void* weight, const float* bias, T* out, int64_t num_tokens,      \
                                  int64_t token_stride, int64_t out_stride, int64_t num_heads, int64_t size,          \
                                  float eps, int kind, int num_threads) {                                             \
        const Norm norm{weight, bias, eps, NormKind(kind)};                                                           \
        normalize_heads(x, norm, out, num_tokens, token_stride, out_stride, num_heads, size, num_threads);            \
    }                                                                                                                 \
    extern "C" void add_norm_##SUFFIX(const T* x, const T* residual, const void* weight, const float* bias,           \
                                      T* normed, T* stream, int64_t num_tokens, int64_t size, int64_t normed_stride,  \
                                      float eps, int kind, int num_threads) {                                         \
        const Norm norm{weight, bias, eps, NormKind(kind)};                                                           \
        add_normalize(x, residual, norm, normed, stream, num_tokens, size, normed_stride, num_threads);               \
    }                                                                                                                 \
    extern "C" void silu_mul_##SUFFIX(const T* gate_up, T* out, int64_t num_tokens, int64_t size, int64_t out_stride, \
                                      int num_threads) {                                                              \
        gate(gate_up, out, num_tokens, size, out_stride, num_threads, Silu{});                                        \
    }                                                                                                                 \
    extern "C" void gelu_tanh_mul_##SUFFIX(const T* gate_up, T* out, int64_t num_tokens, int64_t size,                \
                                           int64_t out_stride, int num_threads) {                                     \
        gate(gate_up, out, num_tokens, size, out_stride, num_threads, GeluTanh{});                                    \
    }                                                                                                                 \
    extern "C" void activate_##SUFFIX(const T* x, T* out, int64_t num_tokens, int64_t size, int64_t x_stride,         \
                                      int64_t out_stride, int kind, int num_threads) {                                \
        const auto by = [&](auto function) {                                                                          \
            activate(x, out, num_tokens, size, x_stride, out_stride, num_threads, function);                          \
        };                                                                                                            \
        if (Activation(kind) == Activation::gelu_tanh) by(GeluTanh{});                                                \
        else if (Activation(kind) == Activation::relu2) by(Relu2{});                                                  \
        else by(Silu{});                                                                                              \
    }                                                                                                                 \
    extern "C" void latent_write_##SUFFIX(                                                                            \
        const T* q, int64_t q_stride, int64_t head_stride, const T* latents, int64_t latent_stride,                   \
        const void* weight, float eps, const float* cos, const float* sin, T* queries, T* cache,                      \
        const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t rank, int64_t num_pairs,                 \
        int num_threads) {                                                                                            \
        const Norm norm{weight, nullptr, eps, NormKind::rounded};                                                     \
        latent_write(q, q_stride, head_stride, latents, latent_stride, norm, cos, sin, queries, cache, slots,         \
                     num_tokens, num_heads, rank, num_pairs, num_threads);                                            \
    }                                                                                                                 \
    extern "C" void add_##SUFFIX(T* x, const T* y, int64_t count, int num_threads) { add(x, y, count, num_threads); } \
    extern "C" void scale_##SUFFIX(T* x, float factor, int64_t count, int num_threads) {                              \
        scale(x, factor, count, num_threads);                                                                         \
    }                                                                                                                 \
    extern "C" void scale_rows_##SUFFIX(T* x, const float* factors, int64_t num_tokens, int64_t size, int64_t stride, \
                                        int num_threads) {                                                            \
        scale_rows(x, factors, num_tokens, size, stride, num_threads);                                                \
    }                                                                                                                 \
    extern "C" void rope_kv_write_##SUFFIX(                                                                           \
        const T* q, const T* k, const T* v, int64_t q_stride, int64_t k_stride, int64_t v_stride,                     \
        int64_t turned_stride, const float* cos, const float* sin, T* turned, const paged::Cache* cache,              \
        const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,          \
        int64_t block_size, int num_threads) {                                                                        \
        const int64_t strides[] = {q_stride, k_stride, v_stride, turned_stride};                                      \
        rope_kv_write(q, k, v, strides, cos, sin, turned, *cache, slots, num_tokens, num_heads, num_kv_heads,         \
                      head_dim, block_size, num_threads);                                                             \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bfloat16, bfloat16)
