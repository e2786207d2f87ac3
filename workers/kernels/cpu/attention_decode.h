// Attention of a single token over pages of a multiple of 16 positions, on the tiles of AMX (amx.h). It is bound by
// memory, so keys are multiplied in place, every column has a query, and pages are read in their order in memory.
//
//     keys [16 keys][32 of D], in their page x queries [16 pairs of D][queries x 2] ──▶ scores [keys][heads x queries]
//     scores ──▶ weights [heads x queries][32 keys] x values [16 pairs of keys][16 of D x 2] ──▶ sums [queries][D]
//
// A page's 16 positions of one head are a piece. A chunk is four pieces deep and all heads wide: first its keys, then the
// softmax, then its values. While keys are multiplied, the values after them are prefetched; while values are multiplied,
// the next chunk's keys. A few lines are prefetched at a time: all at once would queue, and delay the computation.
//
// Every number is rounded as in attention_tiles.cpp: a token gets the same bits whether it is decoded or prefilled with
// others. So an answer that is recomputed on another worker continues with the same tokens.
#pragma once

#include "attention.h"

#include "amx.h"
#include "softmax.h"
#include "transpose.h"

#ifdef HAS_TILES
#include <bit>

namespace paged {

constexpr int piece = 16;                  // keys of a page that are processed together
constexpr int num_pieces = chunk / piece;  // of a chunk
constexpr int64_t most_decoding_group = 16;  // queries that share a head

inline bool decodes(const Shape& shape, const Tile& tile) {
    return tile.num_tokens == 1 && shape.block_size % piece == 0 && shape.group() <= most_decoding_group;
}

// Always inlined: a compiler treats a function that only prefetches as one without effect.
__attribute__((always_inline)) inline void ask_for(const bfloat16* line) {
    _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
}

// The addresses of a chunk's pieces of a tile's first head. A piece without a visible key is null.
struct Pieces {
    const bfloat16 *keys[num_pieces] = {}, *values[num_pieces] = {};

    Pieces(const Shape& shape, const Tile& tile, int64_t start, const bfloat16* k_cache, const bfloat16* v_cache) {
        for (int nth = 0; nth < num_pieces; nth++) {
            const int64_t position = start + nth * piece;
            if (position >= tile.stop() || position + piece <= tile.first_key(shape)) continue;
            const int64_t page = tile.table[position / shape.block_size];
            const int64_t head = page * shape.num_kv_heads + tile.kv_head;
            const int64_t at = (head * shape.block_size + position % shape.block_size) * shape.head_dim;
            keys[nth] = k_cache + at;
            values[nth] = v_cache + at;
        }
    }
};

// The state of one thread besides the tensors.
class Decoder {
  public:
    explicit Decoder(const Shape& shape)
        : shape_(shape), group_(int(shape.group())), width_(int(std::bit_ceil(uint64_t(group_)))),
          apart_(shape.block_size * shape.head_dim) {
        static thread_local Scratch<float> floats;
        static thread_local Scratch<bfloat16> halves;
        const int64_t heads = shape.num_kv_heads, lanes = (heads * width_ + 15) / 16 * 16, size = shape.head_dim;
        scores_ = floats.at_least(lanes * (chunk + 3) + heads * width_ * size);
        best_ = scores_ + lanes * chunk;
        total_ = best_ + lanes;
        factors_ = total_ + lanes;
        sums_ = factors_ + lanes;
        weights_ = halves.at_least(lanes * chunk + heads * 32 * size / 2 * 2 + 32 * size);
        queries_ = weights_ + lanes * chunk;
        values_ = queries_ + heads * 32 * size / 2;
    }

    int width() const { return width_; }

