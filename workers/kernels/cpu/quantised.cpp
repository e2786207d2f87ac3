// Products with quantised weights (quantised.h): y = x W^T (+ b), from codes that are unpacked in registers.
//
//     y[t, o] = sum over groups of  scale[o, group] * sum over pieces of  x_scale[t, piece] * (sum of (code - zero) * x)
//                                   - minimum[o, group] * x_scale[t, piece] * sum of x
//
// Inputs that are outliers are left out of x, and multiplied as they are. A weight of several terms (EXL2: runs of inputs
// with bits of their own) is the sum of their products. With activations of 8 bits the sums in brackets are integers, and
// exact; where a row has one scale, those of a group are added up as integers, too. What follows is float32, of each output
// and row alone and in the order of the pieces: a row's bits depend neither on the other rows nor on the number of threads.
// A block of up to eight rows shares the unpacking, and the 16 outputs of a panel share the loads of a row.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "numbers.h"
#include "products.h"
#include "quantised.h"
#include "quantised_rows.h"
#include "quantised_sums.h"
#include "scratch.h"
#include "threads.h"

namespace {

using namespace lanes;
using namespace quantised;

constexpr int64_t most_read = 1 << 18;       // bytes of rows that meet a panel while it is there: half the second level
constexpr int64_t worth_a_thread = 1 << 17;  // multiplications
constexpr int64_t first_bytes = 4096;        // that a thread asks for while rows are rounded

void expand_values(const GroupNumbers& numbers, int64_t panel_index, float* to) {
    const int64_t first = panel_index * numbers.num_values * panel, size = numbers.num_values * panel;
    const auto each = [&](auto read) {
        for (int64_t i = 0; i < size; i += count) store(to + i, read(numbers.values + (first + i) * 2));
    };
    if (numbers.value_type == float16_type) each(from_float16);
    else if (numbers.value_type == bfloat16_type) each(from_bfloat16);
    else std::memcpy(to, numbers.values + first * 4, size * 4);
}

// `to` has room for the groups, and behind them for the values of blocks.
void expand_numbers(const GroupNumbers& numbers, int64_t panel_index, int64_t num_groups, float* to) {
    if (numbers.factors == nullptr) return expand_values(numbers, panel_index, to);
    float* values = to + num_groups * panel;
    expand_values(numbers, panel_index, values);
    const uint8_t* factors = numbers.factors + panel_index * num_groups * panel;
    int64_t left = numbers.groups_per_value - numbers.first_group;  // of the block
    const auto each = [&](auto read) {
        for (int64_t group = 0; group < num_groups; group++) {
            for (int i = 0; i < panel; i += count)
                store(to + group * panel + i, load_floats(values + i) * to_floats(read(factors + group * panel + i)));
            if (--left == 0) left = numbers.groups_per_value, values += panel;
        }
    };
    if (numbers.factor_type == int8_type) each(from_signed_bytes);
    else each(from_bytes);
}

Groups expand(const Panels& by, int64_t panel_index) {
    static thread_local Scratch<float> memory;
    const int64_t size = by.num_groups * panel;
    const bool has_minimum = by.minimum.values != nullptr, has_zeros = by.zeros != nullptr;
    float* scales = memory.at_least(5 * size);
    float *minimums = scales + size, *zeros = minimums + size;
    expand_numbers(by.scale, panel_index, by.num_groups, scales);
    if (has_minimum) expand_numbers(by.minimum, panel_index, by.num_groups, minimums);
    if (has_zeros)
        for (int64_t i = 0; i < size; i += count) {
            const ints zero = from_bytes(by.zeros + panel_index * size + i);
            std::memcpy(zeros + i, &zero, sizeof(zero));
        }
    return {scales, has_minimum ? minimums : nullptr, has_zeros ? reinterpret_cast<int32_t*>(zeros) : nullptr};
}

Multiply* multiply_of(const Panels& by, int rows) {
    return by.sums_floats() ? multiply_floats(by, rows) : multiply_integers(by, rows);
}

// Of rows of T, into rows of Out; `adds`: to what is there.
template <typename T, typename Out = T, bool adds = false>
class QuantisedProduct {
  public:
    QuantisedProduct(const Part& part, const T* x, Out* out, int64_t num_rows, int64_t x_stride, int64_t out_stride)
        : by_(*static_cast<const Panels*>(part.packed)),
          bias_(part.bias),
          x_(x),
          out_(out),
          num_rows_(num_rows),
          x_stride_(x_stride),
          out_stride_(out_stride),
          row_bytes_(row_bytes(by_)),
          is_gated_(part.gated != 0),
          num_columns_(is_gated_ ? part.num_outputs / 2 : part.num_outputs),
          width_(is_gated_ ? panel / 2 : panel),
          num_panels_((num_columns_ + width_ - 1) / width_),
          multiply_{multiply_of(by_, 1), multiply_of(by_, 2), multiply_of(by_, 4), multiply_of(by_, most_rows)} {}

