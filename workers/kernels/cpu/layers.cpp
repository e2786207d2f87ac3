// A decoder's layers in one call: the functions of elementwise.cpp, products.cpp and the attention in the order of
// workers/models/decoder.py, with their arguments, on buffers that the layers share.
#include <cstdint>
#include <utility>

#include "numbers.h"
#include "products.h"

#define OF_DTYPE(T, SUFFIX)                                                                                             \
    void add_rms_norm_##SUFFIX(const T*, const T*, const T*, T*, T*, int64_t, int64_t, int64_t, float, int);            \
    void rms_norm_##SUFFIX(const T*, const T*, T*, int64_t, int64_t, int64_t, int64_t, float, int);                     \
    void rope_kv_write_##SUFFIX(const T*, const T*, const T*, int64_t, int64_t, int64_t, int64_t, const float*,         \
                                const float*, T*, T*, T*, const int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t, \
                                int);                                                                                   \
    void silu_mul_##SUFFIX(const T*, T*, int64_t, int64_t, int64_t, int);

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
        static constexpr auto add_rms_norm = add_rms_norm_##SUFFIX;      \
        static constexpr auto rms_norm = rms_norm_##SUFFIX;              \
        static constexpr auto rope_kv_write = rope_kv_write_##SUFFIX;    \
        static constexpr auto silu_mul = silu_mul_##SUFFIX;              \
    };

OF_DTYPE(float, float32)
OF_DTYPE(bfloat16, bfloat16)

template <typename T>
using Attend = void(const T*, const T*, const T*, T*, const int64_t*, const int64_t*, const int32_t*, const float*, int64_t,
                    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, int);

// Of a layer: the fields of `_Layer` in layers.py. Norms of heads are null where a model has none.
template <typename T>
struct Layer {
    const T *attention_norm, *q_norm, *k_norm, *mlp_norm;
    Product qkv, out, gate_up, down;  // without parts of `down`, `gate_up` is all of the feed-forward half
    T *k_cache, *v_cache;
    int64_t window;  // 0: none
};

// Of a step: the fields of `_Step` in layers.py. A buffer's stride is in elements from row to row.
template <typename T>
struct Step {
    int64_t num_tokens, hidden_size, num_heads, num_kv_heads, head_dim, block_size;
    float eps, scale;
    const float *cos, *sin;
    const int64_t *slots, *query_starts, *context_lens;
    const int32_t* tables;
    int64_t table_stride, num_rows;
    T *delta, *stream, *spare, *normed, *qkv, *q_normed, *k_normed, *turned, *attended, *wide, *inner;
    int64_t normed_stride, heads_stride, inner_stride;
    Attend<T>* attend;
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
        norm(layer.attention_norm);
        multiply(layer.qkv, step_.normed, step_.normed_stride, step_.qkv, layer.qkv.num_outputs());
        turn(layer, step_.qkv, step_.qkv + step_.num_heads * step_.head_dim);
    }

    void finish(const Layer<T>& layer) {
        const int64_t inner = step_.inner_stride;
        attend(layer);
        multiply(layer.out, step_.attended, step_.heads_stride, step_.delta, step_.hidden_size);
        norm(layer.mlp_norm);
        if (layer.down.num_parts == 0)
            return multiply(layer.gate_up, step_.normed, step_.normed_stride, step_.delta, step_.hidden_size);
        gate(layer.gate_up);
        multiply(layer.down, step_.inner, inner, step_.delta, step_.hidden_size);
    }

  private:
    void norm(const T* weight) {
        Of::add_rms_norm(step_.delta, stream_, weight, step_.normed, spare_, step_.num_tokens, step_.hidden_size,
                              step_.normed_stride, step_.eps, num_threads());
        std::swap(stream_, spare_);
    }

    void turn(const Layer<T>& layer, const T* q, const T* k) {
        const int64_t size = step_.head_dim, stride = layer.qkv.num_outputs();
        const T* v = k + step_.num_kv_heads * size;
        int64_t q_stride = stride, k_stride = stride;
        if (layer.q_norm != nullptr) {
            Of::rms_norm(q, layer.q_norm, step_.q_normed, step_.num_tokens, stride, step_.num_heads, size, step_.eps,
                              num_threads());
            Of::rms_norm(k, layer.k_norm, step_.k_normed, step_.num_tokens, stride, step_.num_kv_heads, size,
                              step_.eps, num_threads());
            q = step_.q_normed, q_stride = step_.num_heads * size;
            k = step_.k_normed, k_stride = step_.num_kv_heads * size;
        }
        Of::rope_kv_write(q, k, v, q_stride, k_stride, stride, step_.heads_stride, step_.cos, step_.sin, step_.turned,
                               layer.k_cache, layer.v_cache, step_.slots, step_.num_tokens, step_.num_heads,
                               step_.num_kv_heads, size, step_.block_size, num_threads());
    }

    void attend(const Layer<T>& layer) {
        step_.attend(
            step_.turned, layer.k_cache, layer.v_cache, step_.attended, step_.query_starts, step_.context_lens,
            step_.tables, nullptr, step_.table_stride, step_.num_rows, step_.num_heads, step_.num_kv_heads, step_.head_dim,
            step_.block_size, layer.window, step_.heads_stride, step_.scale, 0.0f, num_threads());
    }

    void gate(const Product& by) {
        const int64_t width = by.num_outputs() / 2;
        if (by.gated()) return multiply(by, step_.normed, step_.normed_stride, step_.inner, step_.inner_stride);
        multiply(by, step_.normed, step_.normed_stride, step_.wide, 2 * width);
        Of::silu_mul(step_.wide, step_.inner, step_.num_tokens, width, step_.inner_stride, num_threads());
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

// Halves [first, last) of layers, two to each, on `delta` and `stream` of the step.
#define FOR_DTYPE(T, SUFFIX)                                                                                            \
    extern "C" void run_layers_##SUFFIX(const Layer<T>* layers, int64_t first, int64_t last, const Step<T>* step) {     \
        Stack<T> stack(*step, first % 2 == 1);                                                                          \
        for (int64_t half = first; half < last; half++)                                                                 \
            if (half % 2 == 0) stack.write(layers[half / 2]);                                                           \
            else stack.finish(layers[half / 2]);                                                                        \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bfloat16, bfloat16)
