// y = x W^T for weights that stay in blocks of 32 small integers with a scale each, and perhaps a minimum:
//
//     weight = scale * q + min        q: 4 bits unsigned, 8 bits signed, or a code of MXFP4
//
// Rows of x become blocks of 8-bit integers too, x = d * p; so for every block of 32
//
//     y += (scale * d) * sum(q * p) + min * (d * sum(p))
//
// Some weights have a scale for each half of a block. Integer sums are exact, and floats are added block after
// block, so no row depends on its neighbours.
//
// TILE outputs, 8 or 16, make a tile, whose weights lie in the order in which they are read:
//
//     one block of a tile    8 groups of 4 inputs x TILE outputs x 4 bytes    (one vector a group)
//     in 4 bits              group g in the low halves, group g + 4 in the high halves of vector g
//
// A few rows of x, ROWS at most, share the weights that a thread has in its registers. They lie side by side:
//
//     8 rows in 18 blocks    block 0 of rows 0-5, block 1 of rows 0-5, ... block 17; then the same of rows 6-7
//                            (where ROWS is 6)

// GCC 13 would take 30 s to schedule the many products of a block for a Sapphire Rapids, for no gain.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-schedule-insns2")
#endif

#include <float.h>
#include <stdlib.h>

#include "../../../kernels/c/vector.c"
#include "blocks.h"
#include "dots.c"
#include "rows.c"

#define GROUPS (BLOCK / GROUP)
#define HALF (GROUPS / 2)
#define AHEAD 16                               // blocks of weights
#define LINE 64                                // bytes of a cache line
#define PREFETCH_LEVEL 2                       // into the second-level cache
#define MOST_TILE_SHARES 16                    // of a thread in a product's tiles: the last ones end together
#define LEAST_SHARES 2
#define SHARE_BYTES (128 * 1024)               // a share begins with weights that nobody has fetched ahead

int octavo_tile(void) { return TILE; }

// What is the same for all products of a weight, known to the compiler.
typedef struct {
    int bits, scale_bytes, halves;
} Form;

INLINE int has_codes(Form f) { return f.scale_bytes == 1; }

// Bits of the integers that are multiplied: codes stand for signed ones.
INLINE int product_bits(Form f) { return has_codes(f) ? 8 : f.bits; }

// Group g of one block of a tile.
INLINE bytes load_group(const uint8_t *block, int g, Form f) {
    if (f.bits == 8) return as_unsigned((bytes)((const loose_bytes *)block)[g]);
    bytes both = (bytes)((const loose_bytes *)block)[g % HALF];
    bytes group = g < HALF ? (bytes)(both & 15) : (bytes)(both >> 4);
    return has_codes(f) ? decode(group) : group;
}

// What comes AHEAD blocks later, of this tile or the next: the CPU itself does not look beyond a page of memory.
INLINE void prefetch(const uint8_t *weights, const void *scales, const void *mins, size_t b, Form f) {
    const size_t weight_bytes = BLOCK * TILE * f.bits / 8, min_bytes = TILE * f.scale_bytes;
    for (size_t i = 0; i < weight_bytes; i += LINE)
        __builtin_prefetch(weights + (b + AHEAD) * weight_bytes + i, 0, PREFETCH_LEVEL);
    __builtin_prefetch((const char *)scales + (b + AHEAD) * min_bytes * f.halves, 0, PREFETCH_LEVEL);
    if (mins) __builtin_prefetch((const char *)mins + (b + AHEAD) * min_bytes, 0, PREFETCH_LEVEL);
}

// What a row's sums begin with, of a whole block or of a half.
INLINE ints begin_row(const Offsets *offsets, int g, Form f) {
    int32_t first = f.halves == 1 ? offsets->whole : offsets->whole - offsets->second;
    return begin_sums(g ? offsets->second : first, product_bits(f));
}

