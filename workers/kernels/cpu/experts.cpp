// A mixture of experts as one product of the one-call step (products.h): the function of a part whose `packed` is a table of
// the experts' own products.
//
//     x ── router ──▶ a token's slots ── sorted by expert ──▶ for each expert that has rows: gather, gate and up, down
//       ── sum over a token's slots, in their order, in float32; then the shared expert ──▶ out
//
// Each product gives a row the same bits in every batch, and so does the sum. An expert without rows is not read.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "numbers.h"
#include "products.h"
#include "routing.h"
#include "scratch.h"
#include "threads.h"

#define OF_DTYPE(T, SUFFIX)                                                                                      \
    extern "C" void silu_mul_##SUFFIX(const T*, T*, int64_t, int64_t, int64_t, int);                             \
    inline void silu_mul(const T* x, T* out, int64_t rows, int64_t width, int64_t stride, int num_threads) {     \
        silu_mul_##SUFFIX(x, out, rows, width, stride, num_threads);                                             \
    }

OF_DTYPE(float, float32)
OF_DTYPE(bfloat16, bfloat16)
#undef OF_DTYPE

namespace {

// down(gate(x) * up(x)), or nothing where another rank has the expert.
struct Expert {
    Product gate_up, down;
};

// `_Experts` in experts.py.
struct Experts {
    const Part* router;  // on rows of float32, with float32 outputs: the experts', then the shared expert's gate
    const Expert* experts;
    Expert shared;
    routing::Rule rule;
    int64_t hidden_size, width, shared_width, depth, shared_gated, is_clamped;
    float alpha, limit;
    int64_t* counts;  // tokens that each expert has had so far
};

constexpr int64_t worth_a_thread = 1 << 16;  // elements

// A stride of rows that are read a column at a time: as `apart` in memory.py.
template <typename T>
int64_t stride_of(int64_t width) {
    return width * int64_t(sizeof(T)) % 1024 ? width : width + 64 / int64_t(sizeof(T));
}

int64_t depth_of(const Product& by) {
    int64_t depth = 0;
    for (int64_t i = 0; i < by.num_parts; i++) depth = std::max(depth, by.parts[i].num_inputs);
    return depth;
}

template <typename T>
struct Rows {
    T* data;
    int64_t stride;

    T* at(int64_t row) const { return data + row * stride; }
};

template <typename T>
class Mixture {
  public:
    Mixture(const Experts& by, const T* x, int64_t x_stride, T* out, int64_t out_stride, int64_t num_rows, int num_threads)
        : by_(by), x_{const_cast<T*>(x), x_stride}, out_{out, out_stride}, num_rows_(num_rows), num_threads_(num_threads) {}

    void compute() {
        if (num_rows_ == 0) return;
        choose();
        sort();
        static thread_local Scratch<T> made, of_shared;
        made_ = {made.at_least(num_rows_ * by_.rule.num_chosen * by_.hidden_size), by_.hidden_size};
        for (int64_t expert = 0; expert < by_.rule.num_experts; expert++) pass(expert);
        if (by_.shared_width > 0) {
            shared_ = {of_shared.at_least(num_rows_ * by_.hidden_size), by_.hidden_size};
            feed(by_.shared, x_, num_rows_, by_.shared_width, shared_.data, false);
        }
        add_up();
    }

  private:
    int64_t num_slots() const { return by_.rule.num_chosen; }
    int threads_for(int64_t rows) const { return rows * by_.hidden_size > worth_a_thread ? num_threads_ : 1; }

    void choose() {
        static thread_local Scratch<float> logits, widened, weights, room;
        static thread_local Scratch<int32_t> chosen;
        const routing::Rule& rule = by_.rule;
        const int64_t width = rule.num_experts + by_.shared_gated, per_token = 2 * rule.num_experts + rule.num_groups;
        logits_ = {logits.at_least(num_rows_ * width), width};
        weights_ = weights.at_least(num_rows_ * num_slots());
        chosen_ = chosen.at_least(num_rows_ * num_slots());
        if constexpr (std::is_same_v<T, float>) {
            by_.router->multiply(by_.router, x_.data, logits_.data, num_rows_, x_.stride, width, num_threads_);
        } else {
            const int64_t depth = by_.router->num_inputs;
            float* wide = widened.at_least(num_rows_ * depth);
            threads::each(num_rows_, threads_for(num_rows_), [&](int64_t row) {
                for (int64_t i = 0; i < by_.hidden_size; i++) wide[row * depth + i] = widen(x_.at(row)[i]);
                for (int64_t i = by_.hidden_size; i < depth; i++) wide[row * depth + i] = 0;
            });
            by_.router->multiply(by_.router, wide, logits_.data, num_rows_, depth, width, num_threads_);
        }
        float* rooms = room.at_least(num_rows_ * per_token);
        threads::each(num_rows_, num_rows_ > 8 ? num_threads_ : 1, [&](int64_t row) {
            int32_t* to = chosen_ + row * num_slots();
            if (!routing::route(rule, logits_.at(row), rooms + row * per_token, to, weights_ + row * num_slots()))
                std::fill_n(to, num_slots(), -1);
        });
    }

