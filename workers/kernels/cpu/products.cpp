// Products y = x W^T with weights that are laid out once, for processors without tiles: AVX-512, AVX2, or any other.
//
// Packed, a weight is a row of panels of 32 outputs; a panel has all of its inputs one behind the other, bfloat16 in
// pairs of two neighbouring ones. Rows are widened to float32, and stand in blocks as the registers take them:
//
//     few rows:    for each panel: all inputs ──▶ finish                                      (bound by memory)
//     many rows:   for each panel: for each part of it, widened: for each block of rows ──▶ sums; the last: finish
//
// Each output is one sum, one input after the other, whichever way: a row's product does not depend on who else is there.
// AVX512_BF16 multiplies pairs without widening them. A gated product has 16 of the gate, then their 16 of up in a panel.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "numbers.h"
#include "products.h"
#include "scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16, most_rows = 12;  // rows of a block: with two vectors of outputs they fill the registers
#elif defined(__AVX__)
constexpr int lanes = 8, most_rows = 6;
#else
constexpr int lanes = 4, most_rows = 4;
#endif
constexpr int panel = 32;
constexpr int wide_rows = lanes == 16 ? most_rows : 3;  // that meet a whole panel at once, the others half of it
constexpr int64_t depth_part = 128;                     // inputs of a widened part: 16 KiB, half the first level
constexpr int64_t most_read = 3 << 18;                  // bytes of rows that meet a panel while it is there
constexpr int64_t worth_a_thread = 1 << 18;             // multiplications

typedef float Vector __attribute__((vector_size(lanes * 4), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(lanes * 4), aligned(4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline Bits load(const uint32_t* from) { return *reinterpret_cast<const Bits*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }

inline Vector spread(float x) { return x - Vector{}; }

// One rounding where the processor has such an instruction; the same in every block, or its size would show.
inline Vector multiply_add(Vector sum, Vector a, Vector b) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

// Of two neighbouring bfloat16, the first one is the lower half.
inline Vector first_of(Bits pairs) { return (Vector)(pairs << 16); }
inline Vector second_of(Bits pairs) { return (Vector)(pairs & 0xffff0000u); }

// What a step multiplies: of a weight one unit for each output of a panel, of a row one.
struct Floats {
    using Right = float;
    using Left = float;
    static constexpr int inputs = 1, left_units = 1;

    template <int rows, int vectors>
    static void step(Vector (&sums)[rows][vectors], const Left* left, const Right* right) {
        Vector weights[vectors];
        for (int j = 0; j < vectors; j++) weights[j] = load(right + j * lanes);
        for (int i = 0; i < rows; i++) {
            const Vector x = spread(left[i]);
            for (int j = 0; j < vectors; j++) sums[i][j] = multiply_add(sums[i][j], x, weights[j]);
        }
    }
};

// Pairs of a weight, floats of a row: those of its first input, then those of its second.
struct Widened {
    using Right = uint32_t;
    using Left = float;
    static constexpr int inputs = 2, left_units = 2;

    template <int rows, int vectors>
    static void step(Vector (&sums)[rows][vectors], const Left* left, const Right* right) {
        Bits pairs[vectors];
        for (int j = 0; j < vectors; j++) pairs[j] = load(right + j * lanes);
        for (int i = 0; i < rows; i++) {
            const Vector x = spread(left[i]);
            for (int j = 0; j < vectors; j++) sums[i][j] = multiply_add(sums[i][j], x, first_of(pairs[j]));
        }
        for (int i = 0; i < rows; i++) {
            const Vector x = spread(left[rows + i]);
            for (int j = 0; j < vectors; j++) sums[i][j] = multiply_add(sums[i][j], x, second_of(pairs[j]));
        }
    }
};

#ifdef __AVX512BF16__
// Pairs of both.
struct Pairs {
    using Right = uint32_t;
    using Left = uint32_t;
    static constexpr int inputs = 2, left_units = 1;

    template <int rows, int vectors>
    static void step(Vector (&sums)[rows][vectors], const Left* left, const Right* right) {
        __m512bh weights[vectors];
        for (int j = 0; j < vectors; j++) weights[j] = (__m512bh)_mm512_loadu_si512(right + j * lanes);
        for (int i = 0; i < rows; i++) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(int(left[i]));
            for (int j = 0; j < vectors; j++)
                sums[i][j] = (Vector)_mm512_dpbf16_ps((__m512)sums[i][j], x, weights[j]);
        }
    }
};
#endif

template <int rows, int vectors, typename Operands>
void multiply_block(const typename Operands::Left* left, const typename Operands::Right* right, int64_t num_steps,
                    float* sums, bool from_zero) {
    Vector here[rows][vectors];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) here[i][j] = from_zero ? Vector{} : load(sums + i * panel + j * lanes);
    for (int64_t step = 0; step < num_steps; step++)
        Operands::step(here, left + step * rows * Operands::left_units, right + step * panel);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) store(sums + i * panel + j * lanes, here[i][j]);
}

