// Attention over pages (attention.h) on the tiles of AMX (amx.h), with an online softmax as in attention.cpp.
//
// Everything is transposed. Queries are columns, sixteen to a block, so that the softmax of sixteen queries is arithmetic
// on whole vectors. A tile's keys are a left operand in the layout of their page.
//
//     keys [16 keys][32 of D] x queries [16 pairs of D][16 queries x 2] ──▶ scores [keys][queries] ──▶ weights, in pairs
//     values [16 of D][32 keys] x weights [16 pairs of keys][16 queries x 2] ──▶ sums [D][queries]
//
// Keys are copied and values transposed once for each chunk and tile of queries. Meanwhile the next chunk's pages are
// prefetched, a few lines at a time: all at once would queue. A single token that decodes uses attention_decode.h where
// it can.
#include "attention.h"

#include "amx.h"
#include "attention_decode.h"
#include "attention_rounded.h"
#include "softmax.h"
#include "threads.h"
#include "transpose.h"

#ifdef HAS_TILES
#include <cstring>
#include <limits>

namespace {

using paged::Batch, paged::chunk, paged::Shape, paged::Tile;
using paged::infinity, tiles::fence;
using Places = paged::Places<bfloat16>;

constexpr int columns = 16;           // queries of a block
constexpr int num_key_tiles = chunk / tiles::rows;
constexpr int num_key_steps = chunk / tiles::depth;
constexpr int64_t most_queries = 256;  // of a tile: a block's state between chunks stays in the second-level cache

// Prefetches a chunk's lines, of two keys and their values at a time.
class Fetch {
  public:
    Fetch(const Places* places, int64_t head_dim) : places_(places), head_dim_(head_dim) {}

    void some() {
        for (const int end = std::min(at_ + 2, places_ ? places_->num_keys : 0); at_ < end; at_++)
            for (int64_t d = 0; d < head_dim_; d += 32) {
                _mm_prefetch(places_->keys[at_] + d, _MM_HINT_T1);
                _mm_prefetch(places_->values[at_] + d, _MM_HINT_T1);
            }
    }

  private:
    const Places* places_;
    int64_t head_dim_;
    int at_ = 0;
};

// The state of one thread besides the tensors.
class Worker {
  public:
    Worker(const Shape& shape, int64_t num_blocks)
        : shape_(shape), depth_steps_(shape.head_dim / tiles::depth), value_tiles_(shape.head_dim / tiles::rows) {
        static thread_local Scratch<bfloat16> halves;
        static thread_local Scratch<float> floats;
        static thread_local Scratch<int64_t> integers;
        keys_ = halves.at_least((num_blocks + 2) * columns * shape.head_dim + 2 * chunk * shape.head_dim + 2 * tiles::size);
        values_ = keys_ + chunk * shape.head_dim;
        weights_ = values_ + chunk * shape.head_dim;
        queries_ = weights_ + num_key_steps * tiles::size;
        scores_ = floats.at_least(chunk * columns + num_blocks * columns * (shape.head_dim + 2));
        best_ = scores_ + chunk * columns;
        total_ = best_ + num_blocks * columns;
        sums_ = total_ + num_blocks * columns;
        places_ = integers.at_least(2 * num_blocks * columns);
        positions_ = places_ + num_blocks * columns;
    }