// One tile of outputs for `count` rows of x that lie side by side; x begins with them.
INLINE void multiply(const uint8_t *weights, const void *scales, const void *mins, Rows x, const int count,
                     Form f, floats *out) {
    for (int r = 0; r < count; r++) out[r] = (floats){0};
    for (size_t b = 0; b < x.blocks; b++) {
        const int8_t *values = x.values + b * count * BLOCK;
        const float *d = x.scales + b * count, *sum = x.sums + b * count;
        const Offsets *offsets = x.offsets + b * count;
        ints sums[ROWS] = {{0}};
        prefetch(weights, scales, mins, b, f);
#pragma GCC unroll UNROLLED
        for (int g = 0; g < GROUPS; g++) {
            bytes group = load_group(weights + b * BLOCK * TILE * f.bits / 8, g, f);
#pragma GCC unroll 16
            for (int r = 0; r < count; r++) {
                if (g % (GROUPS / f.halves) == 0) sums[r] = begin_row(offsets + r, g, f);
                sums[r] = add_products(sums[r], group, load4(values + r * BLOCK + GROUP * g), product_bits(f));
            }
            if ((g + 1) % (GROUPS / f.halves)) continue;
            floats scale = load_scales(scales, b * f.halves + g / HALF * (f.halves - 1), f.scale_bytes);
#pragma GCC unroll 16
            for (int r = 0; r < count; r++)
                out[r] = fma_floats(__builtin_convertvector(finish_sums(sums[r], product_bits(f)), floats),
                                    scale * d[r], out[r]);
        }
        if (!mins) continue;
        floats min = load_scales(mins, b, f.scale_bytes);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) out[r] = fma_floats(min, (floats){0} + sum[r], out[r]);
    }
}

// The first `width` outputs of a tile, for one row of x.
INLINE void write_outputs(floats sums, const float *bias, float *out, size_t width, int adds) {
    if (width == TILE) {
        loose_floats *to = (loose_floats *)out;
        if (bias) sums += *(const loose_floats *)bias;
        if (adds) sums += *to;
        *to = sums;
        return;
    }
    for (size_t i = 0; i < width; i++) {
        float y = bias ? sums[i] + bias[i] : sums[i];
        out[i] = adds ? out[i] + y : y;
    }
}

// Tiles `first` to `last` - 1 of a weight.
INLINE void product(const Tiles *w, int64_t first, int64_t last, Rows x, const float *bias, float *out,
                    size_t stride, int adds, Form f) {
    size_t outputs = (size_t)w->num_rows, weight_bytes = x.blocks * BLOCK * TILE * f.bits / 8;
    size_t min_bytes = x.blocks * TILE * (size_t)f.scale_bytes, scale_bytes = min_bytes * f.halves;
    for (size_t t = (size_t)first; t < (size_t)last; t++) {
        const uint8_t *q = w->quants + t * weight_bytes;
        const void *s = (const char *)w->scales + t * scale_bytes;
        const void *m = w->mins ? (const char *)w->mins + t * min_bytes : NULL;
        size_t column = t * TILE, width = outputs - column < TILE ? outputs - column : TILE;
        for (size_t row = 0, count; row < x.rows; row += count) {
            floats sums[ROWS];
            size_t place = row * x.blocks;
            Rows from = {x.values + place * BLOCK, x.scales + place, x.sums + place, x.offsets + place,
                         x.rows - row, x.blocks};
            count = rows_beside(from.rows);
            switch (count) {
                case 1: multiply(q, s, m, from, 1, f, sums); break;
                case 2: multiply(q, s, m, from, 2, f, sums); break;
                case 4: multiply(q, s, m, from, 4, f, sums); break;
#if ROWS > 8
                case 8: multiply(q, s, m, from, 8, f, sums); break;
#endif
                default: multiply(q, s, m, from, ROWS, f, sums);
            }
            for (size_t r = 0; r < count; r++)
                write_outputs(sums[r], bias ? bias + column : NULL, out + (row + r) * stride + column, width,
                              adds);
        }
    }
}

