// Weights as files store them become tiles (blocks.c) in one pass: numbers are moved, none is changed.
//
//     a block of a GGUF file    scale, float16 or an exponent; min float16 or nothing; 32 numbers of 4 or 8 bits
//     4 bits                    byte i has number i in its low half, number i + 16 in its high half: as in tiles
//     MXFP4 elsewhere           exponents apart; byte i has numbers 2 i and 2 i + 1

#include <stdint.h>
#include <string.h>

#include "blocks.h"

#define GROUP 4                                // bytes

// Where the blocks of a weight go. mins: NULL: there are none.
typedef struct {
    uint8_t *quants, *scales;
    uint16_t *mins;
    int64_t blocks, groups, scale_bytes;
} Places;

// The 4-byte groups of block b of a row.
static void put_groups(const uint8_t *numbers, Places to, int64_t row, int64_t b) {
    uint8_t *quants = to.quants + (row / TILE * to.blocks + b) * TILE * to.groups * GROUP + row % TILE * GROUP;
    for (int64_t g = 0; g < to.groups; g++) memcpy(quants + g * TILE * GROUP, numbers + g * GROUP, GROUP);
}

// Which scale, or minimum, is that of block b of a row.
static int64_t scale_at(Places to, int64_t row, int64_t b) {
    return (row / TILE * to.blocks + b) * TILE + row % TILE;
}

static void put_block(const uint8_t *stored, Places to, int64_t row, int64_t b) {
    uint8_t *scale = to.scales + scale_at(to, row, b) * to.scale_bytes;
    scale[0] = stored[0];
    if (to.scale_bytes == 2) scale[1] = stored[1];
    stored += to.scale_bytes;
    if (to.mins) {
        memcpy(to.mins + scale_at(to, row, b), stored, sizeof *to.mins);
        stored += sizeof *to.mins;
    }
    put_groups(stored, to, row, b);
}

// stored [rows, blocks][block_bytes], of `groups` groups each, to the first rows of tiles [.., blocks]; the rest
// of the last tile is not written.
void octavo_tile_blocks(const uint8_t *stored, int64_t rows, int64_t blocks, int64_t groups, int64_t scale_bytes,
                        uint8_t *quants, uint8_t *scales, uint16_t *mins) {
    Places to = {quants, scales, mins, blocks, groups, scale_bytes};
    int64_t block_bytes = scale_bytes + (mins ? 2 : 0) + groups * GROUP;
    for (int64_t first = 0; first < rows; first += TILE)
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t row = first; row < first + TILE && row < rows; row++)
                put_block(stored + (row * blocks + b) * block_bytes, to, row, b);
}

// Numbers of MXFP4 of one block, two neighbours a byte: number i beside number i + 16.
static void reorder_codes(const uint8_t *values, uint8_t *block) {
    uint8_t even[8], odd[8];
    for (int i = 0; i < 8; i++) {
        even[i] = (uint8_t)((values[i] & 15) | values[i + 8] << 4);
        odd[i] = (uint8_t)(values[i] >> 4 | (values[i + 8] & 0xF0));
    }
    for (int i = 0; i < 8; i++) block[2 * i] = even[i], block[2 * i + 1] = odd[i];
}

// values [rows, blocks][16] and exponents [rows, blocks] to the first rows of tiles, as above.
void octavo_tile_codes(const uint8_t *values, const uint8_t *exponents, int64_t rows, int64_t blocks,
                       uint8_t *quants, uint8_t *scales) {
    Places to = {quants, scales, NULL, blocks, 4, 1};
    for (int64_t first = 0; first < rows; first += TILE)
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t row = first; row < first + TILE && row < rows; row++) {
                uint8_t block[16];
                reorder_codes(values + (row * blocks + b) * 16, block);
                put_groups(block, to, row, b);
                scales[scale_at(to, row, b)] = exponents[row * blocks + b];
            }
}
