// Attention of a single token over pages of a multiple of 16 positions, on the tiles of AMX (amx.h): bound by memory, so
// nothing of the cache is copied or turned, and pages are read in the order in which they lie.
//
//     keys [16 keys][32 of D], in their page x queries [16 pairs of D][queries x 2] ──▶ scores [keys][queries]
//     scores ──▶ weights [pairs of keys][queries x 2]; sums [queries][D] += weights x values, two keys to a product
//
// A page's 16 positions of one head are a piece. A chunk is four pieces deep and all heads wide: first the keys of all
// its pieces, then the softmax, then the values. With each piece one a few pieces later is asked for, across chunks, a few
// lines at a time: all at once would stand in line, and what is computed behind them.
#pragma once

#include "attention.h"

#include "amx.h"

#ifdef HAS_TILES
#include <bit>

namespace tiles {

// 2^x to 8 units in a hundred thousand (fitted on [-1/2, 1/2]), a fiftieth of what a bfloat16 weight is rounded by; 0 below
// -100, since numbers so small that they lose digits would take a hundred times as long.
inline __m512 power_of_two(__m512 x) {
    const __m512 least = _mm512_set1_ps(-100.0f);
    const __mmask16 counts = _mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ);
    x = _mm512_max_ps(least, x);  // in this order a NaN stays one
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(0.05508868f), part, _mm512_set1_ps(0.24260405f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.69327624f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.99992894f));
    return _mm512_maskz_scalef_ps(counts, y, whole);
}

}  // namespace tiles

namespace paged {

constexpr int piece = 16;                      // keys of a page that are looked at together
constexpr int num_pieces = chunk / piece;      // of a chunk
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr int64_t most_decoding_group = 16;    // queries that share a head

inline bool decodes(const Shape& shape, const Tile& tile) {
    return tile.num_tokens == 1 && shape.block_size % piece == 0 && shape.group() <= most_decoding_group;
}

// Inlined always: a compiler that sees a function do nothing but this takes it for one that does nothing.
__attribute__((always_inline)) inline void ask_for(const bfloat16* line) {
    _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
}

// The pieces of a tile in the order in which they are read: of each chunk keys, then values, page by page.
class Pieces {
  public:
    Pieces(const Shape& shape, const Tile& tile, const bfloat16* k_cache, const bfloat16* v_cache)
        : shape_(shape), tile_(tile), caches_{k_cache, v_cache},
          of_position_(tile.first_key(shape) / piece), stop_((tile.stop() + piece - 1) / piece) {
        open();
    }

    // Null at the end.
    const bfloat16* next() {
        if (of_position_ >= stop_) return nullptr;
        const bfloat16* here = at_;
        at_ += shape_.block_size * shape_.head_dim;
        if (++head_ == tile_.num_kv_heads) {
            head_ = 0;
            if (++nth_ == std::min<int64_t>(num_pieces, stop_ - of_position_)) {
                nth_ = 0;
                if (values_) of_position_ += num_pieces;
                values_ = !values_;
            }
            open();
        }
        return here;
    }

  private:
    void open() {
        if (of_position_ >= stop_) return;
        const int64_t position = (of_position_ + nth_) * piece;
        const int64_t head = int64_t(tile_.table[position / shape_.block_size]) * shape_.num_kv_heads + tile_.kv_head;
        at_ = caches_[values_] + (head * shape_.block_size + position % shape_.block_size) * shape_.head_dim;
    }

