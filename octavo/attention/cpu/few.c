// One tile of keys and values against few rows, as a decoding sequence has them. Included by attend.c, not
// compiled by itself.
//
// A row's scores lie key by key, so that exp serves LANES keys at once, however few rows there are. tile.c adds up in
// the same order: a row has the same bits whichever of the two attends it.

#include "tile.c"

#define FEW_SUMS LANES                         // value vectors that are summed together, of all rows
#define FEW_VECTORS 8                          // and of a row

// Scores of LANES keys and one row. Each key has a sum of its own, so that no product waits for another.
INLINE vec score_keys(const float *query, const float *const *keys, int64_t dim) {
    vec sum[LANES] = {0}, tail = {0};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vec part = load(query + d);
        for (int k = 0; k < LANES; k++) sum[k] = fma_vec(load(keys[k] + d), part, sum[k]);
    }
    for (; d < dim; d++) {
        vec key;
        for (int k = 0; k < LANES; k++) key[k] = keys[k][d];
        tail = fma_vec(key, splat(query[d]), tail);
    }
    return sum_each(sum) + tail;
}

// Scores of the tile; while they are made, its values come from memory, a few lines at a time: more than the
// core can await would hold up its loads.
static void score_few(Scratch *s, const Tile *tile, int64_t dim, int rows) {
    for (int t = 0; t < tile->count; t += LANES) {
        for (int r = 0; r < rows; r++) {
            for (int k = t + r; k < t + LANES && k < tile->count; k += rows) prefetch_row(tile->values[k], dim);
            s->few_scores[r][t / LANES] = score_keys(s->query + r * dim, tile->keys + t, dim);
        }
    }
}

// Cap, bias and mask the scores of a row.
static void adjust_few(const Call *c, Scratch *s, const Tile *tile, int row, bool masked) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int t = 0; t < tile->count; t += LANES) {
        ivec distance = splat_int(s->position[0][row] - (int32_t)(tile->begin + t)) - lane;
        vec *score = &s->few_scores[row][t / LANES];
        *score = adjust_vec(c, *score, distance, splat(s->slope[0][row]), masked);
    }
}

// Turn the scores of a row into weights, as weigh_scores does; 0 behind the last key.
static void weigh_few(Scratch *s, int row, const Tile *tile) {
    int count = tile->count;
    vec *scores = s->few_scores[row];
    for (int t = count; t % LANES; t++) scores[t / LANES][t % LANES] = -INFINITY;
    vec tops = scores[0];
    for (int t = LANES; t < count; t += LANES) tops = max_vec(scores[t / LANES], tops);
    float top = s->maximum[0][row];
    for (int i = 0; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    float base = top == -INFINITY ? 0 : top, correction = exp_vec(splat(s->maximum[0][row] - base))[0];
    quad sum = {0};
    for (int t = 0; t < count; t += LANES) {
        vec weight = exp_vec(scores[t / LANES] - base);
        scores[t / LANES] = weight;
        sum = add_quads(sum, weight);
    }
    s->maximum[0][row] = top;
    s->sum[0][row] = fma_one(s->sum[0][row], correction, tile->begin % 2 ? SUM_OF_ODD(sum) : SUM_OF_EVEN(sum));
    s->correction[row] = correction;
}

// output[row][d .. d + vectors * LANES], as in add_values; meanwhile the same part of the next keys comes.
INLINE void add_few_part(Scratch *s, const Tile *tile, const Tile *next, int64_t d, int64_t dim, const int rows,
                         const int vectors) {
    vec sum[FEW_ROWS][FEW_VECTORS];
    const float *weights = (const float *)s->few_scores;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = load(s->output + r * dim + d + v * LANES) * s->correction[r];
    for (int t = 0; t < tile->count; t++) {
        if (t < next->count) prefetch_row(next->keys[t] + d, vectors * LANES);
        vec values[FEW_VECTORS];
        for (int v = 0; v < vectors; v++) values[v] = load(tile->values[t] + d + v * LANES);
        for (int r = 0; r < rows; r++) {
            vec weight = splat(weights[r * TILE + t]);
            for (int v = 0; v < vectors; v++) sum[r][v] = fma_vec(weight, values[v], sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(s->output + r * dim + d + v * LANES, sum[r][v]);
}

// The same for as many vectors as there are, so many at a time.
INLINE int64_t add_few_parts(Scratch *s, const Tile *tile, const Tile *next, int64_t d, int64_t dim, const int rows,
                             const int vectors) {
    if (rows * vectors > FEW_SUMS && vectors > 1) return d;
    for (; d + vectors * LANES <= dim; d += vectors * LANES) add_few_part(s, tile, next, d, dim, rows, vectors);
    return d;
}

INLINE void add_few(Scratch *s, const Tile *tile, const Tile *next, int64_t dim, const int rows) {
    int64_t d = add_few_parts(s, tile, next, 0, dim, rows, 8);
    d = add_few_parts(s, tile, next, d, dim, rows, 4);
    d = add_few_parts(s, tile, next, d, dim, rows, 2);
    d = add_few_parts(s, tile, next, d, dim, rows, 1);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++) {
            float sum = s->output[r * dim + d] * s->correction[r];
            for (int t = 0; t < tile->count; t++)
                sum = fma_one(s->few_scores[r][t / LANES][t % LANES], tile->values[t][d], sum);
            s->output[r * dim + d] = sum;
        }
}

// Attend one tile with 1 to FEW_ROWS rows.
static void attend_few(const Call *c, Scratch *s, const Tile *tile, const Tile *next, int rows) {
    int64_t begin = tile->begin, last = begin + tile->count - 1;
    int64_t low = s->first_position[0], high = s->last_position[0];
    if (begin > high || (c->window && last <= low - c->window)) return;
    bool masked = last > low || (c->window && begin <= high - c->window);
    score_few(s, tile, c->head_dim, rows);
    for (int r = 0; r < rows; r++) {
        if (masked || c->alibi || c->softcap > 0) adjust_few(c, s, tile, r, masked);
        weigh_few(s, r, tile);
    }
    switch (rows) {
    case 1: add_few(s, tile, next, c->head_dim, 1); break;
    case 2: add_few(s, tile, next, c->head_dim, 2); break;
    case 3: add_few(s, tile, next, c->head_dim, 3); break;
    case 4: add_few(s, tile, next, c->head_dim, 4); break;
    case 5: add_few(s, tile, next, c->head_dim, 5); break;
    case 6: add_few(s, tile, next, c->head_dim, 6); break;
    case 7: add_few(s, tile, next, c->head_dim, 7); break;
    default: add_few(s, tile, next, c->head_dim, 8);
    }
}
