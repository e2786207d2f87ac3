// Attention over pages with an online softmax (https://arxiv.org/abs/2205.14135): nothing is gathered, nothing expanded.
//
// A tile (attention.h) walks over the keys it may see, `chunk` at a time:
//
//     keys and values, page by page ──▶ laid out for `multiply` ──▶ scores = Q K^T ──▶ weights ──▶ sums += weights V
//
// `multiply` takes its operands as Floats, or as Pairs of neighbouring bfloat16 that one instruction multiplies and
// adds up. The compiler's target decides which of them a cache uses: AVX512_BF16 has the instruction.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "attention_rounded.h"
#include "threads.h"

#ifdef __AVX512BF16__
#include "transpose.h"
#endif

namespace {

using vectors::fold, vectors::greater, vectors::lanes, vectors::load, vectors::store, vectors::Vector;
using paged::Batch, paged::chunk, paged::infinity, paged::Places, paged::Shape, paged::Tile;

constexpr int most_queries = 96;  // of a tile: its buffers stay in a core's second-level cache

typedef float Eight __attribute__((vector_size(32), aligned(4)));

// Rows and columns of 8 x 8 floats change places.
inline void transpose_eight(Eight (&rows)[8]) {
    Eight x[8];
    for (int i = 0; i < 8; i += 2) {
        x[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        x[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    Eight y[8];
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            y[i + 2 * j] = __builtin_shufflevector(x[i + j], x[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            y[i + 2 * j + 1] = __builtin_shufflevector(x[i + j], x[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        rows[i] = __builtin_shufflevector(y[i], y[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[i + 4] = __builtin_shufflevector(y[i], y[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

inline Eight widen_eight(const float* from) { return *reinterpret_cast<const Eight*>(from); }
inline Eight widen_eight(const bfloat16* from) {
    typedef uint16_t Halves __attribute__((vector_size(16), aligned(2)));
    typedef uint32_t Bits __attribute__((vector_size(32)));
    return (Eight)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16);
}

struct Floats {
    using Unit = float;
    static constexpr int per_unit = 1;

    static Vector multiply_add(Vector sum, Unit left, const Unit* right) {
        sum += left * load(right);
        return sum;
    }

    template <typename T>
    static void lay_row(const T* from, Unit* to, int head_dim) {
        for (int d = 0; d < head_dim; d++) to[d] = widen(from[d]);
    }

    // keys[chunk] -> [head_dim][chunk]; a null key is all zeros.
    template <typename T>
    static void lay_keys(const T* const* keys, Unit* to, int head_dim) {
        for (int first = 0; first < chunk; first += 8) {
            int d = 0;
            for (; d + 8 <= head_dim; d += 8) {
                Eight rows[8];
                for (int i = 0; i < 8; i++) rows[i] = keys[first + i] ? widen_eight(keys[first + i] + d) : Eight{};
                transpose_eight(rows);
                for (int i = 0; i < 8; i++) *reinterpret_cast<Eight*>(to + (d + i) * chunk + first) = rows[i];
            }
            for (; d < head_dim; d++)
                for (int key = first; key < first + 8; key++)
                    to[d * chunk + key] = keys[key] ? widen(keys[key][d]) : 0.0f;
        }
    }

    // values[chunk] -> [chunk][width]; columns from head_dim on are not used.
    template <typename T>
    static void lay_values(const T* const* values, Unit* to, int head_dim, int width) {
        for (int key = 0; key < chunk; key++)
            if (values[key] == nullptr) std::fill_n(to + key * width, head_dim, 0.0f);
            else lay_row(values[key], to + key * width, head_dim);
    }
};

#ifdef __AVX512BF16__
struct Pairs {
    using Unit = uint32_t;
    static constexpr int per_unit = 2;

    static Vector multiply_add(Vector sum, Unit left, const Unit* right) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(left)),
                                        (__m512bh)_mm512_loadu_si512(right));
    }

    template <typename T>
    static void lay_row(const T* from, Unit* to, int head_dim) {
        if constexpr (std::is_same_v<T, bfloat16>) {
            std::memcpy(to, from, head_dim * 2);
        } else {
            auto* rounded = reinterpret_cast<bfloat16*>(to);
            for (int i = 0; i < head_dim; i++) rounded[i] = narrow<bfloat16>(from[i]);
        }
    }

    // keys[chunk] -> pairs [head_dim / 2][chunk].
    static void lay_keys(const bfloat16* const* keys, Unit* to, int head_dim) {
        for (int first = 0; first < chunk; first += lanes) {
            for (int d = 0; d < head_dim; d += 2 * lanes) {
                const __mmask32 here = d + 2 * lanes <= head_dim ? ~0u : (1u << (head_dim - d)) - 1;
                __m512i rows[lanes];
                for (int i = 0; i < lanes; i++) {
                    const bfloat16* key = keys[first + i];
                    rows[i] = key ? _mm512_maskz_loadu_epi16(here, key + d) : _mm512_setzero_si512();
                }
                transpose(rows);
                const int num_pairs = std::min(lanes, (head_dim - d) / 2);
                for (int i = 0; i < num_pairs; i++)
                    _mm512_storeu_si512(to + (d / 2 + i) * chunk + first, rows[i]);
            }
        }
    }

    // values[chunk] -> pairs [chunk / 2][width] of the same column of two neighbouring keys.
    static void lay_values(const bfloat16* const* values, Unit* to, int head_dim, int width) {
        for (int key = 0; key < chunk; key += 2) {
            for (int d = 0; d < head_dim; d += lanes) {
                const __mmask16 here = d + lanes <= head_dim ? __mmask16(~0) : __mmask16((1u << (head_dim - d)) - 1);
                const __m512i even = column(values[key], d, here), odd = column(values[key + 1], d, here);
                _mm512_storeu_si512(to + key / 2 * width + d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
            }
        }
    }

  private:
    static __m512i column(const bfloat16* value, int d, __mmask16 here) {
        return value ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, value + d)) : _mm512_setzero_si512();
    }
};
using Halves = Pairs;
#else
using Halves = Floats;
#endif

template <typename T>
using OperandsFor = std::conditional_t<std::is_same_v<T, bfloat16>, Halves, Floats>;

// out[rows][vectors] = out * factors + left[rows][depth] right[depth][vectors], all of out in registers.
template <typename Operands, int rows, int vectors>
void multiply(const typename Operands::Unit* left, const typename Operands::Unit* right, int right_stride, int depth,
              int left_stride, float* out, int out_stride, const float* factors) {
    Vector sums[rows][vectors];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++)
            sums[i][j] = factors ? factors[i] * load(out + i * out_stride + j * lanes) : Vector{};
    for (int k = 0; k < depth; k++)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < vectors; j++)
                sums[i][j] = Operands::multiply_add(sums[i][j], left[i * left_stride + k], right + k * right_stride + j * lanes);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) store(out + i * out_stride + j * lanes, sums[i][j]);
}

// The same for any width that is a multiple of `lanes`, `vectors` at a time and then fewer.
template <typename Operands, int rows, int vectors>
void multiply_columns(int width, const typename Operands::Unit* left, int left_stride,
                      const typename Operands::Unit* right, int right_stride, int depth, float* out, int out_stride,
                      const float* factors) {
    int at = 0;
    for (; at + vectors * lanes <= width; at += vectors * lanes)
        multiply<Operands, rows, vectors>(left, right + at, right_stride, depth, left_stride, out + at, out_stride, factors);
    if constexpr (vectors > 1)
        if (at < width)
            multiply_columns<Operands, rows, vectors / 2>(width - at, left, left_stride, right + at, right_stride, depth,
                                                          out + at, out_stride, factors);
}

// And for any number of rows: six at a time, with as many columns as the registers hold.
template <typename Operands>
void multiply_rows(int num_rows, int width, const typename Operands::Unit* left, int left_stride,
                   const typename Operands::Unit* right, int right_stride, int depth, float* out, int out_stride,
                   const float* factors) {
    constexpr int many = lanes == 16 ? 4 : 2;
    int row = 0;
    const auto take = [&](auto* multiply_some, int num) {
        for (; row + num <= num_rows; row += num)
            multiply_some(width, left + row * left_stride, left_stride, right, right_stride, depth, out + row * out_stride,
                          out_stride, factors ? factors + row : nullptr);
    };
    take(multiply_columns<Operands, 6, many>, 6);
    take(multiply_columns<Operands, 4, many>, 4);
    take(multiply_columns<Operands, 2, 4>, 2);
    take(multiply_columns<Operands, 1, 4>, 1);
}

// The state of one thread besides the tensors. Rows are queries of a tile: its tokens, and of each its heads.
template <typename T>
class Worker {
    using Operands = OperandsFor<T>;
    using Unit = typename Operands::Unit;

  public:
    Worker(const Shape& shape, int64_t max_rows)
        : shape_(shape),
          head_dim_(int(shape.head_dim)),
          depth_(head_dim_ / Operands::per_unit),
          width_((head_dim_ + lanes - 1) / lanes * lanes),
          queries_(max_rows * depth_),
          keys_(depth_ * chunk),
          values_(chunk / Operands::per_unit * width_),
          weights_(max_rows * chunk / Operands::per_unit),
          scores_(max_rows * chunk),
          sums_(max_rows * width_),
          best_(max_rows),
          total_(max_rows),
          factors_(max_rows) {}

    void run(const Tile& tile, const T* q, const T* k_cache, const T* v_cache, T* out) {
        const int64_t group = shape_.group();
        const int num_rows = int(tile.num_tokens * group);
        for (int row = 0; row < num_rows; row++)
            Operands::lay_row(q + tile.place(shape_, row / group, row % group), queries_.data() + row * depth_, head_dim_);
        std::fill_n(sums_.begin(), num_rows * width_, 0.0f);
        for (int row = 0; row < num_rows; row++) best_[row] = shape_.first_best(tile.kv_head * group + row % group);
        std::fill_n(total_.begin(), num_rows, shape_.first_total());
        int64_t start = tile.first_key(shape_) / chunk * chunk;
        for (Places<T> here(shape_, tile, 0, start, k_cache, v_cache); start < tile.stop(); start += chunk) {
            const Places<T> next(shape_, tile, 0, start + chunk, k_cache, v_cache);
            fetch(next);  // pages are scattered: a processor cannot predict the next one
            look_at(tile, start, here, num_rows);
            here = next;
        }
        for (int row = 0; row < num_rows; row++) {
            T* to = out + tile.place(shape_, row / group, row % group);
            const float factor = 1.0f / total_[row];
            for (int d = 0; d < head_dim_; d++) to[d] = narrow<T>(sums_[row * width_ + d] * factor);
        }
    }

  private:
    void fetch(const Places<T>& places) const {
        constexpr int line = 64 / sizeof(T);
        for (int i = 0; i < places.num_keys; i++)
            for (int d = 0; d < head_dim_; d += line) {
                __builtin_prefetch(places.keys[i] + d, 0, 2);
                __builtin_prefetch(places.values[i] + d, 0, 2);
            }
    }

    void look_at(const Tile& tile, int64_t start, const Places<T>& places, int num_rows) {
        const int64_t group = shape_.group();
        Operands::lay_keys(places.keys, keys_.data(), head_dim_);
        Operands::lay_values(places.values, values_.data(), head_dim_, width_);
        multiply_rows<Operands>(num_rows, chunk, queries_.data(), depth_, keys_.data(), chunk, depth_, scores_.data(), chunk,
                                nullptr);
        for (int row = 0; row < num_rows; row++) {
            const int64_t position = tile.position + row / group;
            const int64_t first = std::max<int64_t>(0, shape_.first_visible(position) - start);
            const int64_t last = std::min<int64_t>(places.num_keys, position + 1 - start);
            weigh(row, int(first), int(std::max<int64_t>(0, last)));
        }
        constexpr int depth = chunk / Operands::per_unit;
        multiply_rows<Operands>(num_rows, width_, weights_.data(), depth, values_.data(), width_, depth, sums_.data(), width_,
                                factors_.data());
    }

    // Scores [first, last) of a row become weights relative to the best score so far, the others 0.
    void weigh(int row, int first, int last) {
        float* scores = scores_.data() + row * chunk;
        const float to_log2 = shape_.to_log2();
        if (shape_.softcap != 0.0f) cap(scores);
        if (first > 0 || last < chunk)
            for (int i = 0; i < chunk; i++) scores[i] = i >= first && i < last ? scores[i] : -infinity;
        Vector best_lanes = load(scores);
        for (int i = lanes; i < chunk; i += lanes) best_lanes = greater(best_lanes, load(scores + i));
        const float best = std::max(best_[row], fold(best_lanes, greater) * to_log2);
        const float base = best == -infinity ? 0.0f : best;  // nothing seen yet: all weights are 0
#pragma omp simd
        for (int i = 0; i < chunk; i++) scores[i] = power_of_two(scores[i] * to_log2 - base);
        Vector sum_lanes = load(scores);
        for (int i = lanes; i < chunk; i += lanes) sum_lanes += load(scores + i);
        const float sum = fold(sum_lanes, [](Vector a, Vector b) { return a + b; });
        factors_[row] = power_of_two(best_[row] - base);
        total_[row] = total_[row] * factors_[row] + sum;
        best_[row] = best;
        Operands::lay_row(scores, weights_.data() + row * chunk / Operands::per_unit, chunk);
    }

    // Scores become hyperbolic tangents of the scaled ones over the cap, which is then their scale.
    void cap(float* scores) const {
        const float factor = 2.0f * log2e * shape_.scale / shape_.softcap;
#pragma omp simd
        for (int i = 0; i < chunk; i++) scores[i] = 1.0f - 2.0f / (power_of_two(scores[i] * factor) + 1.0f);
    }

    const Shape& shape_;
    const int head_dim_, depth_, width_;
    std::vector<Unit> queries_, keys_, values_, weights_;
    std::vector<float> scores_, sums_, best_, total_, factors_;
};

template <typename T>
void attend(const T* q, const T* k_cache, const T* v_cache, T* out, const Batch& batch, const Shape& shape,
            int num_threads) {
    const std::vector<Tile> tiles = paged::cut(batch, shape, most_queries, 1);
    threads::share(int64_t(tiles.size()), num_threads, [&](threads::Pieces& pieces) {
        Worker<T> worker(shape, paged::most_tokens(tiles) * shape.group());
        for (int64_t i; (i = pieces.take()) >= 0;) worker.run(tiles[i], q, k_cache, v_cache, out);
    });
}

}  // namespace

#define FOR_DTYPE(T, SUFFIX)                                                                                          \
    extern "C" void attend_##SUFFIX(const T* q, const paged::Cache* cache, T* out, const int64_t* query_starts,       \
                                    const int64_t* context_lens, const int32_t* tables, const float* sinks,           \
                                    int64_t table_stride, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,  \
                                    int64_t head_dim, int64_t block_size, int64_t window, int64_t token_stride,       \
                                    float scale, float softcap, int num_threads) {                                    \
        const Batch batch{query_starts, context_lens, tables, table_stride, num_rows};                                \
        const Shape shape{num_heads, num_kv_heads, head_dim, block_size, window, token_stride, scale, softcap, sinks}; \
        if (cache->kind != paged::as_queries) return paged::attend_rounded(q, *cache, out, batch, shape, num_threads); \
        attend(q, static_cast<const T*>(cache->keys), static_cast<const T*>(cache->values), out, batch, shape,        \
               num_threads);                                                                                          \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bfloat16, bfloat16)