    // Threads share the panels, and of many rows the chunks that meet a panel together. A thread knows its next share while
    // it computes one, and asks for its codes.
    void compute(int num_threads) {
        static thread_local Scratch<uint8_t> memory;
        uint8_t* rows = memory.at_least(num_rows_ * row_bytes_);
        static thread_local Scratch<Outlier> outlier_memory;
        const int64_t outliers_of_row = by_.outliers_from > 0.0f ? by_.num_steps * step_size + 1 : 0;
        Outlier* outliers = outliers_of_row == 0 ? nullptr : outlier_memory.at_least(num_rows_ * outliers_of_row);
        const int64_t rows_of_chunk = std::max<int64_t>(8, most_read / row_bytes_ / 8 * 8);
        const int64_t num_chunks = (num_rows_ + rows_of_chunk - 1) / rows_of_chunk;
        const int64_t together = std::clamp<int64_t>(num_panels_ / (4 * num_threads), 1, 16);
        const int64_t num_shares = (num_panels_ + together - 1) / together;
        const RowWriter writer(by_);
        const bool parallel = num_threads > 1 && num_rows_ * num_columns_ * by_.num_inputs > worth_a_thread;
        threads::each(num_rows_, parallel ? num_threads : 1, [&](int64_t row) {
            writer.write(x_ + row * x_stride_, rows + row * row_bytes_, outliers + row * outliers_of_row);
        });
        threads::share(num_chunks * num_shares, parallel ? num_threads : 1, [&](threads::Pieces& pieces) {
            int64_t item = pieces.take();
            Ahead{codes_of(item % num_shares * together), codes_end(), first_bytes}.ask();
            while (item >= 0) {
                const int64_t first = item / num_shares * rows_of_chunk;
                const int64_t last = std::min(num_rows_, first + rows_of_chunk);
                const int64_t begin = item % num_shares * together, end = std::min(num_panels_, begin + together);
                item = pieces.take();
                for (int64_t index = begin; index < end; index++) {
                    const int64_t following = item >= 0 ? item % num_shares * together : -1;
                    const int64_t next = index + 1 < end ? index + 1 : following;
                    multiply_panel(rows, outliers, outliers_of_row, first, last, index, next);
                }
            }
        });
    }

  private:
    int64_t panel_bytes() const { return by_.num_steps * by_.step_bytes(); }
    const uint8_t* codes_of(int64_t index) const { return by_.codes + index * panel_bytes(); }
    Multiply* multiply_for(int size) const { return multiply_[std::countr_zero(unsigned(size))]; }
    const uint8_t* codes_end() const { return codes_of(num_panels_); }

    static void ask_for(const GroupNumbers& numbers, int64_t index, int64_t num_groups) {
        if (numbers.values == nullptr) return;
        const int64_t size = numbers.num_values * panel * (numbers.value_type == float32_type ? 4 : 2);
        const uint8_t* values = numbers.values + index * size;
        Ahead{values, values + size, size}.ask();
        if (numbers.factors == nullptr) return;
        const uint8_t* factors = numbers.factors + index * num_groups * panel;
        Ahead{factors, factors + num_groups * panel, num_groups * panel}.ask();
    }