    // `following` is the thread's probable next tile, or null. The data of the next head, chunk or tile is prefetched
    // during the present one.
    void run(const Tile& tile, const Tile* following, const bfloat16* q, const bfloat16* k_cache,
             const bfloat16* v_cache, bfloat16* out) {
        const int64_t num_rows = tile.num_tokens * shape_.group(), num_blocks = (num_rows + columns - 1) / columns;
        begin(tile, q, num_rows, num_blocks);
        int64_t start = tile.first_key(shape_) / chunk * chunk, head = 0;
        for (Places here(shape_, tile, head, start, k_cache, v_cache); start < tile.stop();) {
            const bool wraps = head + 1 == tile.num_kv_heads;
            const int64_t next_head = wraps ? 0 : head + 1, next_start = wraps ? start + chunk : start;
            const bool ends = next_start >= tile.stop() && following != nullptr;
            const Places next(shape_, ends ? *following : tile, next_head,
                              ends ? following->first_key(shape_) / chunk * chunk : next_start, k_cache, v_cache);
            lay_keys(here);
            lay_values(here);
            fence();
            for (int64_t block = 0; block < num_blocks; block++) {
                Fetch fetch(block == 0 ? &next : nullptr, shape_.head_dim);
                look_at(start, here.num_keys, head * num_blocks + block, fetch);
            }
            here = next;
            head = next_head;
            start = next_start;
        }
        for (int64_t block = 0; block < tile.num_kv_heads * num_blocks; block++)
            finish(block, std::min<int64_t>(columns, num_rows - block % num_blocks * columns), out);
    }

  private:
    // Blocks are ordered by head, the queries of a head by token.
    void begin(const Tile& tile, const bfloat16* q, int64_t num_rows, int64_t num_blocks) {
        const int64_t group = shape_.group(), of_head = num_blocks * columns, all = tile.num_kv_heads * of_head;
        for (int64_t head = 0; head < tile.num_kv_heads; head++) {
            int64_t *places = places_ + head * of_head, *positions = positions_ + head * of_head;
            for (int64_t token = 0, row = 0; token < tile.num_tokens; token++)
                for (int64_t member = 0; member < group; member++, row++) {
                    places[row] = tile.place(shape_, token, head * group + member);
                    positions[row] = tile.position + token;
                    best_[head * of_head + row] = shape_.first_best((tile.kv_head + head) * group + member);
                }
            std::fill(positions + num_rows, positions + of_head, tile.stop() - 1);
            std::fill(best_ + head * of_head + num_rows, best_ + (head + 1) * of_head, -infinity);
            for (int64_t block = 0; block < num_blocks; block++)
                lay_queries(q, head * num_blocks + block, std::min<int64_t>(columns, num_rows - block * columns));
        }
        std::fill_n(total_, all, shape_.first_total());
        std::fill_n(sums_, all * shape_.head_dim, 0.0f);
    }

    // Sixteen queries, [16 pairs of D][16 queries x 2] for every 32 of D; missing ones are zeros.
    void lay_queries(const bfloat16* q, int64_t block, int64_t count) {
        for (int64_t step = 0; step < depth_steps_; step++) {
            __m512i rows[columns];
            for (int64_t i = 0; i < columns; i++)
                rows[i] = i < count ? _mm512_loadu_si512(q + places_[block * columns + i] + step * tiles::depth)
                                    : _mm512_setzero_si512();
            transpose(rows);
            bfloat16* to = queries_ + (block * depth_steps_ + step) * tiles::size;
            for (int i = 0; i < columns; i++) _mm512_store_si512(to + i * tiles::depth, rows[i]);
        }
    }

    void lay_keys(const Places& places) {
        for (int key = 0; key < chunk; key++)
            for (int64_t d = 0; d < shape_.head_dim; d += tiles::depth)
                _mm512_store_si512(keys_ + key * shape_.head_dim + d,
                                   places.keys[key] ? _mm512_loadu_si512(places.keys[key] + d) : _mm512_setzero_si512());
    }

    // [16 of D][32 keys] for every 32 keys and every 16 of D.
    void lay_values(const Places& places) {
        for (int step = 0; step < num_key_steps; step++)
            for (int64_t part = 0; part < value_tiles_; part++) {
                __m512i rows[tiles::rows];
                for (int i = 0; i < tiles::rows; i++) {
                    const bfloat16* const* pair = places.values + step * tiles::depth + 2 * i;
                    rows[i] = _mm512_or_si512(column(pair[0], part), _mm512_slli_epi32(column(pair[1], part), 16));
                }
                transpose(rows);
                bfloat16* to = values_ + (step * value_tiles_ + part) * tiles::size;
                for (int i = 0; i < tiles::rows; i++) _mm512_store_si512(to + i * tiles::depth, rows[i]);
            }
    }