    const Shape& shape_;
    const Tile& tile_;
    const bfloat16* caches_[2];
    const bfloat16* at_ = nullptr;
    int64_t of_position_, stop_, nth_ = 0, head_ = 0;  // in pieces
    bool values_ = false;
};

// What one thread needs beside the tensors.
class Decoder {
  public:
    explicit Decoder(const Shape& shape)
        : shape_(shape), group_(int(shape.group())), width_(int(std::bit_ceil(uint64_t(group_)))),
          num_vectors_(chunk * width_ / 16), depth_steps_(shape.head_dim / tiles::depth) {
        static thread_local tiles::Scratch<float> memory;
        const int64_t heads = shape.num_kv_heads;
        sums_ = memory.at_least(heads * (group_ * shape.head_dim + 2 * chunk * width_ + 2 * 16 + 16 * shape.head_dim / 2));
        scores_ = sums_ + heads * group_ * shape.head_dim;
        weights_ = scores_ + heads * chunk * width_;
        best_ = weights_ + heads * chunk * width_ / 2;
        total_ = best_ + heads * 16;
        queries_ = total_ + heads * 16;
        for (int lane = 0; lane < 32; lane++) {  // [2 keys][queries] in pairs of keys, as often as they fit
            const int pair = lane / 2 / width_, query = lane / 2 % width_;
            in_pairs_[lane] = uint16_t((2 * pair + lane % 2) * width_ + query);
        }
    }

    int width() const { return width_; }

    // The tiles' registers have `width` columns.
    void run(const Tile& tile, const bfloat16* q, const bfloat16* k_cache, const bfloat16* v_cache, bfloat16* out) {
        begin(tile, q);
        Pieces here(shape_, tile, k_cache, v_cache), ahead = here;
        for (int i = 0; i < pieces_ahead; i++) ahead.next();
        const int64_t first = tile.first_key(shape_);
        for (int64_t start = first / piece * piece; start < tile.stop(); start += chunk) {
            const int from = int(std::max<int64_t>(0, first - start));
            const int to = int(std::min<int64_t>(chunk, tile.stop() - start));
            for (int nth = 0; nth * piece < to; nth++)
                for (int64_t head = 0; head < tile.num_kv_heads; head++) {
                    const bfloat16* keys = here.next();
                    score(keys, next_or(ahead, keys), head, nth);
                }
            tiles::fence();
            for (int64_t head = 0; head < tile.num_kv_heads; head++) {
                if (from > 0 || to < chunk) hide(head, from, to);
                weigh(head);
            }
            for (int nth = 0; nth * piece < to; nth++)
                for (int64_t head = 0; head < tile.num_kv_heads; head++) {
                    const bfloat16 *values = here.next(), *next = next_or(ahead, values);
                    const int begin = std::max(from - nth * piece, 0), end = std::min(to - nth * piece, piece);
                    if (begin == 0 && end == piece) add<true>(values, next, head, nth, begin, end);
                    else add<false>(values, next, head, nth, begin, end);
                }
        }
        for (int64_t head = 0; head < tile.num_kv_heads; head++) finish(tile, head, out);
    }

  private:
    static constexpr int pieces_ahead = 4;  // by measurement: 2 and 8 are as good, 1 is not

    // Queries as [16 pairs of D][queries x 2] for every 32 of D; columns that do not exist are zeros.
    void begin(const Tile& tile, const bfloat16* q) {
        const int64_t of_head = 16 * shape_.head_dim / 2, num_heads = tile.num_kv_heads;
        uint32_t* to = reinterpret_cast<uint32_t*>(queries_);
        std::fill_n(to, num_heads * of_head, 0u);
        for (int64_t head = 0; head < num_heads; head++)
            for (int member = 0; member < group_; member++) {
                const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q + tile.place(shape_, 0, head * group_ + member));
                for (int64_t pair = 0; pair < shape_.head_dim / 2; pair++)
                    to[head * of_head + pair * 16 + member] = pairs[pair];
            }
        std::fill_n(best_, num_heads * 16, -infinity);
        std::fill_n(total_, num_heads * 16, 0.0f);
        std::fill_n(sums_, num_heads * group_ * shape_.head_dim, 0.0f);
        tiles::fence();
    }

    // Towards the end, what has been read already: to ask for it costs nothing.
    static const bfloat16* next_or(Pieces& ahead, const bfloat16* here) {
        const bfloat16* next = ahead.next();
        return next == nullptr ? here : next;
    }

