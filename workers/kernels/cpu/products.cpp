// Products y = x W^T with weights that are laid out once, for processors without tiles: AVX-512, AVX2, or any other.
//
// Packed, a weight is a row of panels of 32 outputs; a panel has all of its inputs one behind the other, bfloat16 in
// pairs of two neighbouring ones. Rows are widened to float32, and stand in blocks as the registers take them. A part of a
// panel stays in the first-level cache while the blocks stream past it from the second, where a few panels' sums lie, too;
// meanwhile the next part is asked for:
//
//     for each part of the inputs: for each of a few panels: for each half of it: for each block ──▶ sums; then finish
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
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif
constexpr int panel = 32;
constexpr int strip = lanes == 16 ? panel : panel / 2;  // outputs that a block meets at once
constexpr int64_t part_steps = 128;                     // 16 KiB of a panel: half the first level
constexpr int64_t chunk_rows = 192;                     // that meet a panel while it is there
constexpr int64_t chunk_panels = 4;
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
    static constexpr int most_rows = lanes == 16 ? 12 : lanes == 8 ? 6 : 4;  // of a block: as the registers take them

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
    static constexpr int most_rows = lanes == 16 ? 12 : lanes == 8 ? 5 : 4;

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
    static constexpr int most_rows = 12;

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

// What is read later is asked for while something else is multiplied: at each step, `stride` bytes further, two lines
// where they are 128. One line in two would leave the other to the processor: nine rows took 1.67 times as long as one.
struct Ahead {
    const char* at;
    int64_t stride;

    void ask(int64_t step) const {
        const char* line = at + step * stride;
        __builtin_prefetch(line, 0, 2);
        __builtin_prefetch(line + stride / 2, 0, 2);
    }
};

// sums [rows][panel] += rows of a block times a strip of a panel.
template <typename Operands, int rows>
void multiply_strip(const typename Operands::Left* left, const typename Operands::Right* right, int64_t num_steps,
                    float* sums, bool from_zero, Ahead next) {
    constexpr int vectors = strip / lanes;
    Vector here[rows][vectors];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) here[i][j] = from_zero ? Vector{} : load(sums + i * panel + j * lanes);
    for (int64_t step = 0; step < num_steps; step++) {
        next.ask(step);
        Operands::step(here, left + step * rows * Operands::left_units, right + step * panel);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) store(sums + i * panel + j * lanes, here[i][j]);
}

// The same for a number of rows that is known when it runs.
template <typename Operands, int rows>
void multiply_rows(int num_rows, const typename Operands::Left* left, const typename Operands::Right* right,
                   int64_t num_steps, float* sums, bool from_zero, Ahead next) {
    if (num_rows == rows) return multiply_strip<Operands, rows>(left, right, num_steps, sums, from_zero, next);
    if constexpr (rows > 1)
        multiply_rows<Operands, rows - 1>(num_rows, left, right, num_steps, sums, from_zero, next);
}

// T of rows and outputs, Weight of the packed weight: bfloat16 or float.
template <typename T, typename Weight>
class PanelProduct {
    static constexpr bool is_paired = std::is_same_v<Weight, bfloat16>;
#ifdef __AVX512BF16__
    using OfPairs = std::conditional_t<std::is_same_v<T, bfloat16>, Pairs, Widened>;
#else
    using OfPairs = Widened;
#endif
    using Operands = std::conditional_t<is_paired, OfPairs, Floats>;
    using Left = typename Operands::Left;
    using Right = typename Operands::Right;
    static constexpr int left_size = Operands::inputs / Operands::left_units;  // inputs of a unit

    static constexpr int most_rows = Operands::most_rows;

  public:
    PanelProduct(const Part& by, const T* x, T* out, int64_t num_rows, int64_t x_stride, int64_t out_stride)
        : x_(x),
          packed_(static_cast<const Right*>(by.packed)),
          bias_(by.bias),
          out_(out),
          num_rows_(num_rows),
          num_blocks_((num_rows + most_rows - 1) / most_rows),
          num_inputs_(by.num_inputs),
          num_steps_(by.num_inputs / Operands::inputs),
          x_stride_(x_stride),
          out_stride_(out_stride),
          width_(by.gated ? panel / 2 : panel),
          num_columns_(by.gated ? by.num_outputs / 2 : by.num_outputs),
          num_panels_((by.num_outputs + panel - 1) / panel),
          is_gated_(by.gated != 0) {}

    // Threads share the panels, and of many rows the chunks that meet a panel together. A thread knows its next share while
    // it computes one, and asks for its first panel.
    void compute(int num_threads) {
        if (num_rows_ == 0) return;
        static thread_local Scratch<Left> memory;
        Left* left = memory.at_least(num_rows_ * units_of_row());
        const int64_t num_chunks = (num_rows_ + chunk_rows - 1) / chunk_rows;
        const int64_t together = std::clamp<int64_t>(num_panels_ / (4 * num_threads), 1, chunk_panels);
        const int64_t num_shares = (num_panels_ + together - 1) / together;
        const bool parallel = num_threads > 1 && num_rows_ * num_panels_ * panel * num_inputs_ > worth_a_thread;
        const bool lay_parallel = parallel && num_rows_ * num_inputs_ > worth_a_thread / 4;
        threads::each(num_blocks_, lay_parallel ? num_threads : 1, [&](int64_t block) { lay_block(block, left); });
        threads::share(num_chunks * num_shares, parallel ? num_threads : 1, [&](threads::Pieces& pieces) {
            for (int64_t item = pieces.take(); item >= 0;) {
                const int64_t chunk = item / num_shares, begin = item % num_shares * together;
                const int64_t first = chunk * num_blocks_ / num_chunks, last = (chunk + 1) * num_blocks_ / num_chunks;
                item = pieces.take();
                const Right* following = item >= 0 ? panel_at(item % num_shares * together) : nullptr;
                multiply_chunk(left, first, last, begin, std::min(num_panels_, begin + together), following);
            }
        });
    }