    // Meanwhile the panel `next` is asked for; -1: none.
    void multiply_panel(const uint8_t* rows, const Outlier* outliers, int64_t outliers_of_row, int64_t first, int64_t last,
                        int64_t index, int64_t next) const {
        const Groups groups = expand(by_, index);
        Ahead ahead{};
        int64_t bytes_of_block = 0;
        if (next >= 0) {
            ask_for(by_.scale, next, by_.num_groups);
            ask_for(by_.minimum, next, by_.num_groups);
            const int64_t num_blocks = (last - first + most_rows - 1) / most_rows;
            ahead = {codes_of(next), codes_of(next + 1), (by_.step_bytes() / num_blocks + 63) / 64 * 64};
            bytes_of_block = ahead.step_bytes * by_.num_steps;
        }
        int size;
        for (int64_t row = first; row < last; row += size) {
            for (size = most_rows; size > last - row || multiply_for(size) == nullptr;) size /= 2;
            float sums[most_rows * panel];
            multiply_for(size)(by_, groups, index, rows + row * row_bytes_, row_bytes_, ahead, sums);
            ahead.at += bytes_of_block;
            for (int i = 0; i < size; i++) {
                if (outliers != nullptr)
                    add_outliers(outliers + (row + i) * outliers_of_row, groups.scales, index, sums + i * panel);
                finish(sums + i * panel, row + i, index);
            }
        }
    }

    // One after the other, in the order of positions.
    void add_outliers(const Outlier* outliers, const float* scales, int64_t index, float* sums) const {
        const uint8_t* codes = codes_of(index);
        for (const Outlier* one = outliers + 1; one <= outliers + outliers->position; one++) {
            const int64_t here = one->position % step_size;
            const uint8_t* from = codes + one->position / step_size * by_.step_bytes() + here / 4 * vector_bytes + here % 4;
            for (int i = 0; i < panel; i++) sums[i] += float(int(from[4 * i]) - by_.zero) * scales[i] * one->number;
        }
    }

    // Gated, a panel has 8 of the gate and then their 8 of up; they are rounded where silu_mul rounds.
    void finish(float* sums, int64_t row, int64_t index) const {
        Out numbers[panel];
        if (bias_ != nullptr)
            for (int i = 0; i < panel; i++) sums[i] += bias_[index * panel + i];
        for (int i = 0; i < panel; i++) numbers[i] = narrow<Out>(sums[i]);
        if (is_gated_)
            for (int i = 0; i < width_; i++) {
                const float gate = widen(numbers[i]), up = widen(numbers[width_ + i]);
                numbers[i] = narrow<Out>(widen(narrow<Out>(gate / (1.0f + power_of_two(-gate * log2e)))) * up);
            }
        const int64_t here = std::min(width_, num_columns_ - index * width_);
        Out* to = out_ + row * out_stride_ + index * width_;
        if constexpr (adds) for (int64_t i = 0; i < here; i++) to[i] += numbers[i];
        else std::memcpy(to, numbers, here * sizeof(Out));
    }