    static __m512i column(const bfloat16* value, int64_t part) {
        return value ? _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + part * 16)))
                     : _mm512_setzero_si512();
    }

    void look_at(int64_t start, int num_keys, int64_t block, Fetch& fetch) {
        const int64_t first = positions_[block * columns], last = positions_[(block + 1) * columns - 1];
        if (start > last || start + chunk <= shape_.first_visible(first)) return;
        score(block);
        if (shape_.softcap != 0.0f) tiles::cap(scores_, columns, shape_);
        if (start + chunk - 1 > first || start < shape_.first_visible(last)) hide(start, num_keys, block);
        const __m512 factor = weigh(block, fetch);
        float* sums = sums_ + block * columns * shape_.head_dim;
        if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ))
            for (int64_t d = 0; d < shape_.head_dim; d++)
                _mm512_store_ps(sums + d * columns, _mm512_mul_ps(_mm512_load_ps(sums + d * columns), factor));
        fence();
        add_values(sums);
    }

    void score(int64_t block) {
        const bfloat16* queries = queries_ + block * depth_steps_ * tiles::size;
        const int64_t stride = shape_.head_dim * 2, tile = tiles::rows * shape_.head_dim;
        static_assert(num_key_tiles == 4);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < depth_steps_; step++) {
            const bfloat16* keys = keys_ + step * tiles::depth;
            _tile_loadd(7, queries + step * tiles::size, 64);
            _tile_loadd(4, keys, stride);
            _tile_dpbf16ps(0, 4, 7);
            _tile_loadd(5, keys + tile, stride);
            _tile_dpbf16ps(1, 5, 7);
            _tile_loadd(6, keys + 2 * tile, stride);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(4, keys + 3 * tile, stride);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, scores_, 64);
        _tile_stored(1, scores_ + 16 * columns, 64);
        _tile_stored(2, scores_ + 32 * columns, 64);
        _tile_stored(3, scores_ + 48 * columns, 64);
        fence();
    }

    // Scores of keys that are invisible to a query, or do not exist, become -infinity.
    void hide(int64_t start, int num_keys, int64_t block) {
        alignas(64) int32_t from[columns], to[columns];
        for (int i = 0; i < columns; i++) {
            const int64_t position = positions_[block * columns + i];
            from[i] = int32_t(std::clamp<int64_t>(shape_.first_visible(position) - start, 0, chunk));
            to[i] = int32_t(std::clamp<int64_t>(position + 1 - start, 0, num_keys));
        }
        const __m512i first = _mm512_load_si512(from), stop = _mm512_load_si512(to);
        for (int key = 0; key < chunk; key++) {
            const __m512i here = _mm512_set1_epi32(key);
            const __mmask16 seen = _mm512_cmple_epi32_mask(first, here) & _mm512_cmplt_epi32_mask(here, stop);
            float* scores = scores_ + key * columns;
            _mm512_store_ps(scores, _mm512_mask_blend_ps(seen, _mm512_set1_ps(-infinity), _mm512_load_ps(scores)));
        }
    }

    __m512 weigh(int64_t block, Fetch& fetch) {
        const auto put = [&](int pair, __m512 even, __m512 odd) {
            _mm512_store_si512(weights_ + pair * 2 * columns, tiles::in_pairs(even, odd));
        };
        return tiles::weigh(scores_, columns, shape_, best_ + block * columns, total_ + block * columns, put,
                            [&] { fetch.some(); });
    }

    // Two parts of D at a time: head sizes are multiples of 32.
    void add_values(float* sums) {
        for (int64_t part = 0; part < value_tiles_; part += 2) {
            float* here = sums + part * tiles::rows * columns;
            _tile_loadd(0, here, 64);
            _tile_loadd(1, here + tiles::rows * columns, 64);
            for (int step = 0; step < num_key_steps; step++) {
                const bfloat16* values = values_ + (step * value_tiles_ + part) * tiles::size;
                _tile_loadd(7, weights_ + step * tiles::size, 64);
                _tile_loadd(4, values, 64);
                _tile_dpbf16ps(0, 4, 7);
                _tile_loadd(5, values + tiles::size, 64);
                _tile_dpbf16ps(1, 5, 7);
            }
            _tile_stored(0, here, 64);
            _tile_stored(1, here + tiles::rows * columns, 64);
        }
        fence();
    }

    void finish(int64_t block, int64_t count, bfloat16* out) {
        const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(total_ + block * columns));
        for (int64_t part = 0; part < value_tiles_; part++) {
            const float* sums = sums_ + (block * shape_.head_dim + part * tiles::rows) * columns;
            __m512i rows[tiles::rows];
            for (int i = 0; i < tiles::rows; i++)
                rows[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(sums + i * columns), factor);
            transpose(rows);
            for (int64_t i = 0; i < count; i++)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + places_[block * columns + i] + part * 16),
                                    (__m256i)_mm512_cvtneps_pbh((__m512)rows[i]));
        }
    }

    const Shape& shape_;
    const int64_t depth_steps_, value_tiles_;
    bfloat16 *keys_, *values_, *weights_, *queries_;
    float *scores_, *best_, *total_, *sums_;
    int64_t *places_, *positions_;  // of each query
};

