// Latent attention over pages: all query heads share one key of `width` numbers, whose first `value_dim` are its value.
//
// A tile has neighbouring tokens of one sequence, and neighbouring heads of them; a query is a row. It walks over the keys
// it may see, `chunk` at a time, with an online softmax as in attention.cpp:
//
//     keys, page by page ──▶ floats [chunk][width] ──▶ scores = Q K^T ──▶ weights ──▶ sums += weights K[.., value_dim]
//
// Keys are widened once and serve both products. A number's sum is taken in one order for every tile, so a token has the
// same bits whether it decodes or is prefilled with others.
#include <algorithm>
#include <vector>

#include "numbers.h"
#include "threads.h"

namespace {

#ifdef __AVX512F__
constexpr int lanes = 16;
#else
constexpr int lanes = 8;
#endif
constexpr int chunk = 64;        // keys, from a multiple of it on
constexpr int most_rows = 32;    // of a tile: its queries, sums and keys stay in a core's second-level cache
constexpr int prefill_heads = 8;  // of a tile with several tokens

constexpr float infinity = std::numeric_limits<float>::infinity();

typedef float Vector __attribute__((vector_size(lanes * 4), aligned(4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }
inline Vector load(const bfloat16* from) {
    typedef uint16_t Halves __attribute__((vector_size(lanes * 2), aligned(2)));
    typedef uint32_t Bits __attribute__((vector_size(lanes * 4)));
    return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16);
}

template <typename Combine>
float fold(Vector x, Combine combine) {
    for (int half = lanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] = combine(x[i], x[i + half]);
    return x[0];
}

inline float sum_of(Vector x) {
    return fold(x, [](float a, float b) { return a + b; });
}

template <typename T>
void widen_row(const T* from, float* to, int size) {
    for (int i = 0; i < size; i++) to[i] = widen(from[i]);
}

// scores[rows][keys] of queries and keys with `depth` numbers each, a multiple of `lanes`.
template <int rows, int keys>
void score(const float* q, const float* k, int depth, float* scores) {
    Vector sums[rows][keys] = {};
    for (int d = 0; d < depth; d += lanes)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < keys; j++) sums[i][j] += load(q + i * depth + d) * load(k + j * depth + d);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < keys; j++) scores[i * chunk + j] = sum_of(sums[i][j]);
}

// out[rows][vectors] = out * factors + left[rows][depth] right[depth][vectors]; without factors out starts at 0.
template <int rows, int vectors, typename T>
void add(const float* left, int left_stride, const T* right, int64_t right_stride, int depth, float* out, int out_stride,
         const float* factors) {
    Vector sums[rows][vectors] = {};
    if (factors != nullptr)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < vectors; j++) sums[i][j] = factors[i] * load(out + i * out_stride + j * lanes);
    for (int k = 0; k < depth; k++)
        for (int j = 0; j < vectors; j++) {
            const Vector here = load(right + k * right_stride + j * lanes);
            for (int i = 0; i < rows; i++) sums[i][j] += left[i * left_stride + k] * here;
        }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) store(out + i * out_stride + j * lanes, sums[i][j]);
}

// The same for any number of rows, and of columns in whole vectors.
template <typename T>
void add_all(int num_rows, int width, const float* left, int left_stride, const T* right, int64_t right_stride, int depth,
             float* out, int out_stride, const float* factors) {
    const auto take = [&](auto* some, int row, int column) {
        some(left + row * left_stride, left_stride, right + column, right_stride, depth, out + row * out_stride + column,
             out_stride, factors ? factors + row : nullptr);
    };
    int column = 0;
    for (; column + 2 * lanes <= width; column += 2 * lanes) {
        int row = 0;
        for (; row + 4 <= num_rows; row += 4) take(add<4, 2, T>, row, column);
        for (; row < num_rows; row++) take(add<1, 2, T>, row, column);
    }
    for (; column < width; column += lanes)
        for (int row = 0; row < num_rows; row++) take(add<1, 1, T>, row, column);
}

struct Shape {
    int64_t num_heads, width, value_dim, block_size, q_stride, out_stride;
    float scale;
};

// Tokens [token, token + num_tokens) of the batch, at `position` and after it, and their heads from `head` on.
struct Tile {
    const int32_t* table;
    int64_t token, position, num_tokens, head, num_heads;

    int64_t stop() const { return position + num_tokens; }
    int64_t num_rows() const { return num_tokens * num_heads; }
    int64_t cost() const { return stop() * num_rows(); }
};

