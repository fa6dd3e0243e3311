// Weights in blocks and rows of x in blocks, as Python (blocks.py) and the decoder's layers (stack.c) know them.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../../../kernels/c/team.h"

// Outputs that lie side by side: as many as a vector has sums.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TILE 16
#else
#define TILE 8
#endif

// TILE, for Python.
int octavo_tile(void);

// A weight in tiles, see linear/blocks/linear.py. mins: NULL: 0.
typedef struct {
    const uint8_t *quants;
    const void *scales, *mins;
    int64_t num_rows;
    int bits;                                  // of a weight: 4 or 8
    int scale_bytes;                           // 4: float32; 2: float16; 1: exponents of MXFP4, whose numbers
                                               // are codes in 4 bits
    int halves;                                // scales of a block: 1 or 2
} Tiles;

// Weights above one another. bias: [num_outputs], or NULL.
typedef struct {
    const Tiles *const *parts;
    int64_t num_parts, num_outputs;
    const float *bias;
} Linear;

// -128 times the sum of the numbers of a block, and of its second half.
typedef struct {
    int32_t whole, second;
} Offsets;

// `rows` rows of x in blocks of 8 bits. Some rows lie side by side, block after block; see blocks.c.
typedef struct {
    int8_t *values;                            // [rows][blocks][32]
    float *scales, *sums;                      // [rows][blocks]; sums of the numbers of a block
    Offsets *offsets;                          // [rows][blocks]
    size_t rows, blocks;
} Rows;

// Bytes that rows take; octavo_place_rows lays them out in so much memory.
size_t octavo_row_bytes(size_t rows, size_t blocks);
Rows octavo_place_rows(void *memory, size_t rows, size_t blocks);

// Row `row` becomes blocks of 8 bits of x [blocks * 32].
void octavo_quantise_row(Rows to, size_t row, const float *x);

// out [rows, stride] = x W^T + b, or out += it.
typedef struct {
    const Linear *linear;
    Rows x;
    float *out;
    size_t stride;
    int adds;
} Product;

// Every thread of a team calls these, and returns when all is done. The rows of products have one size.
void octavo_products_in_team(Team *team, const Product *products, int64_t count);
void octavo_linear_in_team(Team *team, const Linear *linear, Rows x, float *out, size_t stride, int adds);