    // The registers are shaped for `width`. `following` is the thread's probable next tile, or null.
    void run(const Tile& tile, const Tile* following, const bfloat16* q, const bfloat16* k_cache, const bfloat16* v_cache,
             bfloat16* out) {
        begin(tile, q);
        const int64_t first = tile.first_key(shape_), heads = tile.num_kv_heads;
        int64_t start = first / chunk * chunk;
        for (Pieces here(shape_, tile, start, k_cache, v_cache); start < tile.stop(); start += chunk) {
            const bool ends = start + chunk >= tile.stop();
            const Tile& after = ends && following != nullptr ? *following : tile;
            const int64_t then = ends ? after.first_key(shape_) / chunk * chunk : start + chunk;
            const Pieces next(shape_, after, then, k_cache, v_cache);
            const int from = int(std::max<int64_t>(0, first - start));
            const int to = int(std::min<int64_t>(chunk, tile.stop() - start));
            for (int nth = 0; nth < num_pieces; nth++)
                if (here.keys[nth] != nullptr)
                    for (int64_t head = 0; head < heads; head++)
                        score(here.keys[nth] + head * apart_, here.values[nth] + head * apart_, head, nth);
            tiles::fence();
            if (shape_.softcap != 0.0f)
                for (int64_t lane = 0; lane < lanes_; lane += 16) tiles::cap(scores_ + lane, lanes_, shape_);
            if (from > 0 || to < chunk) hide(from, to);
            weigh(heads);
            for (int step = 0; step < chunk / tiles::depth; step++)
                for (int64_t head = 0; head < heads; head++) add(here, next, head, step, from, to);
            here = next;
        }
        for (int64_t head = 0; head < heads; head++) finish(tile, head, out);
    }

  private:
    // Queries as [16 pairs of D][16 queries x 2] for every 32 of D; missing ones are zeros.
    void begin(const Tile& tile, const bfloat16* q) {
        const int64_t heads = tile.num_kv_heads, of_head = 16 * shape_.head_dim / 2;
        lanes_ = (heads * width_ + 15) / 16 * 16;
        uint32_t* to = reinterpret_cast<uint32_t*>(queries_);
        std::fill_n(to, heads * of_head, 0u);
        for (int64_t head = 0; head < heads; head++)
            for (int member = 0; member < group_; member++) {
                const auto* pairs = reinterpret_cast<const uint32_t*>(q + tile.place(shape_, 0, head * group_ + member));
                for (int64_t pair = 0; pair < shape_.head_dim / 2; pair++)
                    to[head * of_head + pair * 16 + member] = pairs[pair];
            }
        std::fill_n(scores_, lanes_ * chunk, 0.0f);
        std::fill_n(best_, lanes_, -infinity);
        for (int64_t head = 0; head < heads; head++)
            for (int member = 0; member < group_; member++)
                best_[head * width_ + member] = shape_.first_best((tile.kv_head + head) * group_ + member);
        std::fill_n(total_, lanes_, shape_.first_total());
        std::fill_n(sums_, heads * width_ * shape_.head_dim, 0.0f);
        tiles::fence();
    }