static void multiply_tiles(const Tiles *w, int64_t first, int64_t last, Rows x, const float *bias, float *out,
                           size_t stride, int adds) {
#define CASE(BITS, SCALE_BYTES, HALVES)                                                 \
    if (w->bits == BITS && w->scale_bytes == SCALE_BYTES && w->halves == HALVES)         \
        product(w, first, last, x, bias, out, stride, adds, (Form){BITS, SCALE_BYTES, HALVES})
    CASE(4, 1, 1);
    CASE(4, 2, 1);
    CASE(4, 4, 1);
    CASE(8, 2, 1);
    CASE(8, 4, 1);
    CASE(8, 4, 2);
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t tiles_of(const Tiles *w) { return (w->num_rows + TILE - 1) / TILE; }

// How many tiles of rows with so many blocks a thread takes at a time.
INLINE int64_t share_of(int64_t tiles, size_t blocks, int bits, int threads) {
    int64_t share = SHARE_BYTES / (int64_t)(blocks * BLOCK * TILE * (size_t)bits / 8) + 1;
    int64_t least = tiles / (MOST_TILE_SHARES * threads) + 1, most = tiles / (LEAST_SHARES * threads) + 1;
    return share < least ? least : smaller(share, most);
}

static int64_t tiles_of_linear(const Linear *linear) {
    int64_t tiles = 0;
    for (int64_t i = 0; i < linear->num_parts; i++) tiles += tiles_of(linear->parts[i]);
    return tiles;
}

// Tiles first to last - 1 of a product, if its weights lie above one another; there may be fewer.
static void multiply_part(const Product *p, int64_t first, int64_t last) {
    int64_t begin = 0, row = 0;
    for (int64_t i = 0; i < p->linear->num_parts && begin < last; i++) {
        const Tiles *w = p->linear->parts[i];
        int64_t num = tiles_of(w), from = first > begin ? first - begin : 0;
        const float *bias = p->linear->bias ? p->linear->bias + row : NULL;
        multiply_tiles(w, from, smaller(last - begin, num), p->x, bias, p->out + row, p->stride, p->adds);
        begin += num;
        row += w->num_rows;
    }
}

void octavo_products_in_team(Team *team, const Product *products, int64_t count) {
    // Others may still be writing the products that a thread which has left would read here.
    if (team->has_left) return;
    int64_t tiles = 0, share = 1;
    for (int64_t i = 0; i < count; i++) tiles += tiles_of_linear(products[i].linear);
    if (count) share = share_of(tiles, products->x.blocks, products->linear->parts[0]->bits, team_threads(team));
    for (int64_t first; (first = team_take(team, share)) < tiles;) {
        int64_t last = smaller(first + share, tiles);
        for (int64_t i = 0, begin = 0; i < count && begin < last; i++) {
            int64_t num = tiles_of_linear(products[i].linear);
            if (begin + num > first)
                multiply_part(products + i, first > begin ? first - begin : 0, smaller(last - begin, num));
            begin += num;
        }
    }
    team_wait(team);
}

void octavo_linear_in_team(Team *team, const Linear *linear, Rows x, float *out, size_t stride, int adds) {
    Product product = {linear, x, out, stride, adds};
    octavo_products_in_team(team, &product, 1);
}

// x [rows, size] float32, size a multiple of 32, to out [rows, stride], of which the linear layer's columns are
// written. Returns 0, or 1 if there is no memory.
int octavo_block_linear(const Linear *linear, const float *x, float *out, int64_t rows, int64_t size,
                        int64_t stride, int threads) {
    size_t num = (size_t)rows, blocks = (size_t)size / BLOCK;
    void *memory = malloc(octavo_row_bytes(num, blocks) + 1);
    if (!memory) return 1;
    Rows quantised = octavo_place_rows(memory, num, blocks);
    Crew crew = CREW;
#pragma omp parallel num_threads(threads)
    {
        Team team = team_begin(&crew);
        TEAM_FOR(&team, r, rows) octavo_quantise_row(quantised, (size_t)r, x + r * size);
        team_wait(&team);
        octavo_linear_in_team(&team, linear, quantised, out, (size_t)stride, 0);
    }
    free(memory);
    return 0;
}