    const Panels& by_;
    const float* bias_;
    const T* x_;
    Out* out_;
    const int64_t num_rows_, x_stride_, out_stride_, row_bytes_;
    const bool is_gated_;
    const int64_t num_columns_, width_, num_panels_;
    Multiply* const multiply_[4];  // 1, 2, 4 and, where registers take them, 8 rows
};

float level_of(const Panels& by, uint8_t code, int32_t zero) {
    switch (by.sums) {
        case of_small_table: return float(static_cast<const uint8_t*>(by.table)[code] - zero);
        case of_table: return static_cast<const float*>(by.table)[code];
        case of_fp8: {
            const uint16_t half = uint16_t((code & 128) << 8 | (code & 127) << 7);
            uint8_t halfs[2 * count] = {};
            std::memcpy(halfs, &half, 2);
            return from_float16(halfs)[0];
        }
        default: return float(int(code) - zero);
    }
}

// Adds products of the same outputs up in float32, in their order.
template <typename T>
void multiply_terms(const Part& part, const T* x, T* out, int64_t num_rows, int64_t x_stride, int64_t out_stride,
                    int num_threads) {
    static thread_local Scratch<float> memory;
    const Product& terms = *static_cast<const Product*>(part.packed);
    const int64_t width = part.num_outputs;
    float* sums = memory.at_least(num_rows * width);
    for (int64_t i = 0; i < terms.num_parts; i++) {
        const Part& term = terms.parts[i];
        if (i == 0) QuantisedProduct<T, float>(term, x, sums, num_rows, x_stride, width).compute(num_threads);
        else QuantisedProduct<T, float, true>(term, x, sums, num_rows, x_stride, width).compute(num_threads);
    }
    threads::each(num_rows, num_rows * width > worth_a_thread ? num_threads : 1, [&](int64_t row) {
        for (int64_t i = 0; i < width; i++) {
            const float bias = part.bias == nullptr ? 0.0f : part.bias[i];
            out[row * out_stride + i] = narrow<T>(sums[row * width + i] + bias);
        }
    });
}

}  // namespace

// Part::Multiply of a weight whose `packed` is a `Panels`, and of one whose `packed` is a `Product` of such.
#define FOR_DTYPE(T, SUFFIX)                                                                                          \
    extern "C" void multiply_quantised_##SUFFIX(const Part* by, const void* x, void* out, int64_t num_rows,           \
                                                int64_t x_stride, int64_t out_stride, int num_threads) {              \
        QuantisedProduct<T>(*by, static_cast<const T*>(x), static_cast<T*>(out), num_rows, x_stride, out_stride)      \
            .compute(num_threads);                                                                                    \
    }                                                                                                                 \
    extern "C" void multiply_terms_##SUFFIX(const Part* by, const void* x, void* out, int64_t num_rows,               \
                                            int64_t x_stride, int64_t out_stride, int num_threads) {                  \
        multiply_terms(*by, static_cast<const T*>(x), static_cast<T*>(out), num_rows, x_stride, out_stride,           \
                       num_threads);                                                                                  \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bfloat16, bfloat16)

// Rows of the weight, [num_rows][num_inputs]: those that `rows` names. Not of a gated one. `out` must be all zeros where an
// input has no position.
extern "C" void read_quantised(const Panels* by, const int64_t* rows, float* out, int64_t num_rows, int num_threads) {
    threads::each(num_rows, num_threads, [&](int64_t i) {
        const int64_t index = rows[i] / panel, in_panel = rows[i] % panel;
        const Groups groups = expand(*by, index);
        int64_t group = 0, steps_left = by->by_halves() ? 0 : by->group_steps[0];
        for (int64_t step = 0; step < by->num_steps; step++) {
            const uint8_t* codes = by->codes + (index * by->num_steps + step) * by->step_bytes();
            alignas(words) uint8_t bytes[panel * step_size];
            Unpack* const unpack = unpack_of(by->bits);
            if (unpack != nullptr) unpack(codes, bytes), codes = bytes;
            if (!by->by_halves())
                for (; steps_left == 0; steps_left = by->group_steps[group]) group++;
            for (int here = 0; here < step_size; here++) {
                const int64_t position = step * step_size + here;
                const int64_t input = by->inputs != nullptr ? by->inputs[position] : position;
                if (input < 0 || input >= by->num_inputs) continue;
                const int64_t place = (by->by_halves() ? position / (step_size / 2) : group) * panel + in_panel;
                const uint8_t code = by->sums == of_fp8 ? codes[here * panel + in_panel]
                                                        : codes[here / 4 * vector_bytes + in_panel * 4 + here % 4];
                const float level = level_of(*by, code, groups.zeros == nullptr ? by->zero : groups.zeros[place]);
                const float weight = level * groups.scales[place];
                out[i * by->num_inputs + input] = groups.minimums == nullptr ? weight : weight - groups.minimums[place];
            }
            steps_left--;
        }
    });
}
