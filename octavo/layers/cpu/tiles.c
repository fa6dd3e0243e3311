// Weights as a GGUF file stores them become tiles (blocks.c) in one pass: numbers are moved, none is changed.
//
//     a block in the file    scale float16, min float16 or nothing, 32 numbers of 4 or 8 bits
//     4 bits                 byte i has number i in its low half, number i + 16 in its high half: as tiles have them

#include <stdint.h>
#include <string.h>

#include "blocks.h"

#define GROUP 4                                // bytes

// Where one block of a tile goes. mins: NULL: there are none.
typedef struct {
    uint8_t *quants;
    uint16_t *scales, *mins;
} Place;

// A block of row `row` of a tile.
static void put_block(const uint8_t *stored, Place to, int row, int64_t groups) {
    memcpy(to.scales + row, stored, sizeof *to.scales);
    stored += sizeof *to.scales;
    if (to.mins) {
        memcpy(to.mins + row, stored, sizeof *to.mins);
        stored += sizeof *to.mins;
    }
    for (int64_t g = 0; g < groups; g++) memcpy(to.quants + (g * TILE + row) * GROUP, stored + g * GROUP, GROUP);
}

// stored [rows, blocks][block_bytes], of `groups` groups each, to the first rows of tiles [.., blocks]; the rest
// of the last tile is not written.
void octavo_tile_blocks(const uint8_t *stored, int64_t rows, int64_t blocks, int64_t groups, uint8_t *quants,
                        uint16_t *scales, uint16_t *mins) {
    int64_t block_bytes = (int64_t)sizeof *scales * (mins ? 2 : 1) + groups * GROUP;
    for (int64_t first = 0; first < rows; first += TILE)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t place = first * blocks + b * TILE;
            Place to = {quants + place * groups * GROUP, scales + place, mins ? mins + place : NULL};
            for (int row = 0; row < TILE && first + row < rows; row++)
                put_block(stored + ((first + row) * blocks + b) * block_bytes, to, row, groups);
        }
}

// Numbers of MXFP4 of one block, two neighbours a byte, as tiles have them: number i beside number i + 16.
static void put_codes(const uint8_t *values, uint8_t *quants, int row) {
    uint8_t block[16];
    for (int i = 0; i < 8; i++) {
        uint8_t first = values[i], second = values[i + 8];
        block[2 * i] = (uint8_t)((first & 15) | second << 4);
        block[2 * i + 1] = (uint8_t)(first >> 4 | (second & 0xF0));
    }
    for (int g = 0; g < 4; g++) memcpy(quants + (g * TILE + row) * GROUP, block + g * GROUP, GROUP);
}

// values [rows, blocks][16] and exponents [rows, blocks] to the first rows of tiles, as above.
void octavo_tile_codes(const uint8_t *values, const uint8_t *exponents, int64_t rows, int64_t blocks,
                       uint8_t *quants, uint8_t *scales) {
    for (int64_t first = 0; first < rows; first += TILE)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t place = first * blocks + b * TILE;
            for (int row = 0; row < TILE && first + row < rows; row++) {
                int64_t from = (first + row) * blocks + b;
                put_codes(values + from * 16, quants + place * 16, row);
                scales[place + row] = exponents[from];
            }
        }
}
