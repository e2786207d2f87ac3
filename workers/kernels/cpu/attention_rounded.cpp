// Attention over pages (attention.h) whose keys and values have 8 bits, with an online softmax as in attention.cpp.
//
//     scores = (Q K^T) x scales of keys ──▶ weights ──▶ weights x scales of values ──▶ sums += weights V
//
// Nothing is transposed: a score is the sum of a query's lanes times a key's, folded at the end, and a value is multiplied
// in the row in which it lies. A few queries, as those of a token that decodes, read keys and values in their pages, and
// widen each number once, in registers. For many queries they are widened beforehand. The sums are the same, lane by lane
// and key by key: a token has the same bits whether it decodes or is prefilled with others.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "attention_rounded.h"
#include "threads.h"

namespace {

using paged::Batch, paged::Cache, paged::chunk, paged::infinity, paged::Shape, paged::Tile;
using vectors::fold, vectors::greater, vectors::lanes, vectors::store, vectors::Vector;

constexpr int most_queries = 96;    // of a tile: its buffers stay in a core's second-level cache
constexpr int rows_together = 4;    // whose products with two keys, or two vectors of a value, fill the registers
constexpr int most_columns = 4;     // vectors of a value that a query takes together
constexpr int few_queries = 4;      // that widen what they read
constexpr int near_keys = 16;       // that stay in the first-level cache while all queries are multiplied with them

typedef float Eight __attribute__((vector_size(32), aligned(4)));

inline Eight halved(Vector x) {
#ifdef __AVX512F__
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    return x;
#endif
}

// The sum of each vector's lanes, all in the same order.
inline Eight sums_of(const Vector (&x)[8]) {
    Eight two[4], four[2];
    for (int i = 0; i < 4; i++) {
        const Eight a = halved(x[2 * i]), b = halved(x[2 * i + 1]);
        two[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 2; i++)
        four[i] = __builtin_shufflevector(two[2 * i], two[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  __builtin_shufflevector(two[2 * i], two[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// The scales of a chunk's keys and values of one head, 0 outside of the tile's visible positions [first, stop).
struct Scales {
    float k_scales[chunk], v_scales[chunk];
    int first = 0, stop = 0;
};

// And where the chunk lies. What is not visible is a row of zeros.
template <typename E>
struct RoundedPlaces : Scales {
    const E *keys[chunk], *values[chunk];

    RoundedPlaces(const Shape& shape, const Tile& tile, int64_t start, const Cache& cache, const E* zeros) {
        stop = int(std::clamp<int64_t>(tile.stop() - start, 0, chunk));
        first = int(std::clamp<int64_t>(tile.first_key(shape) - start, 0, stop));
        for (int i = 0; i < chunk; i++)
            if (i < first || i >= stop) keys[i] = values[i] = zeros, k_scales[i] = v_scales[i] = 0.0f;
        for (int i = first; i < stop;) {
            const int64_t page = (start + i) / shape.block_size, offset = (start + i) % shape.block_size;
            const int64_t head = int64_t(tile.table[page]) * shape.num_kv_heads + tile.kv_head;
            const int64_t in_page = std::min<int64_t>(shape.block_size - offset, stop - i);
            const int64_t at = head * shape.block_size + offset;
            for (int64_t j = 0; j < in_page; j++, i++) {
                keys[i] = static_cast<const E*>(cache.keys) + (at + j) * shape.head_dim;
                values[i] = static_cast<const E*>(cache.values) + (at + j) * shape.head_dim;
                const int64_t scale = cache.kind == paged::int8 ? at + j : tile.kv_head;
                k_scales[i] = cache.k_scales[scale] * rounded::factor<E>;
                v_scales[i] = cache.v_scales[scale] * rounded::factor<E>;
            }
        }
    }
};

// The softmax of some queries, the rows: a tile's tokens, and of each its heads.
class Softmax {
  public:
    Softmax(const Shape& shape, int64_t max_rows)
        : shape_(shape),
          head_dim_(int(shape.head_dim)),
          width_((head_dim_ + most_columns * lanes - 1) / (most_columns * lanes) * most_columns * lanes),
          queries_((max_rows + rows_together) * width_),
          scores_((max_rows + rows_together) * chunk),
          sums_((max_rows + rows_together) * width_),
          best_(max_rows),
          total_(max_rows),
          factors_(max_rows + rows_together) {}

    // Queries are laid out as rows of floats that end in zeros.
    template <typename T>
    void begin(const Tile& tile, const T* q, int num_rows) {
        const int64_t group = shape_.group();
        const int padded = (num_rows + rows_together - 1) / rows_together * rows_together;
        std::fill_n(queries_.begin(), padded * width_, 0.0f);
        std::fill_n(sums_.begin(), padded * width_, 0.0f);
        std::fill_n(total_.begin(), num_rows, shape_.first_total());
        for (int row = 0; row < num_rows; row++) {
            const T* from = q + tile.place(shape_, row / group, row % group);
            for (int d = 0; d < head_dim_; d++) queries_[row * width_ + d] = widen(from[d]);
            best_[row] = shape_.first_best(tile.kv_head * group + row % group);
        }
    }

    template <typename T>
    void finish(const Tile& tile, T* out, int num_rows) const {
        const int64_t group = shape_.group();
        for (int row = 0; row < num_rows; row++) {
            T* to = out + tile.place(shape_, row / group, row % group);
            const float factor = 1.0f / total_[row];
            for (int d = 0; d < head_dim_; d++) to[d] = narrow<T>(sums_[row * width_ + d] * factor);
        }
    }

    // A chunk's keys and values, of 8 bits or floats, in rows of `width` numbers.
    template <typename F>
    void look_at(const Tile& tile, int64_t start, const Scales& places, const F* const* keys,
                 const F* const* values, int num_rows) {
        const int64_t group = shape_.group();
        for (int key = 0; key < chunk; key += near_keys)
            if (num_rows == 1) score<1>(0, keys, key);
            else if (num_rows == 2) score<2>(0, keys, key);
            else for (int row = 0; row < num_rows; row += rows_together) score<rows_together>(row, keys, key);
        for (int row = 0; row < num_rows; row++) {
            const int64_t position = tile.position + row / group;
            const int64_t first = std::max<int64_t>(0, shape_.first_visible(position) - start);
            const int64_t last = std::min<int64_t>(places.stop, position + 1 - start);
            weigh(row, int(first), int(std::max<int64_t>(0, last)), places);
        }
        if (num_rows <= 2) add<4>(num_rows, values);
        else add<2>(num_rows, values);
    }

    int width() const { return width_; }

  private:
    // Scores of `rows` queries and `near_keys` keys, not yet scaled.
    template <int rows, typename F>
    void score(int row, const F* const* keys, int first) {
        constexpr int together = 8 / rows;
        const float* queries = queries_.data() + row * width_;
        for (int key = first; key < first + near_keys; key += together) {
            Vector sums[8] = {};
            for (int d = 0; d < width_; d += lanes) {
                Vector wide[together];
                for (int j = 0; j < together; j++) wide[j] = rounded::load(keys[key + j] + d);
                for (int i = 0; i < rows; i++) {
                    const Vector query = vectors::load(queries + i * width_ + d);
                    for (int j = 0; j < together; j++) sums[i * together + j] += query * wide[j];
                }
            }
            const Eight folded = sums_of(sums);
            for (int i = 0; i < rows; i++)
                std::memcpy(scores_.data() + (row + i) * chunk + key, reinterpret_cast<const float*>(&folded) + i * together,
                            together * sizeof(float));
        }
    }

    // Scores [first, last) of a row become weights relative to the best score so far, the others 0.
    void weigh(int row, int first, int last, const Scales& places) {
        float* scores = scores_.data() + row * chunk;
        const float to_log2 = shape_.to_log2();
        for (int i = 0; i < chunk; i++) scores[i] *= places.k_scales[i];
        if (shape_.softcap != 0.0f) cap(scores);
        if (first > 0 || last < chunk)
            for (int i = 0; i < chunk; i++) scores[i] = i >= first && i < last ? scores[i] : -infinity;
        Vector best_lanes = vectors::load(scores);
        for (int i = lanes; i < chunk; i += lanes) best_lanes = greater(best_lanes, vectors::load(scores + i));
        const float best = std::max(best_[row], fold(best_lanes, greater) * to_log2);
        const float base = best == -infinity ? 0.0f : best;  // nothing seen yet: all weights are 0
#pragma omp simd
        for (int i = 0; i < chunk; i++) scores[i] = power_of_two(scores[i] * to_log2 - base);
        Vector sum_lanes = vectors::load(scores);
        for (int i = lanes; i < chunk; i += lanes) sum_lanes += vectors::load(scores + i);
        const float sum = fold(sum_lanes, [](Vector a, Vector b) { return a + b; });
        factors_[row] = power_of_two(best_[row] - base);
        total_[row] = total_[row] * factors_[row] + sum;
        best_[row] = best;
        for (int i = 0; i < chunk; i++) scores[i] *= places.v_scales[i];
    }

    // Scores become hyperbolic tangents of the scaled ones over the cap, which is then their scale.
    void cap(float* scores) const {
        const float factor = 2.0f * log2e * shape_.scale / shape_.softcap;
#pragma omp simd
        for (int i = 0; i < chunk; i++) scores[i] = 1.0f - 2.0f / (power_of_two(scores[i] * factor) + 1.0f);
    }

    // Sums times their factors, plus weighted values, `columns` vectors of them at a time.
    template <int columns, typename F>
    void add(int num_rows, const F* const* values) {
        for (int d = 0; d < width_; d += columns * lanes) {
            int row = 0;
            for (; row + 6 <= num_rows && columns == 2; row += 6) add_columns<6, 2>(row, d, values);
            for (; row + 4 <= num_rows && columns == 2; row += 4) add_columns<4, 2>(row, d, values);
            for (; row + 2 <= num_rows; row += 2) add_columns<2, columns>(row, d, values);
            for (; row < num_rows; row++) add_columns<1, columns>(row, d, values);
        }
    }

    template <int rows, int columns, typename F>
    void add_columns(int row, int d, const F* const* values) {
        Vector sums[rows][columns];
        const float* weights = scores_.data() + row * chunk;
        float* to = sums_.data() + row * width_ + d;
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < columns; j++) sums[i][j] = vectors::load(to + i * width_ + j * lanes) * factors_[row + i];
        for (int key = 0; key < chunk; key++) {
            Vector wide[columns];
            for (int j = 0; j < columns; j++) wide[j] = rounded::load(values[key] + d + j * lanes);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < columns; j++) sums[i][j] += weights[i * chunk + key] * wide[j];
        }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < columns; j++) store(to + i * width_ + j * lanes, sums[i][j]);
    }

    const Shape& shape_;
    const int head_dim_, width_;
    std::vector<float> queries_, scores_, sums_, best_, total_, factors_;
};

// The state of one thread besides the tensors.
template <typename E>
class RoundedWorker {
  public:
    RoundedWorker(const Shape& shape, int64_t max_rows)
        : shape_(shape),
          head_dim_(int(shape.head_dim)),
          softmax_(shape, max_rows),
          zeros_(head_dim_ + 64),
          stride_(softmax_.width() + 16),
          keys_(chunk * stride_),
          values_(chunk * stride_) {}

    template <typename T>
    void run(const Tile& tile, const T* q, const Cache& cache, T* out) {
        const int num_rows = int(tile.num_tokens * shape_.group());
        const bool in_place = num_rows <= few_queries && softmax_.width() == head_dim_;
        softmax_.begin(tile, q, num_rows);
        int64_t start = tile.first_key(shape_) / chunk * chunk;
        for (RoundedPlaces<E> here(shape_, tile, start, cache, zeros_.data()); start < tile.stop(); start += chunk) {
            const RoundedPlaces<E> next(shape_, tile, start + chunk, cache, zeros_.data());
            fetch(next);  // pages are scattered: a processor cannot predict the next one
            if (in_place) {
                softmax_.look_at(tile, start, here, here.keys, here.values, num_rows);
            } else {
                const float *keys[chunk], *values[chunk];
                lay(here.keys, keys_.data(), keys);
                lay(here.values, values_.data(), values);
                softmax_.look_at(tile, start, here, keys, values, num_rows);
            }
            here = next;
        }
        softmax_.finish(tile, out, num_rows);
    }

  private:
    void fetch(const RoundedPlaces<E>& places) const {
        for (int i = places.first; i < places.stop; i++)
            for (int d = 0; d < head_dim_; d += 64) {
                __builtin_prefetch(places.keys[i] + d, 0, 2);
                __builtin_prefetch(places.values[i] + d, 0, 2);
            }
    }

    void lay(const E* const* from, float* to, const float** rows) const {
        for (int i = 0; i < chunk; i++) {
            rows[i] = to + i * stride_;
            for (int d = 0; d < head_dim_; d++) to[i * stride_ + d] = rounded::widen(from[i][d]);
        }
    }

    const Shape& shape_;
    const int head_dim_;
    Softmax softmax_;
    std::vector<E> zeros_;
    const int stride_;  // of floats, from row to row: rows a power of two apart would share few places of a cache
    std::vector<float> keys_, values_;
};

template <typename E, typename T>
void attend(const T* q, const Cache& cache, T* out, const Batch& batch, const Shape& shape, int num_threads) {
    const std::vector<Tile> tiles = paged::cut(batch, shape, most_queries, 1);
    threads::share(int64_t(tiles.size()), num_threads, [&](threads::Pieces& pieces) {
        RoundedWorker<E> worker(shape, paged::most_tokens(tiles) * shape.group());
        for (int64_t i; (i = pieces.take()) >= 0;) worker.run(tiles[i], q, cache, out);
    });
}

template <typename T>
void attend_any(const T* q, const Cache& cache, T* out, const Batch& batch, const Shape& shape, int num_threads) {
    if (cache.kind == paged::int8) attend<Int8>(q, cache, out, batch, shape, num_threads);
    else attend<E4m3>(q, cache, out, batch, shape, num_threads);
}

}  // namespace

void paged::attend_rounded(const float* q, const Cache& cache, float* out, const Batch& batch, const Shape& shape,
                           int num_threads) {
    attend_any(q, cache, out, batch, shape, num_threads);
}

void paged::attend_rounded(const bfloat16* q, const Cache& cache, bfloat16* out, const Batch& batch, const Shape& shape,
                           int num_threads) {
    attend_any(q, cache, out, batch, shape, num_threads);
}
