// A decoder's layers in one call: the functions of elementwise.cpp, products.cpp and the attention in the order of
// workers/models/decoder.py, with their arguments, on buffers that the layers share. Latent attention is in the order of
// workers/models/layers/latent.py.
#include <cstdint>
#include <utility>

#include "norms.h"
#include "numbers.h"
#include "products.h"
#include "rounded.h"

#define OF_DTYPE(T, SUFFIX)                                                                                             \
    void add_norm_##SUFFIX(const T*, const T*, const void*, const float*, T*, T*, int64_t, int64_t, int64_t, float,     \
                           int, int);                                                                                   \
    void norm_##SUFFIX(const T*, const void*, const float*, T*, int64_t, int64_t, int64_t, int64_t, int64_t, float,     \
                       int, int);                                                                                       \
    void rope_kv_write_##SUFFIX(const T*, const T*, const T*, int64_t, int64_t, int64_t, int64_t, const float*,         \
                                const float*, T*, const paged::Cache*, const int64_t*, int64_t, int64_t, int64_t,       \
                                int64_t, int64_t, int);                                                                 \
    void silu_mul_##SUFFIX(const T*, T*, int64_t, int64_t, int64_t, int);                                               \
    void gelu_tanh_mul_##SUFFIX(const T*, T*, int64_t, int64_t, int64_t, int);                                          \
    void activate_##SUFFIX(const T*, T*, int64_t, int64_t, int64_t, int64_t, int, int);                                 \
    void latent_write_##SUFFIX(const T*, int64_t, int64_t, const T*, int64_t, const void*, float, const float*,         \
                               const float*, T*, T*, const int64_t*, int64_t, int64_t, int64_t, int64_t, int);          \
    void attend_latent_##SUFFIX(const T*, const T*, T*, const int64_t*, const int64_t*, const int32_t*, int64_t,        \
                                int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int);             \
    void head_products_##SUFFIX(const T*, const T*, T*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,  \
                                int64_t, int);                                                                          \
    void add_##SUFFIX(T*, const T*, int64_t, int);                                                                      \
    void scale_rows_##SUFFIX(T*, const float*, int64_t, int64_t, int64_t, int);                                         \
    void scale_##SUFFIX(T*, float, int64_t, int);

extern "C" {
OF_DTYPE(float, float32)
OF_DTYPE(bfloat16, bfloat16)
}
#undef OF_DTYPE

namespace {

template <typename T>
struct Functions;

#define OF_DTYPE(T, SUFFIX)                                              \
    template <>                                                          \
    struct Functions<T> {                                                \
        static constexpr auto add_norm = add_norm_##SUFFIX;              \
        static constexpr auto norm = norm_##SUFFIX;                      \
        static constexpr auto rope_kv_write = rope_kv_write_##SUFFIX;    \
        static constexpr auto silu_mul = silu_mul_##SUFFIX;              \
        static constexpr auto gelu_tanh_mul = gelu_tanh_mul_##SUFFIX;    \
        static constexpr auto activate = activate_##SUFFIX;              \
        static constexpr auto latent_write = latent_write_##SUFFIX;      \
        static constexpr auto attend_latent = attend_latent_##SUFFIX;    \
        static constexpr auto head_products = head_products_##SUFFIX;    \
        static constexpr auto add = add_##SUFFIX;                        \
        static constexpr auto scale_rows = scale_rows_##SUFFIX;          \
        static constexpr auto scale = scale_##SUFFIX;                    \
    };

OF_DTYPE(float, float32)
OF_DTYPE(bfloat16, bfloat16)

template <typename T>
using Attend = void(const T*, const paged::Cache*, T*, const int64_t*, const int64_t*, const int32_t*, const float*, int64_t,
                    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, int);

// Weight and bias, null where a model has none: `_NormWeights` in layers.py.
struct NormWeights {
    const void* weight;
    const float* bias;
};

// Of a layer with latent attention: `_LayerLatents` in latent_layers.py. `qkv` makes what queries are made of, and latents.
template <typename T>
struct Latents {
    Product query;                   // of compressed queries; without parts `qkv` makes them
    const T *query_norm, *norm;      // of compressed queries and of latents
    const T *keys, *values;          // [num_heads][nope_dim][rank] and [num_heads][rank][value_dim]
    int64_t query_rank, rank, rope_dim, nope_dim, value_dim;
    float eps;

