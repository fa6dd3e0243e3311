// One tile of keys and values against the rows of an item. Included by kernel.c, not compiled by itself.

#include <stdbool.h>

#include "calls.h"
#include "vector.c"

#if LANES == 16                                // 32 registers
#define KEYS 8                                 // keys whose scores are made together
#define VALUE_VECTORS 4                        // value vectors that are summed together
#else
#define KEYS 4
#define VALUE_VECTORS 2
#endif
#define VALUE_ROWS 6
#define BLOCK_VECTORS 3                        // row vectors whose scores are made together
#define BLOCK_ROWS (BLOCK_VECTORS * LANES)
#define CHUNK_BLOCKS 4
#define CHUNK_ROWS (CHUNK_BLOCKS * BLOCK_ROWS) // rows that one pass over the keys serves
#define TILE 64                                // keys per tile
#define PREFETCH_LEVEL 2                       // into the second-level cache
#define FEW_ROWS 8                             // up to here, few.c is faster

typedef struct {
    int64_t begin;
    int count;
    const float *keys[TILE], *values[TILE];
} Tile;

struct Scratch {
    float *query;                              // [row block][D][BLOCK_ROWS]; few rows: [row][D]
    float *output;                             // [row][D], not yet divided by sum
    vec scores[TILE][BLOCK_VECTORS];
    vec few_scores[FEW_ROWS][TILE / LANES];    // [row][key]
    vec maximum[CHUNK_ROWS / LANES], sum[CHUNK_ROWS / LANES], slope[CHUNK_ROWS / LANES];
    ivec position[CHUNK_ROWS / LANES];
    int64_t first_position[CHUNK_BLOCKS], last_position[CHUNK_BLOCKS];
    float correction[BLOCK_ROWS];
    Tile tiles[2];                             // this one and the next
    Tile wide;                                 // of a bfloat16 cache: this one in float32, in `widened`
    float *widened;                            // [2][TILE][D]
};

INLINE void prefetch_row(const float *row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d, 0, PREFETCH_LEVEL);
}

// scores[key][row] of KEYS keys and num_vectors row vectors; query is [D][BLOCK_ROWS].
INLINE void score_block(vec (*scores)[BLOCK_VECTORS], const float *query, const float *const *keys,
                        int64_t dim, const int num_vectors) {
    vec sum[KEYS][BLOCK_VECTORS] = {0};
    for (int64_t d = 0; d < dim; d++, query += BLOCK_ROWS) {
        for (int k = 0; k < KEYS; k++) {
            vec key = splat(keys[k][d]);
            for (int v = 0; v < num_vectors; v++) sum[k][v] += key * load(query + v * LANES);
        }
    }
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < num_vectors; v++) scores[k][v] = sum[k][v];
}

// Scores of the tile; while they are made, the next tile's keys come from memory.
static void score_tile(Scratch *s, const Tile *tile, const Tile *next, const float *query, int64_t dim,
                       int num_vectors) {
    for (int t = 0; t < tile->count; t += KEYS) {
        for (int k = t; next && k < t + KEYS && k < next->count; k++) prefetch_row(next->keys[k], dim);
        if (num_vectors == 1) score_block(s->scores + t, query, tile->keys + t, dim, 1);
        else if (num_vectors == 2) score_block(s->scores + t, query, tile->keys + t, dim, 2);
        else score_block(s->scores + t, query, tile->keys + t, dim, 3);
    }
}

// Cap, bias and mask a vector of scores.
INLINE vec adjust_vec(const Call *c, vec score, ivec distance, vec slope, bool masked) {
    if (c->softcap > 0) score = c->softcap * tanh_vec(score / c->softcap);
    if (c->alibi) score -= slope * __builtin_convertvector(distance, vec);
    if (!masked) return score;
    ivec visible = distance >= 0;
    if (c->window) visible &= distance < (c->window < INT32_MAX ? (int32_t)c->window : INT32_MAX);
    return select_vec(visible, score, splat(-INFINITY));
}

// The same for row vector i and keys begin .. begin + count - 1.
static void adjust_scores(const Call *c, Scratch *s, int i, int64_t begin, int count, bool masked) {
    int v = i % BLOCK_VECTORS;
    for (int t = 0; t < count; t++) {
        ivec distance = s->position[i] - splat_int((int32_t)(begin + t));
        s->scores[t][v] = adjust_vec(c, s->scores[t][v], distance, s->slope[i], masked);
    }
}

