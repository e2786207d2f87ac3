// Tiles of AMX: eight registers of 16 rows of 64 bytes, and one instruction that multiplies two of them
// (Intel's Architecture Instruction Set Extensions Programming Reference, chapter 3).
//
// The sum in a tile [16][16 floats] grows by left [16][32 bfloat16] times right [16 pairs of rows][16 columns x 2].
// The compiler does not know that tile instructions read and write memory: `fence` keeps the compiler's own loads and
// stores of that memory on their side of the instructions.
#pragma once

#include <cstdint>

#include "numbers.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__linux__)
#define HAS_TILES 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "scratch.h"

namespace tiles {

constexpr int rows = 16;         // of a tile
constexpr int depth = 32;        // bfloat16 in a row of a left operand
constexpr int size = 16 * 32;    // bfloat16 in a tile

inline void fence() { asm volatile("" ::: "memory"); }

// Whether this process may use the tiles. Linux requires a request first, which also covers threads started later.
inline bool allowed() {
    constexpr int request_permission = 0x1023, tile_data = 18;
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
}

struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {};
    uint8_t num_rows[16] = {};
};

// Configures all eight tiles at full size, except the left operands and sums of blocks with fewer rows. The contents of
// the tiles are lost. A thread owns them until the destructor, which also spares the kernel saving them.
class Registers {
  public:
    Registers() { shape(rows, rows); }
    ~Registers() { _tile_release(); }
    Registers(const Registers&) = delete;

    // `upper` rows of tiles 0, 1 and 4, and `lower` rows of tiles 2, 3 and 5.
    void shape(int upper, int lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper, lower_ = lower;
        Shapes shapes;
        for (int tile = 0; tile < 8; tile++) {
            const bool is_lower = tile == 2 || tile == 3 || tile == 5;
            shapes.num_rows[tile] = uint8_t(tile >= 6 ? rows : is_lower ? lower : upper);
            shapes.bytes_of_row[tile] = 64;
        }
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }

    // `width` columns of tiles 0 and 6, and rows of 1, 2 and 5.
    void shape_for_decoding(int width) {
        if (upper_ == 0 && lower_ == width) return;
        upper_ = 0, lower_ = width;
        Shapes shapes;
        for (int tile = 0; tile < 8; tile++) {
            shapes.num_rows[tile] = uint8_t(tile == 1 || tile == 2 || tile == 5 ? width : rows);
            shapes.bytes_of_row[tile] = uint16_t(tile == 0 || tile == 6 ? width * 4 : 64);
        }
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }

  private:
    int upper_ = 0, lower_ = 0;
};

}  // namespace tiles
#endif