// sums [num_rows][panel] += rows of one block times a part of a panel.
template <int rows, typename Operands>
void multiply_panel(const typename Operands::Left* left, const typename Operands::Right* right, int64_t num_steps,
                    float* sums, bool from_zero) {
    constexpr int together = rows <= wide_rows ? panel : panel / 2;
    for (int at = 0; at < panel; at += together)
        multiply_block<rows, together / lanes, Operands>(left, right + at, num_steps, sums + at, from_zero);
}

template <typename Operands, int rows = most_rows>
void multiply_rows(int num_rows, const typename Operands::Left* left, const typename Operands::Right* right,
                   int64_t num_steps, float* sums, bool from_zero) {
    if (num_rows == rows) return multiply_panel<rows, Operands>(left, right, num_steps, sums, from_zero);
    if constexpr (rows > 1) multiply_rows<Operands, rows - 1>(num_rows, left, right, num_steps, sums, from_zero);
}

// T of rows and outputs, Weight of the packed weight: bfloat16 or float.
template <typename T, typename Weight>
class PanelProduct {
    static constexpr bool is_paired = std::is_same_v<Weight, bfloat16>;
#ifdef __AVX512BF16__
    static constexpr bool is_exact = !(is_paired && std::is_same_v<T, bfloat16>);  // else pairs are multiplied as they are
    using Operands = std::conditional_t<!is_paired, Floats, std::conditional_t<is_exact, Widened, Pairs>>;
#else
    static constexpr bool is_exact = true;
    using Operands = std::conditional_t<is_paired, Widened, Floats>;
#endif
    using Left = typename Operands::Left;
    using Right = typename Operands::Right;
    static constexpr int left_size = Operands::inputs / Operands::left_units;  // inputs of a unit

  public:
    PanelProduct(const Part& by, const T* x, T* out, int64_t num_rows, int64_t x_stride, int64_t out_stride)
        : x_(x),
          packed_(static_cast<const Right*>(by.packed)),
          bias_(by.bias),
          out_(out),
          num_rows_(num_rows),
          num_inputs_(by.num_inputs),
          num_steps_(by.num_inputs / Operands::inputs),
          x_stride_(x_stride),
          out_stride_(out_stride),
          width_(by.gated ? panel / 2 : panel),
          num_columns_(by.gated ? by.num_outputs / 2 : by.num_outputs),
          num_panels_((by.num_outputs + panel - 1) / panel),
          is_gated_(by.gated != 0) {}