    int64_t width() const { return rank + rope_dim; }
    int64_t query_dim() const { return nope_dim + rope_dim; }
};

// Of a layer: the fields of `_Layer` in layers.py. Weights of norms are null where a model has none.
template <typename T>
struct Layer {
    NormWeights attention_norm, attention_after, mlp_norm, mlp_after;
    const void *q_norm, *k_norm;
    const float* sinks;               // one more logit of each head's softmax, or null
    Product qkv, out, gate_up, down;  // without parts of `down`, `gate_up` is all of the feed-forward half
    paged::Cache cache;
    int64_t window;  // 0: none
    int64_t rope;    // which of the step's
    int64_t group;   // of the step's tables
    const Latents<T>* latents;  // null: the cache has keys and values
};

// Of a step: the fields of `_Step` in layers.py. A buffer's stride is in elements from row to row.
template <typename T>
struct Step {
    int64_t num_tokens, hidden_size, num_heads, num_kv_heads, head_dim, block_size;
    int64_t norm, activation, gated, parallel, heads_together;  // NormKind, Activation; the others are 0 or 1
    float eps, scale, softcap, residual;
    const float *const *cos, *const *sin;  // of each rope
    const int64_t* const* slots;           // of each group of layers, as tables and their strides
    const int32_t* const* tables;
    const int64_t *table_strides, *query_starts, *context_lens;
    const float* query_factors;  // of each token, or null
    int64_t num_rows;
    T *delta, *stream, *spare, *normed, *qkv, *q_normed, *k_normed, *turned, *attended, *wide, *inner, *second;
    T *queries, *of_latents;  // of latent attention, besides
    int64_t normed_stride, heads_stride, inner_stride, q_normed_stride;
    Attend<T>* attend;
    int (*sum_over_ranks)(int is_second);  // of `delta`, or `second`, in place; not 0: it failed. Null on one rank
    int64_t num_threads;
};

// A layer has two halves: behind the first its keys and values are in the cache. The stream changes its place in each.
template <typename T>
class Stack {
    using Of = Functions<T>;

  public:
    Stack(const Step<T>& step, bool in_spare)
        : step_(step), stream_(in_spare ? step.spare : step.stream), spare_(in_spare ? step.stream : step.spare) {}

    void write(const Layer<T>& layer) {
        add_norm(layer.attention_norm);
        multiply(layer.qkv, step_.normed, step_.normed_stride, step_.qkv, layer.qkv.num_outputs());
        if (layer.latents != nullptr) write_latents(layer, *layer.latents);
        else turn(layer, step_.qkv, step_.qkv + step_.num_heads * step_.head_dim);
    }

    // Whether all ranks' sums were made.
    bool finish(const Layer<T>& layer) {
        if (layer.latents != nullptr) attend_latents(layer, *layer.latents);
        else attend(layer);
        multiply(layer.out, step_.attended, step_.heads_stride, step_.delta, step_.hidden_size);
        if (!sum_over_ranks(0)) return false;
        if (step_.parallel) {
            feed_forward(layer, step_.second);
            if (!sum_over_ranks(1)) return false;
            Of::add(step_.delta, step_.second, step_.num_tokens * step_.hidden_size, num_threads());
        } else {
            end_half(layer.attention_after);
            add_norm(layer.mlp_norm);
            feed_forward(layer, step_.delta);
            if (!sum_over_ranks(0)) return false;
        }
        end_half(layer.mlp_after);
        return true;
    }

