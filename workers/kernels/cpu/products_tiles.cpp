// Products y = x W^T with weights that are laid out once, on the tiles of AMX (amx.h).
//
// Packed, a weight is a row of panels: 32 outputs each, and of a panel for every 32 inputs two tiles, the right operands
// of a step. A product of few rows is bound by memory: it walks over the panels once, in order, and asks for what comes
// next a little ahead. A product of many rows is bound by the first-level cache: it cuts the inputs into `depth_steps`,
// so that the part of a panel that all rows meet stays there, while the rows stream past it from the second level.
//
//     few rows:    for each panel:                     for each block of 32 rows: all steps ──▶ finish
//     many rows:   for each panel: for each part of it: for each block of 32 rows: its steps ──▶ sums; the last: finish
//
// The sums of an output are taken in the same order either way: a row's product does not depend on who else is there.
// A gated product has gate and up side by side in a panel and finishes with silu(gate) * up.
#include <algorithm>
#include <cstdint>

#include "amx.h"
#include "products.h"
#include "threads.h"

#ifdef HAS_TILES
namespace {

using tiles::fence;

constexpr int panel = 32;                    // outputs of a panel, and rows of a block
constexpr int step_size = 2 * tiles::size;   // bfloat16 of a panel for 32 inputs
constexpr int sums_size = panel * panel;     // floats of a block's sums
constexpr int64_t few_rows = 2 * panel;
constexpr int64_t depth_steps = 16;          // 32 KiB of a panel, which the rows do not push out: they are not kept there
constexpr int64_t most_read = 1 << 20;       // bytes of inputs that meet a panel while it is there: half the second level
constexpr int64_t ahead = 1024;              // bytes, by measurement: more and less are both slower
constexpr int64_t worth_a_thread = 1 << 18;  // multiplications

struct TiledProduct {
    const bfloat16* x;       // [num_rows][x_stride]
    const bfloat16* packed;
    const float* bias;       // in the order of the packed outputs, or null
    bfloat16* out;           // [num_rows][out_stride]
    int64_t num_rows, num_outputs, num_steps, x_stride, out_stride;
    bool gated;

    int64_t num_panels() const { return (num_outputs + panel - 1) / panel; }
    const bfloat16* panel_at(int64_t index) const { return packed + index * num_steps * step_size; }
};

// Tiles: 0 1 / 2 3 the sums, 4 / 5 the left operands, 6 7 the right ones.
template <bool lower>
void load_sums(const float* sums) {
    _tile_loadd(0, sums, panel * 4);
    _tile_loadd(1, sums + 16, panel * 4);
    if constexpr (lower) {
        _tile_loadd(2, sums + 16 * panel, panel * 4);
        _tile_loadd(3, sums + 16 * panel + 16, panel * 4);
    }
}

template <bool lower>
void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

template <bool lower>
void store_sums(float* sums) {
    _tile_stored(0, sums, panel * 4);
    _tile_stored(1, sums + 16, panel * 4);
    if constexpr (lower) {
        _tile_stored(2, sums + 16 * panel, panel * 4);
        _tile_stored(3, sums + 16 * panel + 16, panel * 4);
    }
    fence();
}

inline void prefetch(const char* from, int64_t num_lines) {
    for (int64_t line = 0; line < num_lines; line++) _mm_prefetch(from + line * 64, _MM_HINT_T1);
}

// One step: left operands of 16 or 32 rows, `stride` bytes from row to row and `lower_at` elements to the lower 16. They
// pass the first-level cache by.
template <bool lower>
inline void multiply(const bfloat16* left, int64_t stride, int64_t lower_at, const bfloat16* right) {
    _tile_loadd(6, right, 64);
    _tile_stream_loadd(4, left, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + tiles::size, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (lower) {
        _tile_stream_loadd(5, left + lower_at, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

inline __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

inline __m512 through_bfloat16(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// As power_of_two in numbers.h: a step of its polynomial at a time, clamped by the instruction that scales.
inline __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5353362e-4f);
    for (const float next : {1.3398874e-3f, 9.6184370e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f})
        y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(next));
    return _mm512_scalef_ps(y, whole);
}

// silu(gate) * up, rounded where reference.py rounds.
inline __m256i gate_times_up(__m512 gate, __m512 up) {
    const __m512 x = through_bfloat16(gate), limit = _mm512_set1_ps(200.0f);  // far beyond, and 2^limit is infinity
    const __m512 below = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-log2e)), limit);
    const __m512 exponent = _mm512_max_ps(below, _mm512_sub_ps(_mm512_setzero_ps(), limit));
    const __m512 silu = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power_of_two(exponent)));
    return (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(through_bfloat16(silu), through_bfloat16(up)));
}