    // Threads share the panels, and of many rows the chunks that meet a panel together.
    void compute(int num_threads) {
        if (num_rows_ == 0) return;
        static thread_local Scratch<Left> memory;
        Left* left = memory.at_least(num_rows_ * num_inputs_ / left_size);
        const int64_t num_blocks = (num_rows_ + most_rows - 1) / most_rows;
        const int64_t fitting = most_read / (num_inputs_ * int64_t(sizeof(Left)) / left_size * most_rows);
        const int64_t blocks_of_chunk = std::clamp<int64_t>(fitting, 1, num_blocks);
        const int64_t num_chunks = (num_blocks + blocks_of_chunk - 1) / blocks_of_chunk;
        const int64_t together = std::clamp<int64_t>(num_panels_ / (4 * num_threads), 1, 16);
        const int64_t num_shares = (num_panels_ + together - 1) / together;
        const bool parallel = num_threads > 1 && num_rows_ * num_panels_ * panel * num_inputs_ > worth_a_thread;
        const bool long_rows = num_rows_ * num_inputs_ > worth_a_thread / 4;
        if (!(parallel && long_rows))
            for (int64_t block = 0; block < num_blocks; block++) lay_block(block, left);
#pragma omp parallel num_threads(num_threads) if (parallel)
        {
            if (parallel && long_rows) {
#pragma omp for schedule(static)
                for (int64_t block = 0; block < num_blocks; block++) lay_block(block, left);
            }
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t item = 0; item < num_chunks * num_shares; item++) {
                const int64_t first = item / num_shares * blocks_of_chunk;
                const int64_t last = std::min(num_blocks, first + blocks_of_chunk);
                const int64_t begin = item % num_shares * together, end = std::min(num_panels_, begin + together);
                for (int64_t index = begin; index < end; index++) multiply_chunk(left, first, last, index);
            }
        }
    }

  private:
    const Right* panel_at(int64_t index) const { return packed_ + index * num_steps_ * panel; }
    int rows_of(int64_t block) const { return int(std::min<int64_t>(most_rows, num_rows_ - block * most_rows)); }

    void lay_block(int64_t block, Left* all) const {
        const int num_rows = rows_of(block);
        Left* to = all + block * most_rows * (num_inputs_ / left_size);
        for (int i = 0; i < num_rows; i++) {
            const T* from = x_ + (block * most_rows + i) * x_stride_;
            for (int64_t unit = 0; unit < num_inputs_ / left_size; unit++)
                if constexpr (left_size == 1) to[unit * num_rows + i] = widen(from[unit]);
                else std::memcpy(to + unit * num_rows + i, from + unit * left_size, sizeof(Left));
        }
    }

    void multiply_chunk(const Left* left, int64_t first, int64_t last, int64_t index) const {
        static thread_local Scratch<float> memory;
        float* sums = memory.at_least((last - first) * most_rows * panel + depth_part * panel);
        float* widened = sums + (last - first) * most_rows * panel;
        const auto left_of = [&](int64_t block) { return left + block * most_rows * (num_inputs_ / left_size); };
        const auto sums_of = [&](int64_t block) { return sums + (block - first) * most_rows * panel; };
        const Right* right = panel_at(index);
        if (last - first == 1 && rows_of(first) <= wide_rows) {
            multiply_rows<Operands>(rows_of(first), left_of(first), right, num_steps_, sums, true);
        } else {
            for (int64_t begin = 0; begin < num_steps_; begin += depth_part / Operands::inputs) {
                const int64_t num_steps = std::min(depth_part / Operands::inputs, num_steps_ - begin);
                if constexpr (is_paired && is_exact) widen_part(right + begin * panel, num_steps, widened);
                for (int64_t block = first; block < last; block++) {
                    const Left* part = left_of(block) + begin * Operands::left_units * rows_of(block);
                    if constexpr (is_paired && is_exact)
                        multiply_rows<Floats>(rows_of(block), part, widened, 2 * num_steps, sums_of(block), begin == 0);
                    else
                        multiply_rows<Operands>(rows_of(block), part, right + begin * panel, num_steps, sums_of(block),
                                                begin == 0);
                }
            }
        }
        for (int64_t block = first; block < last; block++)
            for (int i = 0; i < rows_of(block); i++)
                finish(sums_of(block) + i * panel, block * most_rows + i, index);
    }

    static void widen_part(const uint32_t* pairs, int64_t num_steps, float* to) {
        for (int64_t step = 0; step < num_steps; step++)
            for (int j = 0; j < panel; j += lanes) {
                const Bits both = load(pairs + step * panel + j);
                store(to + 2 * step * panel + j, first_of(both));
                store(to + (2 * step + 1) * panel + j, second_of(both));
            }
    }

    void finish(float* sums, int64_t row, int64_t index) const {
        const int64_t first = index * width_;
        const int here = int(std::min<int64_t>(width_, num_columns_ - first));
        T* to = out_ + row * out_stride_ + first;
        if (bias_ != nullptr)
            for (int i = 0; i < panel; i++) sums[i] += bias_[index * panel + i];
        if (!is_gated_) {
            if (here == panel)
                for (int i = 0; i < panel; i++) to[i] = narrow<T>(sums[i]);
            else
                for (int i = 0; i < here; i++) to[i] = narrow<T>(sums[i]);
            return;
        }
        T gated[panel / 2];
#pragma omp simd
        for (int i = 0; i < panel / 2; i++) {
            const float gate = widen(narrow<T>(sums[i])), up = widen(narrow<T>(sums[panel / 2 + i]));
            gated[i] = narrow<T>(widen(narrow<T>(gate / (1.0f + power_of_two(-gate * log2e)))) * up);
        }
        std::memcpy(to, gated, here * sizeof(T));
    }

    const T* x_;
    const Right* packed_;
    const float* bias_;
    T* out_;
    const int64_t num_rows_, num_inputs_, num_steps_, x_stride_, out_stride_, width_, num_columns_, num_panels_;
    const bool is_gated_;
};

// weight [.][num_inputs] -> packed [num_panels][inputs of a panel][panel], `num_inputs` rounded up to a multiple of
// `group`, each of which an output has side by side. `order` names for each packed output the row of the weight, or -1.
template <typename Weight>
void pack(const Weight* weight, Weight* packed, const int64_t* order, int64_t num_packed, int64_t num_inputs, int64_t group,
          int num_threads) {
    const int64_t depth = (num_inputs + group - 1) / group * group;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t output = 0; output < num_packed; output++) {
        Weight* to = packed + output / panel * panel * depth + output % panel * group;
        for (int64_t input = 0; input < num_inputs; input++)
            to[input / group * group * panel + input % group] =
                order[output] < 0 ? Weight{} : weight[order[output] * num_inputs + input];
    }
}

}  // namespace

// `packed` must be all zeros.
#define FOR_DTYPE(T, SUFFIX, GROUP)                                                                                   \
    extern "C" void multiply_panels_##SUFFIX(const Part* by, const void* x, void* out, int64_t num_rows,              \
                                             int64_t x_stride, int64_t out_stride, int num_threads) {                 \
        PanelProduct<T, T>(*by, static_cast<const T*>(x), static_cast<T*>(out), num_rows, x_stride, out_stride)       \
            .compute(num_threads);                                                                                    \
    }                                                                                                                 \
    extern "C" void pack_panels_##SUFFIX(const T* weight, T* packed, const int64_t* order, int64_t num_packed,        \
                                         int64_t num_inputs, int num_threads) {                                       \
        pack(weight, packed, order, num_packed, num_inputs, GROUP, num_threads);                                      \
    }

FOR_DTYPE(float, float32, 1)
FOR_DTYPE(bfloat16, bfloat16, 2)
