// Lays weights out for the products, once, after they are read. A panel's rows are read as so many streams, and what they
// become is written in order: outputs are spread over threads by panels.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "quantised.h"
#include "threads.h"

namespace {

constexpr int64_t at_once = 16;  // words of a row: a cache line

// The words [first, first + count) of `lanes` rows, transposed: to[word][lane]. `order` names the rows, -1: zeros.
template <int lanes>
void transpose(const uint32_t* rows, const int64_t* order, int64_t words, int64_t first, int64_t count, uint32_t* to) {
    uint32_t read[lanes][at_once] = {};
    for (int lane = 0; lane < lanes; lane++)
        if (order[lane] >= 0) std::memcpy(read[lane], rows + order[lane] * words + first, count * sizeof(uint32_t));
    for (int64_t word = 0; word < count; word++)
        for (int lane = 0; lane < lanes; lane++) to[word * lanes + lane] = read[lane][word];
}

// weight [.][words] -> packed [num_panels][words][32]. `order` names for each packed output the row of the weight, or -1.
void pack_panels(const uint32_t* weight, uint32_t* packed, const int64_t* order, int64_t num_packed, int64_t words,
                 int num_threads) {
    constexpr int64_t panel = 32;
    threads::each((num_packed + panel - 1) / panel, num_threads, [&](int64_t index) {
        for (int64_t word = 0; word < words; word += at_once)
            transpose<panel>(weight, order + index * panel, words, word, std::min(at_once, words - word),
                             packed + index * panel * words + word * panel);
    });
}

// The first `num_codes` of a dense little-endian stream, one a byte.
template <int bits>
void unpack_stream(const uint8_t* stream, uint8_t* codes, int64_t num_codes) {
    const auto eight = [&](int64_t first, int64_t num_bytes, int64_t count) {
        uint64_t word = 0;
        std::memcpy(&word, stream + first * bits / 8, num_bytes);
        for (int64_t i = 0; i < count; i++) codes[first + i] = uint8_t(word >> (i * bits) & ((1 << bits) - 1));
    };
    const int64_t whole = num_codes / 8 * 8, left = num_codes - whole;
    for (int64_t first = 0; first < whole; first += 8) eight(first, bits, 8);
    if (left > 0) eight(whole, (left * bits + 7) / 8, left);
}

template <>
void unpack_stream<4>(const uint8_t* stream, uint8_t* codes, int64_t num_codes) {
    for (int64_t i = 0; i < num_codes / 2; i++) codes[2 * i] = stream[i] & 15, codes[2 * i + 1] = stream[i] >> 4;
    if (num_codes % 2 != 0) codes[num_codes - 1] = stream[num_codes / 2] & 15;
}

template <>
void unpack_stream<8>(const uint8_t* stream, uint8_t* codes, int64_t num_codes) {
    std::memcpy(codes, stream, num_codes);
}

using UnpackStream = void(const uint8_t*, uint8_t*, int64_t);
constexpr UnpackStream* unpack_stream_of[] = {
    nullptr,          nullptr,          unpack_stream<2>, unpack_stream<3>, unpack_stream<4>,
    unpack_stream<5>, unpack_stream<6>, unpack_stream<7>, unpack_stream<8>};

using quantised::panel;
using quantised::step_size;
constexpr int words = step_size / sizeof(int32_t);  // of a lane in a step: four positions each

// The planes (quantised.h) of a step: of each lane its 32 codes, of up to 8 bits, are at codes[lane * stride].
void pack_step(const uint8_t* codes, int64_t stride, int bits, uint8_t* to) {
    uint32_t read[panel][words], word[words][panel];
    for (int lane = 0; lane < panel; lane++) std::memcpy(read[lane], codes + lane * stride, step_size);
    for (int j = 0; j < words; j++)
        for (int lane = 0; lane < panel; lane++) word[j][lane] = read[lane][j];
    if (bits == 8) {
        std::memcpy(to, word, sizeof word);
        return;
    }
    int shift = 0;
    for (const int width : {4, 2, 1}) {
        if ((bits & width) == 0) continue;
        const int vectors = words * width / 8;
        const uint32_t mask = 0x01010101u * ((1 << width) - 1);
        uint32_t plane[words / 2][panel] = {};
        for (int j = 0; j < words; j++)
            for (int lane = 0; lane < panel; lane++)
                plane[j % vectors][lane] |= (word[j][lane] >> shift & mask) << j / vectors * width;
        std::memcpy(to, plane, vectors * sizeof plane[0]);
        to += vectors * sizeof plane[0];
        shift += width;
    }
}

}  // namespace