// Rows [begin, end) of a block's sums become outputs; `row` is the block's first.
void finish(const TiledProduct& product, const float* sums, int64_t row, int begin, int end, int64_t panel_index) {
    const int64_t width = product.gated ? panel / 2 : panel;
    const int64_t outputs = product.gated ? product.num_outputs / 2 : product.num_outputs;
    const int64_t first = panel_index * width, here = std::min<int64_t>(width, outputs - first);
    const __mmask32 mask = here == 32 ? ~0u : (1u << here) - 1;
    __m512 low_bias = _mm512_setzero_ps(), high_bias = low_bias;
    if (product.bias != nullptr) {
        low_bias = _mm512_loadu_ps(product.bias + panel_index * panel);
        high_bias = _mm512_loadu_ps(product.bias + panel_index * panel + 16);
    }
    for (int i = begin; i < end; i++) {
        bfloat16* to = product.out + (row + i) * product.out_stride + first;
        const __m512 low = _mm512_add_ps(_mm512_load_ps(sums + i * panel), low_bias);
        const __m512 high = _mm512_add_ps(_mm512_load_ps(sums + i * panel + 16), high_bias);
        if (product.gated)
            _mm256_mask_storeu_epi16(to, __mmask16(mask), gate_times_up(low, high));
        else
            _mm512_mask_storeu_epi16(to, mask, rounded(low, high));
    }
}

template <bool lower>
void multiply_few(const TiledProduct& product, tiles::Registers& registers, const bfloat16* right, int64_t row,
                  int num_rows, bool from_memory, float* sums) {
    registers.shape(std::min(16, num_rows), lower ? num_rows - 16 : 16);
    const bfloat16* left = product.x + row * product.x_stride;
    zero_sums<lower>();
    for (int64_t step = 0; step < product.num_steps; step++) {
        if (from_memory) prefetch(reinterpret_cast<const char*>(right) + ahead, step_size * 2 / 64);
        multiply<lower>(left, product.x_stride * 2, 16 * product.x_stride, right);
        left += tiles::depth;
        right += step_size;
    }
    store_sums<lower>(sums);
}

void few(const TiledProduct& product, tiles::Registers& registers, int64_t panel_index, int64_t first, int64_t last) {
    alignas(64) float sums[sums_size];
    const char* next = reinterpret_cast<const char*>(product.panel_at(panel_index + 1)) + ahead;
    for (int64_t row = first; row < last; row += panel) {
        const int num_rows = int(std::min<int64_t>(panel, last - row));
        auto* multiply_some = num_rows > 16 ? multiply_few<true> : multiply_few<false>;
        multiply_some(product, registers, product.panel_at(panel_index), row, num_rows, row == 0, sums);
        for (int i = 0; i < num_rows; i++) {  // memory is not idle meanwhile
            if (row == 0) prefetch(next + i * 128, 2);
            finish(product, sums, row, i, i + 1, panel_index);
        }
    }
}

