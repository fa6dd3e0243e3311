// One tile of keys and values against the rows of an item. Included by attend.c, not compiled by itself.

#include <stdbool.h>

#include "calls.h"
#include "../../kernels/c/vector.c"

#if LANES == 16                                // 32 registers
#define KEYS 4                                 // keys whose scores are made together, in two sums each
#define VALUE_VECTORS 4                        // value vectors that are summed together
#else
#define KEYS 2
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

typedef vec Sums[KEYS][BLOCK_VECTORS];

// Add the products of element d of KEYS keys and num_vectors row vectors; query is [D][BLOCK_ROWS].
INLINE void add_element(Sums sum, const float *query, const float *const *keys, int64_t d, const int num_vectors) {
    vec rows[BLOCK_VECTORS];
    for (int v = 0; v < num_vectors; v++) rows[v] = in_register(load(query + d * BLOCK_ROWS + v * LANES));
    for (int k = 0; k < KEYS; k++) {
        vec key = splat(keys[k][d]);
        for (int v = 0; v < num_vectors; v++) sum[k][v] = fma_vec(key, rows[v], sum[k][v]);
    }
}

// Sums of the products of the elements that lie in a lane of a vector, and two lanes later.
INLINE void score_lanes(Sums result, const float *query, const float *const *keys, int64_t dim, const int lane,
                        const int num_vectors) {
    Sums sum = {0}, other = {0};
    for (int64_t d = lane; d - lane + LANES <= dim; d += LANES) {
        add_element(sum, query, keys, d, num_vectors);
        add_element(other, query, keys, d + 2, num_vectors);
    }
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < num_vectors; v++) result[k][v] = sum[k][v] + other[k][v];
}

// scores[key][row] of KEYS keys and num_vectors row vectors, added up as few.c does, along lanes: lanes 0 and 2, and 1
// and 3, of every 128 bits, then those two, then neighbours, and what is behind the last whole vector comes last.
INLINE void score_block(vec (*scores)[BLOCK_VECTORS], const float *query, const float *const *keys,
                        int64_t dim, const int num_vectors) {
    Sums parts[LANES / 2];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) score_lanes(parts[i], query, keys, dim, i / 2 * 4 + i % 2, num_vectors);
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < num_vectors; v++) {
            vec sum[LANES / 2];
            for (int i = 0; i < LANES / 2; i++) sum[i] = parts[i][k][v];
            for (int n = LANES / 4; n; n /= 2)
                for (int i = 0; i < n; i++) sum[i] = sum[2 * i] + sum[2 * i + 1];
            scores[k][v] = sum[0];
        }
    if (dim % LANES == 0) return;
    Sums tail = {0};
    for (int64_t d = dim / LANES * LANES; d < dim; d++) add_element(tail, query, keys, d, num_vectors);
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < num_vectors; v++) scores[k][v] += tail[k][v];
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
static void weigh_scores(Scratch *s, int i, const Tile *tile) {
    int v = i % BLOCK_VECTORS, count = tile->count;
    vec top = s->maximum[i];
    for (int t = 0; t < count; t++) top = max_vec(s->scores[t][v], top);
    // A row that has seen nothing keeps -inf; from 0 its weights are exp(-inf) = 0, not NaN.
    vec base = select_vec(top == -INFINITY, (vec){0}, top);
    vec correction = exp_vec(s->maximum[i] - base), sum[4] = {0};
    for (int t = count; t % 4; t++) s->scores[t][v] = splat(-INFINITY);
    for (int t = 0; t < count; t += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vec weight = exp_vec(s->scores[t + j][v] - base);
            s->scores[t + j][v] = weight;
            sum[j] += weight;
        }
    s->maximum[i] = top;
    s->sum[i] = fma_vec(s->sum[i], correction, tile->begin % 2 ? SUM_OF_ODD(sum) : SUM_OF_EVEN(sum));
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
            for (int r = 0; r < rows; r++) sum[r][v] = fma_vec(splat(weight[r]), value, sum[r][v]);
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
                sum = fma_one(((const float *)s->scores[t])[r], tile->values[t][d], sum);
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
            weigh_scores(s, i, tile);
        }
        add_value_block(s, tile, s->output + first * c->head_dim, block_rows, c->head_dim);
    }
}