    // `rows_` are the tokens of all experts, one expert behind the other; `place_` has for each slot its place there.
    void sort() {
        static thread_local Scratch<int64_t> starts, rows, place;
        const int64_t count = by_.rule.num_experts, num_pairs = num_rows_ * num_slots();
        starts_ = starts.at_least(count + 1);
        rows_ = rows.at_least(num_pairs);
        place_ = place.at_least(num_pairs);
        std::fill_n(starts_, count + 1, 0);
        for (int64_t pair = 0; pair < num_pairs; pair++)
            if (chosen_[pair] >= 0) starts_[chosen_[pair] + 1]++;
        for (int64_t expert = 0; expert < count; expert++) {
            by_.counts[expert] += starts_[expert + 1];
            starts_[expert + 1] += starts_[expert];
        }
        for (int64_t pair = 0; pair < num_pairs; pair++) {
            const int32_t expert = chosen_[pair];
            place_[pair] = expert < 0 ? -1 : starts_[expert]++;
            if (expert >= 0) rows_[place_[pair]] = pair / num_slots();
        }
        for (int64_t expert = count; expert > 0; expert--) starts_[expert] = starts_[expert - 1];
        starts_[0] = 0;
    }

    void pass(int64_t index) {
        static thread_local Scratch<T> gathered;
        const Expert& expert = by_.experts[index];
        const int64_t first = starts_[index], count = starts_[index + 1] - first;
        if (count == 0 || expert.down.num_parts == 0) return;
        const int64_t depth = depth_of(expert.gate_up), stride = stride_of<T>(depth);
        const Rows<T> rows{gathered.at_least(count * stride), stride};
        threads::each(count, threads_for(count), [&](int64_t row) {
            std::memcpy(rows.at(row), x_.at(rows_[first + row]), by_.hidden_size * sizeof(T));
            std::fill(rows.at(row) + by_.hidden_size, rows.at(row) + depth, T{});
        });
        feed(expert, rows, count, by_.width, made_.at(first), by_.is_clamped != 0);
    }

    void feed(const Expert& by, Rows<T> x, int64_t count, int64_t width, T* out, bool is_clamped) {
        static thread_local Scratch<T> inner, wide;
        const int64_t depth = std::max(width, depth_of(by.down)), stride = stride_of<T>(depth);
        const Rows<T> to{inner.at_least(count * stride), stride};
        if (by.gate_up.gated()) {
            multiply(by.gate_up, x, count, to);
        } else {
            const Rows<T> both{wide.at_least(count * 2 * width), 2 * width};
            multiply(by.gate_up, x, count, both);
            if (is_clamped) clamped_gate(both, count, width, to);
            else silu_mul(both.data, to.data, count, width, stride, num_threads_);
        }
        if (depth > width)
            for (int64_t row = 0; row < count; row++) std::fill(to.at(row) + width, to.at(row) + depth, T{});
        multiply(by.down, to, count, {out, by_.hidden_size});
    }

    void multiply(const Product& by, Rows<T> x, int64_t count, Rows<T> out) {
        T* to = out.data;
        for (int64_t i = 0; i < by.num_parts; i++) {
            const Part& part = by.parts[i];
            part.multiply(&part, x.data, to, count, x.stride, out.stride, num_threads_);
            to += part.num_outputs;
        }
    }

    // (up + 1) gate sigmoid(alpha gate) of clamped gate and up. A NaN stays one.
    void clamped_gate(Rows<T> both, int64_t count, int64_t width, Rows<T> out) const {
        const float limit = by_.limit;
        threads::each(count, threads_for(count), [&](int64_t row) {
            for (int64_t i = 0; i < width; i++) {
                float gate = widen(both.at(row)[i]), up = widen(both.at(row)[width + i]);
                gate = gate > limit ? limit : gate;
                up = up > limit ? limit : up < -limit ? -limit : up;
                out.at(row)[i] = narrow<T>((up + 1) * (gate / (1.0f + power_of_two(-by_.alpha * gate * log2e))));
            }
        });
    }

    void add_up() {
        static thread_local Scratch<float> memory;
        float* sums = memory.at_least(num_rows_ * by_.hidden_size);
        threads::each(num_rows_, threads_for(num_rows_), [&](int64_t row) {
            float* sum = sums + row * by_.hidden_size;
            if (chosen_[row * num_slots()] < 0) {
                std::fill_n(sum, by_.hidden_size, std::numeric_limits<float>::quiet_NaN());
            } else {
                std::fill_n(sum, by_.hidden_size, 0.0f);
                for (int64_t pair = row * num_slots(); pair < (row + 1) * num_slots(); pair++)
                    if (by_.experts[chosen_[pair]].down.num_parts > 0)
                        add(sum, made_.at(place_[pair]), weights_[pair]);
                if (by_.shared_width > 0) add(sum, shared_.at(row), weight_of_shared(row));
            }
            for (int64_t i = 0; i < by_.hidden_size; i++) out_.at(row)[i] = narrow<T>(sum[i]);
        });
    }

    float weight_of_shared(int64_t row) const {
        return by_.shared_gated ? 1.0f / (1.0f + std::exp(-logits_.at(row)[by_.rule.num_experts])) : 1.0f;
    }

    void add(float* sum, const T* made, float weight) const {
        for (int64_t i = 0; i < by_.hidden_size; i++) sum[i] += weight * widen(made[i]);
    }

    const Experts& by_;
    const Rows<T> x_, out_;
    const int64_t num_rows_;
    const int num_threads_;
    Rows<float> logits_{};
    Rows<T> made_{}, shared_{};
    float* weights_ = nullptr;
    int32_t* chosen_ = nullptr;  // -1: the token's router is not finite
    int64_t *starts_ = nullptr, *rows_ = nullptr, *place_ = nullptr;
};

}  // namespace

#define FOR_DTYPE(T, SUFFIX)                                                                                          \
    extern "C" void multiply_experts_##SUFFIX(const Part* by, const void* x, void* out, int64_t num_rows,             \
                                              int64_t x_stride, int64_t out_stride, int num_threads) {                \
        Mixture<T>(*static_cast<const Experts*>(by->packed), static_cast<const T*>(x), x_stride, static_cast<T*>(out), \
                   out_stride, num_rows, num_threads)                                                                 \
            .compute();                                                                                               \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bfloat16, bfloat16)