  private:
    bool sum_over_ranks(int is_second) const {
        return step_.sum_over_ranks == nullptr || step_.sum_over_ranks(is_second) == 0;
    }

    // Halves in parallel have one norm for two halves: there the stream stays where it is.
    void add_norm(const NormWeights& by) {
        const NormKind kind = by.weight == nullptr ? NormKind::none : NormKind(step_.norm);
        T* sum = step_.parallel ? stream_ : spare_;
        Of::add_norm(step_.delta, stream_, by.weight, by.bias, step_.normed, sum, step_.num_tokens, step_.hidden_size,
                     step_.normed_stride, step_.eps, int(kind), num_threads());
        if (!step_.parallel) std::swap(stream_, spare_);
    }

    void feed_forward(const Layer<T>& layer, T* out) {
        if (layer.down.num_parts == 0)
            return multiply(layer.gate_up, step_.normed, step_.normed_stride, out, step_.hidden_size);
        if (step_.gated) gate(layer.gate_up);
        else activate(layer.gate_up);
        multiply(layer.down, step_.inner, step_.inner_stride, out, step_.hidden_size);
    }

    void end_half(const NormWeights& after) {
        const int64_t size = step_.hidden_size;
        if (after.weight != nullptr)
            Of::norm(step_.delta, after.weight, after.bias, step_.delta, step_.num_tokens, size, size, 1, size, step_.eps,
                     int(step_.norm), num_threads());
        if (step_.residual != 1.0f) Of::scale(step_.delta, step_.residual, step_.num_tokens * size, num_threads());
    }

    void turn(const Layer<T>& layer, const T* q, const T* k) {
        const int64_t size = step_.head_dim, stride = layer.qkv.num_outputs();
        const T* v = k + step_.num_kv_heads * size;
        int64_t q_stride = stride, k_stride = stride;
        if (layer.q_norm != nullptr) {
            norm_heads(q, layer.q_norm, step_.q_normed, stride, step_.num_heads);
            norm_heads(k, layer.k_norm, step_.k_normed, stride, step_.num_kv_heads);
            q = step_.q_normed, q_stride = step_.num_heads * size;
            k = step_.k_normed, k_stride = step_.num_kv_heads * size;
        }
        if (step_.query_factors != nullptr)  // in place: `q` is a buffer of the step
            Of::scale_rows(const_cast<T*>(q), step_.query_factors, step_.num_tokens, step_.num_heads * size, q_stride,
                           num_threads());
        Of::rope_kv_write(q, k, v, q_stride, k_stride, stride, step_.heads_stride, step_.cos[layer.rope],
                               step_.sin[layer.rope], step_.turned, &layer.cache,
                               step_.slots[layer.group], step_.num_tokens, step_.num_heads,
                               step_.num_kv_heads, size, step_.block_size, num_threads());
    }

    void norm_heads(const T* x, const void* weight, T* out, int64_t stride, int64_t num_heads) {
        const int64_t parts = step_.heads_together ? 1 : num_heads, size = num_heads / parts * step_.head_dim;
        Of::norm(x, weight, nullptr, out, step_.num_tokens, stride, parts * size, parts, size, step_.eps,
                 int(step_.norm), num_threads());
    }

    void attend(const Layer<T>& layer) {
        step_.attend(
            step_.turned, &layer.cache, step_.attended, step_.query_starts, step_.context_lens,
            step_.tables[layer.group], layer.sinks, step_.table_strides[layer.group], step_.num_rows, step_.num_heads,
            step_.num_kv_heads, step_.head_dim, step_.block_size, layer.window, step_.heads_stride, step_.scale,
            step_.softcap, num_threads());
    }