    // Meanwhile the values of the same piece are prefetched.
    void score(const bfloat16* keys, const bfloat16* values, int64_t head, int nth) {
        const bfloat16* queries = queries_ + head * 32 * shape_.head_dim / 2;
        _tile_zero(0);
        for (int64_t d = 0; d < shape_.head_dim; d += tiles::depth) {
            for (int line = 0; line < piece; line++) ask_for(values + d * piece + line * tiles::depth);
            _tile_loadd(4, keys + d, shape_.head_dim * 2);
            _tile_loadd(6, queries + d * 16, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores_ + nth * piece * lanes_ + head * width_, lanes_ * 4);
    }

    // Scores of keys outside [from, to), which are invisible to the token or do not exist, become -infinity.
    void hide(int from, int to) {
        std::fill(scores_, scores_ + from * lanes_, -infinity);
        std::fill(scores_ + to * lanes_, scores_ + chunk * lanes_, -infinity);
    }

    // Of all heads, sixteen queries at a time; weights stand by query.
    void weigh(int64_t heads) {
        for (int64_t lane = 0; lane < lanes_; lane += 16) {
            __m512i pairs[16];
            const auto put = [&](int pair, __m512 even, __m512 odd) {
                pairs[pair % 16] = tiles::in_pairs(even, odd);
                if (pair % 16 < 15) return;
                transpose(pairs);
                for (int i = 0; i < 16; i++)
                    _mm512_store_si512(weights_ + (lane + i) * chunk + pair / 16 * tiles::depth, pairs[i]);
            };
            const __m512 factor =
                tiles::weigh(scores_ + lane, lanes_, shape_, best_ + lane, total_ + lane, put, [] {});
            _mm512_store_ps(factors_ + lane, factor);
            if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ))
                for (int64_t i = lane; i < std::min(lane + 16, heads * width_); i++)
                    for (float *sum = sums_ + i * shape_.head_dim, *end = sum + shape_.head_dim; sum < end; sum += 16)
                        _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), _mm512_set1_ps(factors_[i])));
        }
    }

    // The values of 32 keys, two pieces. Those outside [from, to) count as zeros, for any content. Meanwhile keys of the
    // next chunk are prefetched.
    void add(const Pieces& here, const Pieces& next, int64_t head, int step, int from, int to) {
        const int64_t size = shape_.head_dim;
        if (here.values[2 * step] == nullptr && here.values[2 * step + 1] == nullptr) return;
        for (int half = 0; half < 2; half++) {
            const int nth = 2 * step + half, begin = from - nth * piece, end = to - nth * piece;
            const bfloat16* values = here.values[nth] != nullptr ? here.values[nth] + head * apart_ : nullptr;
            const bfloat16* following = next.keys[nth] != nullptr ? next.keys[nth] + head * apart_ : values;
            bfloat16* to_pairs = values_ + half * piece / 2 * tiles::depth;
            if (values != nullptr && begin <= 0 && end >= piece) interleave<true>(values, following, to_pairs, 0, piece);
            else interleave<false>(values, following, to_pairs, begin, values != nullptr ? end : begin);
        }
        tiles::fence();
        float* sums = sums_ + head * width_ * size;
        _tile_loadd(5, weights_ + head * width_ * chunk + step * tiles::depth, chunk * 2);
        for (int64_t part = 0; part < size / 16; part += 2) {
            _tile_loadd(1, sums + part * 16, size * 4);
            _tile_loadd(7, values_ + part * tiles::size, 64);
            _tile_dpbf16ps(1, 5, 7);
            _tile_loadd(2, sums + part * 16 + 16, size * 4);
            _tile_loadd(3, values_ + part * tiles::size + tiles::size, 64);
            _tile_dpbf16ps(2, 5, 3);
            _tile_stored(1, sums + part * 16, size * 4);
            _tile_stored(2, sums + part * 16 + 16, size * 4);
        }
        tiles::fence();
    }

    // A piece's keys [begin, end), two by two: for every 32 of D a tile with the lower halves of quarters, and one with the
    // upper ones. Sums have the same layout.
    template <bool whole>
    void interleave(const bfloat16* values, const bfloat16* next, bfloat16* to, int begin, int end) {
        const int64_t size = shape_.head_dim;
        for (int key = 0; key < piece; key += 2, to += tiles::depth)
            for (int64_t d = 0; d < size; d += 32) {
                if (next != nullptr) {
                    ask_for(next + key * size + d);
                    ask_for(next + (key + 1) * size + d);
                }
                const auto row = [&](int nth) {
                    return whole || (nth >= begin && nth < end) ? _mm512_loadu_si512(values + nth * size + d)
                                                                : _mm512_setzero_si512();
                };
                const __m512i even = row(key), odd = row(key + 1);
                _mm512_store_si512(to + d * 32, _mm512_unpacklo_epi16(even, odd));
                _mm512_store_si512(to + d * 32 + tiles::size, _mm512_unpackhi_epi16(even, odd));
            }
    }

    void finish(const Tile& tile, int64_t head, bfloat16* out) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        for (int query = 0; query < group_; query++) {
            const float* sums = sums_ + (head * width_ + query) * shape_.head_dim;
            const __m512 factor = _mm512_set1_ps(1.0f / total_[head * width_ + query]);
            bfloat16* to = out + tile.place(shape_, 0, head * group_ + query);
            for (int64_t d = 0; d < shape_.head_dim; d += 32) {
                const __m512 low = _mm512_mul_ps(_mm512_load_ps(sums + d), factor);
                const __m512 high = _mm512_mul_ps(_mm512_load_ps(sums + d + 16), factor);
                const __m512 lower = _mm512_permutex2var_ps(low, first, high);
                const __m512 upper = _mm512_permutex2var_ps(low, second, high);
                _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(upper, lower));
            }
        }
    }

    const Shape& shape_;
    const int group_, width_;  // queries of a head, and columns for them
    const int64_t apart_;      // distance from a head's piece to the next head's
    int64_t lanes_ = 0;        // columns of all heads of a tile
    float *scores_, *best_, *total_, *factors_, *sums_;
    bfloat16 *weights_, *queries_, *values_;
};

}  // namespace paged
#endif
