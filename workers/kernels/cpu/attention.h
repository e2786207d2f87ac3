// Attention over pages, the part that all instruction sets share: how a batch is cut into tiles, and where a tile's keys
// and values lie. A tile is a few neighbouring tokens of one sequence and one key/value head, each with the queries that
// share the head; or a single token, when it decodes, and several heads, whose keys are neighbours in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace paged {

constexpr int chunk = 64;  // keys processed together, from a multiple of it on, so that all queries process the same ones
constexpr float infinity = std::numeric_limits<float>::infinity();

struct Shape {
    int64_t num_heads, num_kv_heads, head_dim, block_size, window;  // window 0: none
    int64_t token_stride;  // elements from one token's queries to the next one's, and from output to output
    float scale, softcap;        // softcap 0: none
    const float* sinks;          // one more logit of each head's softmax, or null

    // The natural logarithm's units of a score, and those of its binary one.
    float to_log2() const { return (softcap == 0.0f ? scale : softcap) * log2e; }

    // The state of an online softmax before the first key. A sink is a logit without a value: it stands for the best score
    // so far, whose weight is 1.
    float first_best(int64_t head) const { return sinks == nullptr ? -infinity : sinks[head] * log2e; }
    float first_total() const { return sinks == nullptr ? 0.0f : 1.0f; }

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t first_visible(int64_t position) const {
        return window == 0 ? 0 : std::max<int64_t>(0, position + 1 - window);
    }
};

// Rows of the batch: row i has tokens [query_starts[i], query_starts[i + 1]), the last of which sees context_lens[i].
struct Batch {
    const int64_t *query_starts, *context_lens;
    const int32_t* tables;
    int64_t table_stride, num_rows;
};

// `num_tokens` tokens of a sequence from `position` on, the first of which is token `token` of the batch; key/value heads
// [kv_head, kv_head + num_kv_heads).
struct Tile {
    const int32_t* table;
    int64_t token, position, num_tokens, kv_head, num_kv_heads;

    int64_t first_key(const Shape& shape) const { return shape.first_visible(position); }
    int64_t stop() const { return position + num_tokens; }
    int64_t cost(const Shape& shape) const { return (stop() - first_key(shape)) * num_tokens * num_kv_heads; }

    // The offset of a token's query, in the queries and in the output, for the `nth_head` of the tile's heads.
    int64_t place(const Shape& shape, int64_t nth_token, int64_t nth_head) const {
        return (token + nth_token) * shape.token_stride + (kv_head * shape.group() + nth_head) * shape.head_dim;
    }
};

// The addresses of a chunk's keys and values of one head. They are null outside the tile's visible positions, where the
// memory belongs to another sequence or was never written.
template <typename T>
struct Places {
    const T *keys[chunk] = {}, *values[chunk] = {};
    int num_keys = 0;

    Places(const Shape& shape, const Tile& tile, int64_t nth_head, int64_t start, const T* k_cache, const T* v_cache) {
        num_keys = int(std::clamp<int64_t>(tile.stop() - start, 0, chunk));
        for (int i = int(std::max<int64_t>(0, tile.first_key(shape) - start)); i < num_keys;) {
            const int64_t page = (start + i) / shape.block_size, offset = (start + i) % shape.block_size;
            const int64_t head = int64_t(tile.table[page]) * shape.num_kv_heads + tile.kv_head + nth_head;
            const int64_t in_page = std::min<int64_t>(shape.block_size - offset, num_keys - i);
            const int64_t at = (head * shape.block_size + offset) * shape.head_dim;
            for (int64_t j = 0; j < in_page; j++, i++) {
                keys[i] = k_cache + at + j * shape.head_dim;
                values[i] = v_cache + at + j * shape.head_dim;
            }
        }
    }
};

// Tiles of at most `most_queries` each; tokens that decode have `heads_together`. The longest come first, so that no thread
// begins a long one at the end. Tiles of the same cost stay in the likely order of their pages.
inline std::vector<Tile> cut(const Batch& batch, const Shape& shape, int64_t most_queries, int64_t heads_together) {
    const int64_t tokens_of_tile = std::max<int64_t>(1, most_queries / shape.group());
    std::vector<Tile> tiles;
    for (int64_t row = 0; row < batch.num_rows; row++) {
        const int64_t start = batch.query_starts[row], num_tokens = batch.query_starts[row + 1] - start;
        const int64_t together = num_tokens == 1 ? heads_together : 1;
        for (int64_t at = 0; at < num_tokens; at += tokens_of_tile)
            for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; kv_head += together)
                tiles.push_back({batch.tables + row * batch.table_stride, start + at,
                                 batch.context_lens[row] - num_tokens + at, std::min(tokens_of_tile, num_tokens - at),
                                 kv_head, std::min(together, shape.num_kv_heads - kv_head)});
    }
    std::stable_sort(tiles.begin(), tiles.end(),
                     [&](const Tile& a, const Tile& b) { return a.cost(shape) > b.cost(shape); });
    return tiles;
}

inline int64_t most_tokens(const std::vector<Tile>& tiles) {
    int64_t most = 0;
    for (const Tile& tile : tiles) most = std::max(most, tile.num_tokens);
    return most;
}

}  // namespace paged
