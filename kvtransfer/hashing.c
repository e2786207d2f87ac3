/* BLAKE2b (RFC 7693), unkeyed, digests of 16 bytes, over a chain of blocks: what hashing.py says, many at a call. */

#include <stdint.h>
#include <string.h>
#include <sys/types.h>

typedef uint64_t u64;

static const u64 IV[8] = {
    0x6A09E667F3BCC908ull, 0xBB67AE8584CAA73Bull, 0x3C6EF372FE94F82Bull, 0xA54FF53A5F1D36F1ull,
    0x510E527FADE682D1ull, 0x9B05688C2B3E6C1Full, 0x1F83D9ABFB41BD6Bull, 0x5BE0CD19137E2179ull};

static inline u64 turn(u64 x, int by) { return x >> by | x << (64 - by); }

#define G(a, b, c, d, x, y)                                                                                            \
    a += b + m[x]; d = turn(d ^ a, 32); c += d; b = turn(b ^ c, 24);                                                   \
    a += b + m[y]; d = turn(d ^ a, 16); c += d; b = turn(b ^ c, 63);
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, sa, sb, sc, sd, se, sf)                                          \
    G(v0, v4, v8, vc, s0, s1) G(v1, v5, v9, vd, s2, s3) G(v2, v6, va, ve, s4, s5) G(v3, v7, vb, vf, s6, s7)            \
    G(v0, v5, va, vf, s8, s9) G(v1, v6, vb, vc, sa, sb) G(v2, v7, v8, vd, sc, sd) G(v3, v4, v9, ve, se, sf)

static inline void compress(u64 h[8], const u64 m[16], u64 num_bytes, int last) {
    u64 v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    u64 v8 = IV[0], v9 = IV[1], va = IV[2], vb = IV[3], vc = IV[4] ^ num_bytes, vd = IV[5], ve = IV[6], vf = IV[7];
    if (last) ve = ~ve;
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4)
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8)
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13)
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9)
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11)
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10)
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5)
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0)
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
    h[0] ^= v0 ^ v8; h[1] ^= v1 ^ v9; h[2] ^= v2 ^ va; h[3] ^= v3 ^ vb;
    h[4] ^= v4 ^ vc; h[5] ^= v5 ^ vd; h[6] ^= v6 ^ ve; h[7] ^= v7 ^ vf;
}

/* out[i] = BLAKE2b-128(out[i - 1], block i), where out[-1] is `parent`; a block is `block_bytes` bytes of `data`.
   Little-endian machines only. */
void chain(const unsigned char *parent, const unsigned char *data, int64_t num_blocks, int64_t block_bytes,
           unsigned char *out) {
    u64 m[16], before[2];
    memcpy(before, parent, 16);
    for (int64_t i = 0; i < num_blocks; i++, data += block_bytes, out += 16) {
        u64 h[8];
        memcpy(h, IV, sizeof h);
        h[0] ^= 0x01010010; /* depth 1, fanout 1, no key, 16 bytes out */
        int64_t taken = block_bytes < 112 ? block_bytes : 112, hashed = taken;
        m[0] = before[0]; m[1] = before[1];
        memset((char *)(m + 2) + taken, 0, (size_t)(112 - taken));
        memcpy(m + 2, data, (size_t)taken);
        while (hashed < block_bytes) {
            compress(h, m, (u64)hashed + 16, 0);
            taken = block_bytes - hashed < 128 ? block_bytes - hashed : 128;
            memset((char *)m + taken, 0, (size_t)(128 - taken));
            memcpy(m, data + hashed, (size_t)taken);
            hashed += taken;
        }
        compress(h, m, (u64)hashed + 16, 1);
        before[0] = h[0]; before[1] = h[1];
        memcpy(out, before, 16);
    }
}

/* Python's own, declared here so that none of its headers is needed; the interpreter that loads this has them. */
extern void *PyTuple_GetItem(void *, ssize_t), *PyList_GetItem(void *, ssize_t);
extern long long PyLong_AsLongLong(void *);

/* `chain` of a tuple or list of token ids, packed block by block into `block`, as long as one. Returns the place of the
   first that is not a number from 0 to 2**32 - 1, or -1. */
int64_t chain_ids(const unsigned char *parent, void *ids, int is_list, int64_t num_blocks, int64_t block_size,
                  uint32_t *block, unsigned char *out) {
    int64_t place = 0;
    for (int64_t i = 0; i < num_blocks; i++, out += 16) {
        for (int64_t j = 0; j < block_size; j++, place++) {
            long long id = PyLong_AsLongLong(is_list ? PyList_GetItem(ids, place) : PyTuple_GetItem(ids, place));
            if (id < 0 || id > 0xffffffffll) return place;
            block[j] = (uint32_t)id;
        }
        chain(parent, (const unsigned char *)block, 1, 4 * block_size, out);
        parent = out;
    }
    return -1;
}