// The panel for the whole blocks of rows [first, last). A block is finished while the tiles of the next one multiply:
// they leave the vector units idle. What it will write is asked for while it is multiplied itself.
void many(const TiledProduct& product, tiles::Registers& registers, int64_t panel_index, int64_t first, int64_t last) {
    static thread_local Scratch<float> memory;
    const int64_t num_blocks = (last - first) / panel;
    float* all_sums = memory.at_least(num_blocks * sums_size);
    const auto row_of = [&](int64_t block) { return first + block * panel; };
    const auto to_row = [&, at = panel_index * (product.gated ? panel / 2 : panel)](int64_t row) {
        return product.out + row * product.out_stride + at;
    };
    registers.shape(16, 16);
    const bfloat16* right = product.panel_at(panel_index);
    for (int64_t begin = 0; begin < product.num_steps; begin += depth_steps) {
        const int64_t num_steps = std::min(depth_steps, product.num_steps - begin);
        const bool last_part = begin + num_steps == product.num_steps;
        const int64_t rows_of_step = (panel + num_steps - 1) / num_steps;
        const int64_t num_lines = (step_size * 2 / 64 + num_blocks - 1) / num_blocks;
        const char* next = reinterpret_cast<const char*>(right + num_steps * step_size);
        for (int64_t block = 0; block < num_blocks; block++) {
            const bfloat16* left = product.x + row_of(block) * product.x_stride + begin * tiles::depth;
            float* sums = all_sums + block * sums_size;
            if (begin == 0) zero_sums<true>();
            else load_sums<true>(sums);
            for (int64_t step = 0; step < num_steps; step++) {
                prefetch(next, num_lines);
                next += num_lines * 64;
                multiply<true>(left + step * tiles::depth, product.x_stride * 2, 16 * product.x_stride,
                               right + step * step_size);
                if (last_part) {
                    const int from = int(std::min<int64_t>(panel, step * rows_of_step));
                    const int to = int(std::min<int64_t>(panel, from + rows_of_step));
                    for (int row = from; row < to; row++)
                        __builtin_prefetch(to_row(row_of(block) + row), 1, 2);
                    if (block > 0) finish(product, sums - sums_size, row_of(block - 1), from, to, panel_index);
                }
            }
            store_sums<true>(sums);
        }
        if (last_part)
            finish(product, all_sums + (num_blocks - 1) * sums_size, row_of(num_blocks - 1), 0, panel, panel_index);
        right += num_steps * step_size;
    }
}

// Threads share the panels and take the rows a chunk at a time; of many chunks each takes its own.
void compute(const TiledProduct& product, int num_threads) {
    const bool is_few = product.num_rows <= few_rows;
    const int64_t num_panels = product.num_panels();
    const int64_t most_rows = std::max<int64_t>(panel, most_read / (product.num_steps * tiles::depth * 2));
    int64_t num_chunks = is_few ? 1 : (product.num_rows + most_rows - 1) / most_rows;
    const bool by_rows = num_chunks >= num_threads;
    if (by_rows) num_chunks = (num_chunks + num_threads - 1) / num_threads * num_threads;
    const int64_t chunk = ((product.num_rows + num_chunks - 1) / num_chunks + panel - 1) / panel * panel;
    const int64_t together =
        by_rows && !is_few ? num_panels : std::clamp<int64_t>(num_panels / (4 * num_threads), 1, is_few ? 16 : 4);
    const int64_t num_shares = (num_panels + together - 1) / together;
    const bool parallel = product.num_rows * num_panels * product.num_steps * panel * panel > worth_a_thread;
    threads::share(num_chunks * num_shares, parallel ? num_threads : 1, [&](threads::Pieces& pieces) {
        tiles::Registers registers;
        for (int64_t item; (item = pieces.take()) >= 0;) {
            const int64_t first = item / num_shares * chunk, last = std::min(product.num_rows, first + chunk);
            const int64_t begin = item % num_shares * together, end = std::min(num_panels, begin + together);
            for (int64_t index = begin; index < end; index++)
                if (!is_few && last - first >= panel) {
                    const int64_t whole = first + (last - first) / panel * panel;
                    many(product, registers, index, first, whole);
                    if (whole < last) few(product, registers, index, whole, last);
                } else if (first < last) few(product, registers, index, first, last);
        }
    });
}

}  // namespace
#endif

// 1 where this library was compiled for tiles and the process may use them.
extern "C" int has_tiles() {
#ifdef HAS_TILES
    return tiles::allowed();
#else
    return 0;
#endif
}

extern "C" void multiply_tiles(const Part* by, const void* x, void* out, int64_t num_rows, int64_t x_stride,
                               int64_t out_stride, int num_threads) {
#ifdef HAS_TILES
    compute({static_cast<const bfloat16*>(x), static_cast<const bfloat16*>(by->packed), by->bias,
             static_cast<bfloat16*>(out), num_rows, by->num_outputs, by->num_inputs / tiles::depth, x_stride, out_stride,
             by->gated != 0},
            num_threads);
#endif
}