// Turn the scores of row vector i into weights against its new maximum; correct what was summed so far.
static void weigh_scores(Scratch *s, int i, int count) {
    int v = i % BLOCK_VECTORS;
    vec top = s->maximum[i];
    for (int t = 0; t < count; t++) top = max_vec(s->scores[t][v], top);
    // A row that has seen nothing keeps -inf; from 0 its weights are exp(-inf) = 0, not NaN.
    vec base = select_vec(top == -INFINITY, (vec){0}, top);
    vec correction = exp_vec(s->maximum[i] - base), total = s->sum[i] * correction;
    for (int t = 0; t < count; t++) {
        vec weight = exp_vec(s->scores[t][v] - base);
        s->scores[t][v] = weight;
        total += weight;
    }
    s->maximum[i] = top;
    s->sum[i] = total;
    store(s->correction + v * LANES, correction);
}

// output[row][d .. d + vectors * LANES] = output * correction + sum over keys of weight * value.
INLINE void add_values(Scratch *s, const Tile *tile, float *output, int row, int64_t d, int64_t dim,
                       const int rows, const int vectors) {
    vec sum[VALUE_ROWS][VALUE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = load(output + (row + r) * dim + d + v * LANES) * s->correction[row + r];
    for (int t = 0; t < tile->count; t++) {
        const float *weight = (const float *)s->scores[t] + row;
        for (int v = 0; v < vectors; v++) {
            vec value = load(tile->values[t] + d + v * LANES);
            for (int r = 0; r < rows; r++) sum[r][v] += weight[r] * value;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(output + (row + r) * dim + d + v * LANES, sum[r][v]);
}

INLINE void add_value_rows(Scratch *s, const Tile *tile, float *output, int row, int64_t dim,
                           const int rows) {
    int64_t d = 0;
    for (; d + VALUE_VECTORS * LANES <= dim; d += VALUE_VECTORS * LANES)
        add_values(s, tile, output, row, d, dim, rows, VALUE_VECTORS);
    for (; d + LANES <= dim; d += LANES) add_values(s, tile, output, row, d, dim, rows, 1);
    for (; d < dim; d++)
        for (int r = row; r < row + rows; r++) {
            float sum = output[r * dim + d] * s->correction[r];
            for (int t = 0; t < tile->count; t++)
                sum += ((const float *)s->scores[t])[r] * tile->values[t][d];
            output[r * dim + d] = sum;
        }
}

static void add_value_block(Scratch *s, const Tile *tile, float *output, int rows, int64_t dim) {
    int row = 0;
    for (; row + VALUE_ROWS <= rows; row += VALUE_ROWS) add_value_rows(s, tile, output, row, dim, VALUE_ROWS);
    for (; row + 3 <= rows; row += 3) add_value_rows(s, tile, output, row, dim, 3);
    for (; row < rows; row++) add_value_rows(s, tile, output, row, dim, 1);
}

// Attend one tile with all rows; whole blocks of rows that see none of it are skipped.
static void attend_tile(const Call *c, Scratch *s, const Tile *tile, const Tile *next, int rows) {
    int64_t begin = tile->begin, last = begin + tile->count - 1;
    for (int first = 0, block = 0; first < rows; first += BLOCK_ROWS, block++) {
        int block_rows = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
        int num_vectors = (block_rows + LANES - 1) / LANES;
        int64_t low = s->first_position[block], high = s->last_position[block];
        if (begin > high || (c->window && last <= low - c->window)) continue;
        bool masked = last > low || (c->window && begin <= high - c->window);
        const float *query = s->query + block * BLOCK_ROWS * c->head_dim;
        score_tile(s, tile, block ? NULL : next, query, c->head_dim, num_vectors);
        for (int t = 0; !block && t < next->count; t++) prefetch_row(next->values[t], c->head_dim);
        for (int v = 0; v < num_vectors; v++) {
            int i = block * BLOCK_VECTORS + v;
            if (masked || c->alibi || c->softcap > 0) adjust_scores(c, s, i, begin, tile->count, masked);
            weigh_scores(s, i, tile->count);
        }
        add_value_block(s, tile, s->output + first * c->head_dim, block_rows, c->head_dim);
    }
}