// The longest tiles come first. Tokens that decode are cut by heads into two tiles a thread, if they are few.
std::vector<Tile> cut(const int64_t* starts, const int64_t* lens, const int32_t* tables, int64_t table_stride,
                      int64_t num_rows, int64_t num_heads, int num_threads) {
    const int64_t splits = std::max<int64_t>(1, (2 * num_threads + num_rows - 1) / num_rows);
    const int64_t alone = std::clamp<int64_t>((num_heads / splits + 3) / 4 * 4, 1, most_rows);
    std::vector<Tile> tiles;
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t num_tokens = starts[row + 1] - starts[row];
        const int64_t heads = std::min<int64_t>(num_tokens == 1 ? alone : prefill_heads, num_heads);
        const int64_t together = std::max<int64_t>(1, most_rows / heads);
        for (int64_t at = 0; at < num_tokens; at += together)
            for (int64_t head = 0; head < num_heads; head += heads)
                tiles.push_back({tables + row * table_stride, starts[row] + at, lens[row] - num_tokens + at,
                                 std::min(together, num_tokens - at), head, std::min(heads, num_heads - head)});
    }
    std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.cost() > b.cost(); });
    return tiles;
}

int whole(int64_t size) { return int((size + lanes - 1) / lanes * lanes); }

// The state of one thread besides the tensors. What pads a row to whole vectors is 0.
template <typename T>
class Worker {
  public:
    explicit Worker(const Shape& shape)
        : shape_(shape), depth_(whole(shape.width)), value_width_(whole(shape.value_dim)), queries_(most_rows * depth_),
          keys_(chunk * depth_), scores_(most_rows * chunk), sums_(most_rows * value_width_) {}

    void run(const Tile& tile, const T* q, const T* cache, T* out) {
        const int num_rows = int(tile.num_rows());
        for (int row = 0; row < num_rows; row++)
            widen_row(q + place(tile, row, shape_.q_stride, shape_.width), queries_.data() + row * depth_, shape_.width);
        std::fill_n(sums_.begin(), num_rows * value_width_, 0.0f);
        std::fill_n(best_, num_rows, -infinity);
        std::fill_n(total_, num_rows, 0.0f);
        for (int64_t start = 0; start < tile.stop(); start += chunk) look_at(tile, start, cache, num_rows);
        for (int row = 0; row < num_rows; row++) {
            T* to = out + place(tile, row, shape_.out_stride, shape_.value_dim);
            const float factor = 1.0f / total_[row];
            for (int d = 0; d < shape_.value_dim; d++) to[d] = narrow<T>(sums_[row * value_width_ + d] * factor);
        }
    }

  private:
    int64_t place(const Tile& tile, int row, int64_t token_stride, int64_t head_size) const {
        return (tile.token + row / tile.num_heads) * token_stride + (tile.head + row % tile.num_heads) * head_size;
    }

    void look_at(const Tile& tile, int64_t start, const T* cache, int num_rows) {
        const int num_keys = int(std::min<int64_t>(chunk, tile.stop() - start));
        for (int key = 0; key < num_keys; key++) {
            const int64_t position = start + key, page = tile.table[position / shape_.block_size];
            const int64_t at = page * shape_.block_size + position % shape_.block_size;
            widen_row(cache + at * shape_.width, keys_.data() + key * depth_, shape_.width);
        }
        std::fill_n(keys_.begin() + num_keys * depth_, (chunk - num_keys) * depth_, 0.0f);
        for (int key = 0; key < num_keys; key += 2) {
            const float* keys = keys_.data() + key * depth_;
            int row = 0;
            for (; row + 4 <= num_rows; row += 4)
                score<4, 2>(queries_.data() + row * depth_, keys, depth_, scores_.data() + row * chunk + key);
            for (; row < num_rows; row++)
                score<1, 2>(queries_.data() + row * depth_, keys, depth_, scores_.data() + row * chunk + key);
        }
        for (int row = 0; row < num_rows; row++) {
            const int64_t position = tile.position + row / tile.num_heads;
            weigh(row, int(std::clamp<int64_t>(position + 1 - start, 0, num_keys)));
        }
        add_all(num_rows, value_width_, scores_.data(), chunk, keys_.data(), depth_, chunk, sums_.data(), value_width_,
                factors_);
    }