    void gate(const Product& by) {
        const int64_t width = by.num_outputs() / 2;
        if (by.gated()) return multiply(by, step_.normed, step_.normed_stride, step_.inner, step_.inner_stride);
        multiply(by, step_.normed, step_.normed_stride, step_.wide, 2 * width);
        const auto gated = Activation(step_.activation) == Activation::gelu_tanh ? Of::gelu_tanh_mul : Of::silu_mul;
        gated(step_.wide, step_.inner, step_.num_tokens, width, step_.inner_stride, num_threads());
    }

    void activate(const Product& by) {
        multiply(by, step_.normed, step_.normed_stride, step_.inner, step_.inner_stride);
        Of::activate(step_.inner, step_.inner, step_.num_tokens, by.num_outputs(), step_.inner_stride, step_.inner_stride,
                     int(step_.activation), num_threads());
    }

    // Queries of latents are [num_tokens][num_heads][width], in `turned`.
    void write_latents(const Layer<T>& layer, const Latents<T>& by) {
        const int64_t stride = layer.qkv.num_outputs(), heads = step_.num_heads, first = stride - by.width();
        const T* queries = step_.qkv;
        int64_t q_stride = stride;
        if (by.query.num_parts > 0) {
            Of::norm(step_.qkv, by.query_norm, nullptr, step_.q_normed, step_.num_tokens, stride, step_.q_normed_stride, 1,
                     by.query_rank, by.eps, int(NormKind::rounded), num_threads());
            multiply(by.query, step_.q_normed, step_.q_normed_stride, step_.queries, heads * by.query_dim());
            queries = step_.queries, q_stride = heads * by.query_dim();
        }
        Of::head_products(queries, by.keys, step_.turned, step_.num_tokens, heads, by.nope_dim, by.rank, q_stride,
                          by.query_dim(), heads * by.width(), by.width(), num_threads());
        Of::latent_write(queries + by.nope_dim, q_stride, by.query_dim(), step_.qkv + first, stride, by.norm, by.eps,
                         step_.cos[layer.rope], step_.sin[layer.rope], step_.turned, static_cast<T*>(layer.cache.keys),
                         step_.slots[layer.group], step_.num_tokens, heads, by.rank, by.rope_dim / 2, num_threads());
    }

    void attend_latents(const Layer<T>& layer, const Latents<T>& by) {
        const int64_t heads = step_.num_heads;
        Of::attend_latent(step_.turned, static_cast<const T*>(layer.cache.keys), step_.of_latents, step_.query_starts,
                          step_.context_lens, step_.tables[layer.group], step_.table_strides[layer.group],
                          step_.num_rows, heads, by.width(), by.rank, step_.block_size, heads * by.width(),
                          heads * by.rank, step_.scale, num_threads());
        Of::head_products(step_.of_latents, by.values, step_.attended, step_.num_tokens, heads, by.rank, by.value_dim,
                          heads * by.rank, by.rank, step_.heads_stride, by.value_dim, num_threads());
    }

    void multiply(const Product& by, const T* x, int64_t x_stride, T* out, int64_t out_stride) {
        for (int64_t i = 0; i < by.num_parts; i++) {
            const Part& part = by.parts[i];
            part.multiply(&part, x, out, step_.num_tokens, x_stride, out_stride, num_threads());
            out += part.num_outputs;
        }
    }

    int num_threads() const { return int(step_.num_threads); }

    const Step<T>& step_;
    T *stream_, *spare_;
};

}  // namespace

// Halves [first, last) of layers, two to each, on `delta` and `stream` of the step. Ends where a sum over ranks fails.
#define FOR_DTYPE(T, SUFFIX)                                                                                            \
    extern "C" void run_layers_##SUFFIX(const Layer<T>* layers, int64_t first, int64_t last, const Step<T>* step) {     \
        Stack<T> stack(*step, !step->parallel && first % 2 == 1);                                                   \
        for (int64_t half = first; half < last; half++)                                                                 \
            if (half % 2 == 0) stack.write(layers[half / 2]);                                                           \
            else if (!stack.finish(layers[half / 2])) return;                                                           \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bfloat16, bfloat16)