extern "C" void pack_panels_float32(const uint32_t* weight, uint32_t* packed, const int64_t* order, int64_t num_packed,
                                    int64_t num_inputs, int num_threads) {
    pack_panels(weight, packed, order, num_packed, num_inputs, num_threads);
}

// `num_inputs` is even: an output has two side by side.
extern "C" void pack_panels_bfloat16(const uint32_t* weight, uint32_t* packed, const int64_t* order, int64_t num_packed,
                                     int64_t num_inputs, int num_threads) {
    pack_panels(weight, packed, order, num_packed, num_inputs / 2, num_threads);
}

// weight [.][num_inputs] -> packed [num_panels][steps of 32 inputs][2][16 pairs of inputs][16 outputs][2].
extern "C" void pack_tiles(const uint32_t* weight, uint32_t* packed, const int64_t* order, int64_t num_packed,
                           int64_t num_inputs, int num_threads) {
    constexpr int64_t rows = 16;
    const int64_t words = num_inputs / 2;
    threads::each((num_packed + 2 * rows - 1) / (2 * rows), num_threads, [&](int64_t index) {
        const int64_t output = index * 2 * rows;
        for (int64_t word = 0; word < words; word += at_once)
            for (int64_t half = 0; half < 2; half++)
                transpose<rows>(weight, order + output + half * rows, words, word, at_once,
                                packed + output * words + (2 * word + half * at_once) * rows);
    });
}

// Rows of codes, dense streams `stream_bytes` apart, into the planes of panels: of each packed output `order` names the
// row, of each position `columns` names the code; -1: zeros. `by_position`: as fp8 has them.
extern "C" void pack_codes(const uint8_t* streams, int64_t stream_bytes, uint8_t* packed, const int64_t* order,
                           const int32_t* columns, int64_t num_packed, int64_t num_columns, int64_t num_steps, int bits,
                           int by_position, int num_threads) {
    const int64_t num_positions = num_steps * step_size, step_bytes = int64_t(bits) * panel * step_size / 8;
    bool in_order = true;
    for (int64_t position = 0; position < num_positions; position++)
        in_order &= columns[position] == (position < num_columns ? position : -1);
    threads::share((num_packed + panel - 1) / panel, num_threads, [&](threads::Pieces& pieces) {
        const std::unique_ptr<uint8_t[]> row(new uint8_t[num_columns]), codes(new uint8_t[panel * num_positions]);
        for (int64_t index; (index = pieces.take()) >= 0;) {
            const int64_t output = index * panel;
            std::memset(codes.get(), 0, panel * num_positions);
            for (int i = 0; i < panel; i++) {
                if (order[output + i] < 0) continue;
                uint8_t* to = codes.get() + i * num_positions;
                unpack_stream_of[bits](streams + order[output + i] * stream_bytes, in_order ? to : row.get(), num_columns);
                if (in_order) continue;
                for (int64_t position = 0; position < num_positions; position++)
                    if (columns[position] >= 0) to[position] = row[columns[position]];
            }
            uint8_t* to = packed + output * num_steps * bits * step_size / 8;
            for (int64_t first = 0; first < num_positions; first += step_size) {
                const uint8_t* from = codes.get() + first;
                if (by_position) {
                    for (int here = 0; here < step_size; here++)
                        for (int i = 0; i < panel; i++) *to++ = from[i * num_positions + here];
                    continue;
                }
                pack_step(from, num_positions, bits, to);
                to += step_bytes;
            }
        }
    });
}
