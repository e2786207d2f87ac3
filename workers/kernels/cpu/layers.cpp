// A decoder's layers in one call: the functions of elementwise.cpp, products.cpp and the attention in the order of
// workers/models/decoder.py, with their arguments, on buffers that the layers share.
#include <cstdint>
#include <utility>

#include "numbers.h"

extern "C" {
void add_rms_norm_bfloat16(const bfloat16*, const bfloat16*, const bfloat16*, bfloat16*, bfloat16*, int64_t, int64_t,
                           int64_t, float, int);
void rms_norm_bfloat16(const bfloat16*, const bfloat16*, bfloat16*, int64_t, int64_t, int64_t, int64_t, float, int);
void rope_kv_write_bfloat16(const bfloat16*, const bfloat16*, const bfloat16*, int64_t, int64_t, int64_t, int64_t,
                            const float*, const float*, bfloat16*, bfloat16*, bfloat16*, const int64_t*, int64_t,
                            int64_t, int64_t, int64_t, int64_t, int);
using Attend = void(const bfloat16*, const bfloat16*, const bfloat16*, bfloat16*, const int64_t*, const int64_t*,
                    const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int);
Attend attend_bfloat16, attend_tiles;
void product(const bfloat16*, const bfloat16*, const float*, bfloat16*, int64_t, int64_t, int64_t, int64_t, int64_t,
             int, int);
}

namespace {

struct Product {
    const bfloat16* packed;
    const float* bias;  // or null
    int64_t num_outputs, num_inputs;
};

// Of a layer: the fields of `_Layer` in layers.py. Norms of heads are null where a model has none.
struct Layer {
    const bfloat16 *attention_norm, *q_norm, *k_norm, *mlp_norm;
    Product qkv, out, gate_up, down;
    bfloat16 *k_cache, *v_cache;
    int64_t window;  // 0: none
};

// Of a step: the fields of `_Step` in layers.py. A buffer's stride is in elements from row to row.
struct Step {
    int64_t num_tokens, hidden_size, num_heads, num_kv_heads, head_dim, block_size;
    float eps, scale;
    const float *cos, *sin;
    const int64_t *slots, *query_starts, *context_lens;
    const int32_t* tables;
    int64_t table_stride, num_rows;
    bfloat16 *delta, *stream, *spare, *normed, *qkv, *q_normed, *k_normed, *turned, *attended, *inner;
    int64_t normed_stride, heads_stride, inner_stride;
    int64_t has_tiled_attention, num_threads;
};

// A layer has two halves: behind the first its keys and values are in the cache. The stream changes its place in each.
class Stack {
  public:
    Stack(const Step& step, bool in_spare)
        : step_(step), stream_(in_spare ? step.spare : step.stream), spare_(in_spare ? step.stream : step.spare) {}

    void write(const Layer& layer) {
        norm(layer.attention_norm);
        multiply(layer.qkv, step_.normed, step_.normed_stride, step_.qkv, layer.qkv.num_outputs);
        turn(layer, step_.qkv, step_.qkv + step_.num_heads * step_.head_dim);
    }

    void finish(const Layer& layer) {
        const int64_t inner = step_.inner_stride;
        attend(layer);
        multiply(layer.out, step_.attended, step_.heads_stride, step_.delta, step_.hidden_size);
        norm(layer.mlp_norm);
        multiply(layer.gate_up, step_.normed, step_.normed_stride, step_.inner, inner, true);
        multiply(layer.down, step_.inner, inner, step_.delta, step_.hidden_size);
    }

  private:
    void norm(const bfloat16* weight) {
        add_rms_norm_bfloat16(step_.delta, stream_, weight, step_.normed, spare_, step_.num_tokens, step_.hidden_size,
                              step_.normed_stride, step_.eps, num_threads());
        std::swap(stream_, spare_);
    }

    void turn(const Layer& layer, const bfloat16* q, const bfloat16* k) {
        const int64_t size = step_.head_dim, stride = layer.qkv.num_outputs;
        const bfloat16* v = k + step_.num_kv_heads * size;
        int64_t q_stride = stride, k_stride = stride;
        if (layer.q_norm != nullptr) {
            rms_norm_bfloat16(q, layer.q_norm, step_.q_normed, step_.num_tokens, stride, step_.num_heads, size, step_.eps,
                              num_threads());
            rms_norm_bfloat16(k, layer.k_norm, step_.k_normed, step_.num_tokens, stride, step_.num_kv_heads, size,
                              step_.eps, num_threads());
            q = step_.q_normed, q_stride = step_.num_heads * size;
            k = step_.k_normed, k_stride = step_.num_kv_heads * size;
        }
        rope_kv_write_bfloat16(q, k, v, q_stride, k_stride, stride, step_.heads_stride, step_.cos, step_.sin, step_.turned,
                               layer.k_cache, layer.v_cache, step_.slots, step_.num_tokens, step_.num_heads,
                               step_.num_kv_heads, size, step_.block_size, num_threads());
    }

    void attend(const Layer& layer) {
        (step_.has_tiled_attention ? attend_tiles : attend_bfloat16)(
            step_.turned, layer.k_cache, layer.v_cache, step_.attended, step_.query_starts, step_.context_lens,
            step_.tables, step_.table_stride, step_.num_rows, step_.num_heads, step_.num_kv_heads, step_.head_dim,
            step_.block_size, layer.window, step_.heads_stride, step_.scale, num_threads());
    }

    void multiply(const Product& by, const bfloat16* x, int64_t x_stride, bfloat16* out, int64_t out_stride,
                  bool gated = false) {
        product(x, by.packed, by.bias, out, step_.num_tokens, by.num_outputs, by.num_inputs, x_stride, out_stride, gated,
                num_threads());
    }

    int num_threads() const { return int(step_.num_threads); }

    const Step& step_;
    bfloat16 *stream_, *spare_;
};

}  // namespace

// Halves [first, last) of layers, two to each, on `delta` and `stream` of the step.
extern "C" void run_layers(const Layer* layers, int64_t first, int64_t last, const Step* step) {
    Stack stack(*step, first % 2 == 1);
    for (int64_t half = first; half < last; half++)
        if (half % 2 == 0) stack.write(layers[half / 2]);
        else stack.finish(layers[half / 2]);
}