void attend(const bfloat16* q, const bfloat16* k_cache, const bfloat16* v_cache, bfloat16* out, const Batch& batch,
            const Shape& shape, int num_threads) {
    // As many heads together as leave each thread two tiles.
    const int64_t splits = std::max<int64_t>(1, (2 * num_threads + batch.num_rows - 1) / batch.num_rows);
    const int64_t heads_together = std::max<int64_t>(1, shape.num_kv_heads / splits);
    const std::vector<Tile> tiles = paged::cut(batch, shape, most_queries, heads_together);
    const int64_t num_tiles = int64_t(tiles.size());
    int64_t num_blocks = 0;
    for (const Tile& tile : tiles)
        num_blocks = std::max(num_blocks, (tile.num_tokens * shape.group() + columns - 1) / columns * tile.num_kv_heads);
    threads::share(num_tiles, num_threads, [&](threads::Pieces& pieces) {
        tiles::Registers registers;
        Worker worker(shape, num_blocks);
        paged::Decoder decoder(shape);
        for (int64_t i; (i = pieces.take()) >= 0;)
            if (paged::decodes(shape, tiles[i])) {
                const int64_t later = i + num_threads;
                registers.shape_for_decoding(decoder.width());
                decoder.run(tiles[i], later < num_tiles ? &tiles[later] : nullptr, q, k_cache, v_cache, out);
            } else {
                registers.shape(tiles::rows, tiles::rows);
                worker.run(tiles[i], i + 1 < num_tiles ? &tiles[i + 1] : nullptr, q, k_cache, v_cache, out);
            }
    });
}

}  // namespace
#endif

// As attend_bfloat16 of attention.cpp, for head sizes that are multiples of 32.
extern "C" void attend_tiles(const bfloat16* q, const paged::Cache* cache, bfloat16* out, const int64_t* query_starts,
                             const int64_t* context_lens, const int32_t* tables, const float* sinks, int64_t table_stride,
                             int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                             int64_t block_size, int64_t window, int64_t token_stride, float scale, float softcap,
                             int num_threads) {
#ifdef HAS_TILES
    const Batch batch{query_starts, context_lens, tables, table_stride, num_rows};
    const Shape shape{num_heads, num_kv_heads, head_dim, block_size, window, token_stride, scale, softcap, sinks};
    if (cache->kind != paged::as_queries) return paged::attend_rounded(q, *cache, out, batch, shape, num_threads);
    attend(q, static_cast<const bfloat16*>(cache->keys), static_cast<const bfloat16*>(cache->values), out, batch, shape,
           num_threads);
#endif
}