  private:
    int64_t units_of_row() const { return num_inputs_ / left_size; }
    static const char* bytes_at(const Right* units) { return reinterpret_cast<const char*>(units); }
    int64_t first_row(int64_t block) const { return block * num_rows_ / num_blocks_; }  // blocks are of like size
    int rows_of(int64_t block) const { return int(first_row(block + 1) - first_row(block)); }
    const Left* left_of(int64_t block, const Left* all) const { return all + first_row(block) * units_of_row(); }
    const Right* panel_at(int64_t index) const { return packed_ + index * num_steps_ * panel; }

    void lay_block(int64_t block, Left* all) const {
        const int num_rows = rows_of(block);
        Left* to = all + first_row(block) * units_of_row();
        for (int i = 0; i < num_rows; i++) {
            const T* from = x_ + (first_row(block) + i) * x_stride_;
            for (int64_t unit = 0; unit < units_of_row(); unit++)
                if constexpr (left_size == 1) to[unit * num_rows + i] = widen(from[unit]);
                else std::memcpy(to + unit * num_rows + i, from + unit * left_size, sizeof(Left));
        }
    }

    // Blocks [first, last) times panels [begin, end). `following` is the panel that this thread multiplies next, or null.
    void multiply_chunk(const Left* left, int64_t first, int64_t last, int64_t begin, int64_t end,
                        const Right* following) const {
        static thread_local Scratch<float> memory;
        constexpr int64_t sums_size = most_rows * panel;
        const int64_t num_blocks = last - first;
        float* sums = memory.at_least(num_blocks * (end - begin) * sums_size);
        for (int64_t step = 0; step < num_steps_; step += part_steps) {
            const int64_t num_steps = std::min(part_steps, num_steps_ - step);
            for (int64_t index = begin; index < end; index++) {
                const Right* right = panel_at(index) + step * panel;
                const bool ends_part = index + 1 == end, ends_chunk = ends_part && step + num_steps == num_steps_;
                const Right* next = ends_chunk ? following
                                    : ends_part ? panel_at(begin) + (step + num_steps) * panel
                                                : panel_at(index + 1) + step * panel;
                Ahead asked{bytes_at(next), num_blocks * panel / strip == 1 ? 128 : 64};
                if (next == nullptr) asked = {bytes_at(right), 0};
                const char* last_byte = asked.at + num_steps * panel * sizeof(Right) - 1;
                float* to = sums + (index - begin) * num_blocks * sums_size;
                for (int at = 0; at < panel; at += strip)
                    for (int64_t block = 0; block < num_blocks; block++) {
                        const int num_rows = rows_of(first + block);
                        const Left* rows = left_of(first + block, left) + step * Operands::left_units * num_rows;
                        multiply_rows<Operands, most_rows>(num_rows, rows, right + at, num_steps,
                                                           to + block * sums_size + at, step == 0, asked);
                        asked.at += num_steps * asked.stride;
                        if (asked.at > last_byte) asked = {bytes_at(right), 0};
                    }
            }
        }
        for (int64_t index = begin; index < end; index++)
            for (int64_t block = 0; block < num_blocks; block++)
                for (int i = 0; i < rows_of(first + block); i++)
                    finish(sums + ((index - begin) * num_blocks + block) * sums_size + i * panel,
                           first_row(first + block) + i, index);
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
    const int64_t num_rows_, num_blocks_, num_inputs_, num_steps_, x_stride_, out_stride_;
    const int64_t width_, num_columns_, num_panels_;
    const bool is_gated_;
};

}  // namespace

// A router has weights of the model's type, and rows and outputs of float32.
#define FOR_DTYPE(T, SUFFIX)                                                                                          \
    extern "C" void multiply_panels_##SUFFIX(const Part* by, const void* x, void* out, int64_t num_rows,              \
                                             int64_t x_stride, int64_t out_stride, int num_threads) {                 \
        PanelProduct<T, T>(*by, static_cast<const T*>(x), static_cast<T*>(out), num_rows, x_stride, out_stride)       \
            .compute(num_threads);                                                                                    \
    }                                                                                                                 \
    extern "C" void multiply_router_##SUFFIX(const Part* by, const void* x, void* out, int64_t num_rows,              \
                                             int64_t x_stride, int64_t out_stride, int num_threads) {                 \
        PanelProduct<float, T>(*by, static_cast<const float*>(x), static_cast<float*>(out), num_rows, x_stride,       \
                               out_stride)                                                                            \
            .compute(num_threads);                                                                                    \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bfloat16, bfloat16)
