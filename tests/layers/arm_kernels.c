// Runs products of blocks, and of experts, that a file describes; writes their results. See test_arm_kernels.py.

#include <stdio.h>
#include <stdlib.h>

#include "experts.h"

void octavo_tile_blocks(const uint8_t *stored, int64_t rows, int64_t blocks, int64_t groups, int64_t scale_bytes,
                        uint8_t *quants, uint8_t *scales, uint16_t *mins);
int octavo_block_linear(const Linear *linear, const float *x, float *out, int64_t rows, int64_t size,
                        int64_t stride, int threads);

typedef struct {
    int64_t num_experts;                       // 0: a product
    int64_t bits, scale_bytes, has_mins;
    int64_t rows, columns, tokens, k;
    int64_t is_clamped;
} Case;

static void *get(FILE *from, int64_t num_bytes) {
    void *bytes = malloc((size_t)num_bytes + 1);
    if (fread(bytes, 1, (size_t)num_bytes, from) != (size_t)num_bytes) exit(1);
    return bytes;
}

// Freed by nobody: the process ends soon.
static const Linear *get_linear(FILE *from, const Case *c, int64_t rows, int64_t columns) {
    int64_t blocks = columns / 32, groups = c->bits, places = (rows + TILE - 1) / TILE * TILE * blocks;
    uint8_t *stored = get(from, rows * blocks * (c->scale_bytes + 2 * c->has_mins + groups * 4));
    uint8_t *quants = calloc((size_t)(places * groups), 4), *scales = calloc((size_t)places, (size_t)c->scale_bytes);
    uint16_t *mins = c->has_mins ? calloc((size_t)places, 2) : NULL;
    octavo_tile_blocks(stored, rows, blocks, groups, c->scale_bytes, quants, scales, mins);
    Tiles *tiles = malloc(sizeof *tiles);
    *tiles = (Tiles){quants, scales, mins, rows, (int)c->bits, (int)c->scale_bytes, 1};
    const Tiles **parts = malloc(sizeof *parts);
    *parts = tiles;
    Linear *linear = malloc(sizeof *linear);
    *linear = (Linear){parts, 1, rows, NULL};
    return linear;
}

static int run_product(FILE *from, const Case *c, float *out) {
    const Linear *linear = get_linear(from, c, c->rows, c->columns);
    return octavo_block_linear(linear, get(from, c->tokens * c->columns * 4), out, c->tokens, c->columns, c->rows, 2);
}

static int run_experts(FILE *from, const Case *c, float *out) {
    const Linear **gate_up = malloc((size_t)c->num_experts * sizeof *gate_up);
    const Linear **down = malloc((size_t)c->num_experts * sizeof *down);
    for (int64_t i = 0; i < c->num_experts; i++) {
        gate_up[i] = get_linear(from, c, 2 * c->columns, c->rows);
        down[i] = get_linear(from, c, c->rows, c->columns);
    }
    Experts experts = {gate_up, down, c->num_experts, c->rows, c->columns, 0, 0};
    if (c->is_clamped) experts.limit = 7, experts.slope = 1.702f;
    Step step = {.out = out, .tokens = c->tokens, .k = c->k};
    step.x = get(from, c->tokens * c->rows * 4);
    step.experts = get(from, c->tokens * c->k * 4);
    step.weights = get(from, c->tokens * c->k * 4);
    return octavo_run_experts(&experts, &step, 2);
}

int main(int argc, char **names) {
    if (argc != 3) return 1;
    FILE *from = fopen(names[1], "rb"), *to = fopen(names[2], "wb");
    Case c;
    while (fread(&c, sizeof c, 1, from) == 1) {
        size_t size = (size_t)(c.tokens * c.rows);
        float *out = malloc(size * sizeof *out);
        if ((c.num_experts ? run_experts : run_product)(from, &c, out)) return 1;
        fwrite(out, sizeof *out, size, to);
    }
    return fclose(to);
}