    // Scores before `stop` become weights relative to the best score so far, the others 0.
    void weigh(int row, int stop) {
        float* scores = scores_.data() + row * chunk;
        const float to_log2 = shape_.scale * log2e;
        float best = best_[row];
        for (int i = 0; i < stop; i++) best = std::max(best, scores[i] * to_log2);
        const float base = best == -infinity ? 0.0f : best;  // nothing seen yet: all weights are 0
#pragma omp simd
        for (int i = 0; i < chunk; i++) scores[i] = i < stop ? power_of_two(scores[i] * to_log2 - base) : 0.0f;
        Vector sums = load(scores);
        for (int i = lanes; i < chunk; i += lanes) sums += load(scores + i);
        factors_[row] = power_of_two(best_[row] - base);
        total_[row] = total_[row] * factors_[row] + sum_of(sums);
        best_[row] = best;
    }

    const Shape& shape_;
    const int depth_, value_width_;
    std::vector<float> queries_, keys_, scores_, sums_;
    float best_[most_rows], total_[most_rows], factors_[most_rows];
};

template <typename T>
void attend(const T* q, const T* cache, T* out, const std::vector<Tile>& tiles, const Shape& shape, int num_threads) {
    threads::share(int64_t(tiles.size()), num_threads, [&](threads::Pieces& pieces) {
        Worker<T> worker(shape);
        for (int64_t i; (i = pieces.take()) >= 0;) worker.run(tiles[i], q, cache, out);
    });
}

// out[T][N][outputs] of x[T][N][inputs], each with strides of tokens and heads, and a matrix [inputs][outputs] for each head.
template <typename T>
void multiply(const T* x, const T* weight, T* out, int64_t num_tokens, int64_t num_heads, int64_t inputs, int64_t outputs,
              int64_t token_stride, int64_t head_stride, int64_t out_token_stride, int64_t out_head_stride, int num_threads) {
    const int64_t num_blocks = (num_tokens + most_rows - 1) / most_rows, num_parts = num_blocks * num_heads;
    const int64_t vectors = outputs / lanes * lanes;
    threads::share(num_parts, num_threads, [&](threads::Pieces& pieces) {
        std::vector<float> left(most_rows * inputs), sums(most_rows * outputs);
        for (int64_t i; (i = pieces.take()) >= 0;) {
            const int64_t head = i / num_blocks, first = i % num_blocks * most_rows;
            const int count = int(std::min<int64_t>(most_rows, num_tokens - first));
            const T* right = weight + head * inputs * outputs;
            for (int row = 0; row < count; row++)
                widen_row(x + (first + row) * token_stride + head * head_stride, left.data() + row * inputs, int(inputs));
            add_all(count, int(vectors), left.data(), int(inputs), right, outputs, int(inputs), sums.data(), int(outputs),
                    nullptr);
            for (int row = 0; row < count; row++) {
                float* here = sums.data() + row * outputs;
                for (int64_t column = vectors; column < outputs; column++) {
                    float sum = 0.0f;
                    for (int64_t k = 0; k < inputs; k++) sum += left[row * inputs + k] * widen(right[k * outputs + column]);
                    here[column] = sum;
                }
                T* to = out + (first + row) * out_token_stride + head * out_head_stride;
                for (int64_t column = 0; column < outputs; column++) to[column] = narrow<T>(here[column]);
            }
        }
    });
}

}  // namespace

#define FOR_DTYPE(T, SUFFIX)                                                                                          \
    extern "C" void attend_latent_##SUFFIX(const T* q, const T* cache, T* out, const int64_t* query_starts,           \
                                           const int64_t* context_lens, const int32_t* tables, int64_t table_stride,  \
                                           int64_t num_rows, int64_t num_heads, int64_t width, int64_t value_dim,     \
                                           int64_t block_size, int64_t q_stride, int64_t out_stride, float scale,     \
                                           int num_threads) {                                                         \
        const auto tiles = cut(query_starts, context_lens, tables, table_stride, num_rows, num_heads, num_threads);   \
        attend(q, cache, out, tiles, {num_heads, width, value_dim, block_size, q_stride, out_stride, scale},          \
               num_threads);                                                                                          \
    }                                                                                                                 \
    extern "C" void head_products_##SUFFIX(const T* x, const T* weight, T* out, int64_t num_tokens,                   \
                                           int64_t num_heads, int64_t inputs, int64_t outputs, int64_t token_stride,  \
                                           int64_t head_stride, int64_t out_token_stride, int64_t out_head_stride,    \
                                           int num_threads) {                                                         \
        multiply(x, weight, out, num_tokens, num_heads, inputs, outputs, token_stride, head_stride, out_token_stride, \
                 out_head_stride, num_threads);                                                                       \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bfloat16, bfloat16)