    void score(const bfloat16* keys, const bfloat16* next, int64_t head, int nth) {
        const float* queries = queries_ + head * 16 * shape_.head_dim / 2;
        _tile_zero(0);
        for (int64_t step = 0; step < depth_steps_; step++) {
            for (int line = 0; line < piece; line++) ask_for(next + (step * piece + line) * tiles::depth);
            _tile_loadd(4, keys + step * tiles::depth, shape_.head_dim * 2);
            _tile_loadd(6, queries + step * 16 * 16, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores_ + (head * chunk + nth * piece) * width_, width_ * 4);
    }

    // Scores of keys outside [from, to), that the token may not see or that do not exist, become -infinity.
    void hide(int64_t head, int from, int to) {
        float* scores = scores_ + head * chunk * width_;
        std::fill(scores, scores + from * width_, -infinity);
        std::fill(scores + to * width_, scores + chunk * width_, -infinity);
    }

    // Scores become weights relative to the best so far, and sums so far count less. A lane is a query's, every `width`th
    // the same one's.
    void weigh(int64_t head) {
        const float* scores = scores_ + head * chunk * width_;
        const __m512 to_log2 = _mm512_set1_ps(shape_.scale * log2e);
        __m512 peak = _mm512_loadu_ps(scores);
        for (int i = 1; i < num_vectors_; i++) peak = _mm512_max_ps(peak, _mm512_loadu_ps(scores + i * 16));
        for (int apart = 8; apart >= width_; apart /= 2) peak = _mm512_max_ps(peak, from_lanes_apart(peak, apart));
        const __m512 before = _mm512_loadu_ps(best_ + head * 16);
        const __m512 best = _mm512_max_ps(before, _mm512_mul_ps(peak, to_log2));
        const __mmask16 seen = _mm512_cmp_ps_mask(best, _mm512_set1_ps(-infinity), _CMP_NEQ_UQ);
        const __m512 base = _mm512_maskz_mov_ps(seen, best);
        const __m512i order = _mm512_loadu_si512(in_pairs_);
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < num_vectors_; i += 2) {
            const __m512 even = tiles::power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + i * 16), to_log2, base));
            const __m512 odd = tiles::power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + i * 16 + 16), to_log2, base));
            sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
            _mm512_storeu_si512(weights_ + (head * chunk * width_ + i * 16) / 2, _mm512_permutexvar_epi16(order, both));
        }
        const __m512 factor = tiles::power_of_two(_mm512_sub_ps(before, base));
        const __m512 total = _mm512_loadu_ps(total_ + head * 16);
        _mm512_storeu_ps(total_ + head * 16, _mm512_fmadd_ps(total, factor, sum));
        _mm512_storeu_ps(best_ + head * 16, best);
        if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ)) {
            alignas(64) float factors[16];
            _mm512_store_ps(factors, factor);
            float* sums = sums_ + head * group_ * shape_.head_dim;
            for (int query = 0; query < group_; query++)
                for (int64_t d = 0; d < shape_.head_dim; d += 16, sums += 16)
                    _mm512_storeu_ps(sums, _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(factors[query])));
        }
    }

    static __m512 from_lanes_apart(__m512 x, int apart) {
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_permutexvar_ps(_mm512_xor_si512(lanes, _mm512_set1_epi32(apart)), x);
    }

    // Values of the keys [begin, end) of a piece; what others hold is not even multiplied by 0.
    template <bool whole>
    void add(const bfloat16* values, const bfloat16* next, int64_t head, int nth, int begin, int end) {
        const float* weights = weights_ + (head * chunk + nth * piece) / 2 * width_;
        float* sums = sums_ + head * group_ * shape_.head_dim;
        for (int query = 0; query < group_;) {
            const int left = group_ - query;
            const int taken = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            for (int64_t d = 0; d < shape_.head_dim;) {
                const bool two = d + 64 <= shape_.head_dim;
                auto* add_some = taken == 4 ? (two ? &Decoder::add_some<whole, 4, 2> : &Decoder::add_some<whole, 4, 1>)
                                 : taken == 2 ? (two ? &Decoder::add_some<whole, 2, 2> : &Decoder::add_some<whole, 2, 1>)
                                              : (two ? &Decoder::add_some<whole, 1, 2> : &Decoder::add_some<whole, 1, 1>);
                add_some(*this, values + d, next + d, weights + query, sums + query * shape_.head_dim + d, begin, end);
                d += two ? 64 : 32;
            }
            query += taken;
        }
    }

    // Of 32 x `parts` of D; sums stand as pairs of rows are interleaved: quarters' lower halves first, then the upper ones.
    template <bool whole, int queries, int parts>
    static void add_some(const Decoder& self, const bfloat16* values, const bfloat16* next, const float* weights,
                         float* sums, int begin, int end) {
        const int64_t size = self.shape_.head_dim;
        __m512 all[queries][2 * parts];
        for (int i = 0; i < queries; i++)
            for (int j = 0; j < 2 * parts; j++) all[i][j] = _mm512_loadu_ps(sums + i * size + j * 16);
        for (int key = 0; key < piece; key += 2) {
            for (int part = 0; part < parts; part++) {
                ask_for(next + key * size + part * 32);
                ask_for(next + (key + 1) * size + part * 32);
                const bfloat16* from = values + key * size + part * 32;
                __m512i even, odd;
                if constexpr (whole) {
                    even = _mm512_loadu_si512(from);
                    odd = _mm512_loadu_si512(from + size);
                } else {
                    even = key >= begin && key < end ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
                    odd = key + 1 >= begin && key + 1 < end ? _mm512_loadu_si512(from + size) : _mm512_setzero_si512();
                }
                const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(even, odd);
                const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
                for (int i = 0; i < queries; i++) {
                    const __m512bh weight = (__m512bh)_mm512_set1_ps(weights[key / 2 * self.width_ + i]);
                    all[i][2 * part] = _mm512_dpbf16_ps(all[i][2 * part], low, weight);
                    all[i][2 * part + 1] = _mm512_dpbf16_ps(all[i][2 * part + 1], high, weight);
                }
            }
        }
        for (int i = 0; i < queries; i++)
            for (int j = 0; j < 2 * parts; j++) _mm512_storeu_ps(sums + i * size + j * 16, all[i][j]);
    }

    void finish(const Tile& tile, int64_t head, bfloat16* out) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        __m512 total = _mm512_loadu_ps(total_ + head * 16);
        for (int apart = 8; apart >= width_; apart /= 2) total = _mm512_add_ps(total, from_lanes_apart(total, apart));
        alignas(64) float totals[16];
        _mm512_store_ps(totals, total);
        const float* sums = sums_ + head * group_ * shape_.head_dim;
        for (int query = 0; query < group_; query++) {
            const __m512 factor = _mm512_set1_ps(1.0f / totals[query]);
            bfloat16* to = out + tile.place(shape_, 0, head * group_ + query);
            for (int64_t d = 0; d < shape_.head_dim; d += 32, sums += 32) {
                const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(sums), factor);
                const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(sums + 16), factor);
                const __m512 lower = _mm512_permutex2var_ps(low, first, high);
                const __m512 upper = _mm512_permutex2var_ps(low, second, high);
                _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(upper, lower));
            }
        }
    }

    const Shape& shape_;
    const int group_, width_, num_vectors_;  // queries of a head; lanes for them; vectors of a head's scores
    const int64_t depth_steps_;
    float *sums_, *scores_, *weights_, *best_, *total_, *queries_;  // of each head of a tile
    alignas(64) uint16_t in_pairs_[32];
};

}  // namespace paged
#endif
