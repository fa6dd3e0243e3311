// Paged attention for CPUs, float32: C11, OpenMP and the vector extensions that GCC and Clang share.
//
// A unit of work is (plan item, kv head): its rows are the item's query tokens x the G query heads of
// that kv head. Rows stay, keys and values stream past them tile by tile, with a running softmax:
//
//     scores[key][row] = K[key][:] . Q[:][row]      row vectors, one key element broadcast
//     weights          = exp(scores - row maximum)  vertical: no reduction across lanes
//     O[row][:]       += weights[key][row] * V[key][:]
//
// Neither keys nor values are ever transposed or copied. Legend: D head dim, G = H / KH.
// Source of the running softmax: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_vector.c"

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
#define FEW_ROWS 3                             // up to here, dot products along D are faster

enum { OK = 0, BAD_BLOCK = 1, NO_MEMORY = 2 };

// The arrays of ForestPlan, in its order.
typedef struct {
    const int32_t *table_row, *kv_begin, *kv_end, *token_begin, *tokens, *slots, *order, *merge_begin;
    int64_t num_items, num_tokens;
} Plan;

// Strides are in elements. lse and partials are contiguous: [T, H], [slots, H, D], [slots, H].
typedef struct {
    const float *q, *k, *v;
    const int32_t *table, *positions;
    const float *alibi;                        // [H], or NULL
    float *out, *lse, *partial_out, *partial_lse;
    int64_t q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row;
    int64_t num_blocks, block_size, num_heads, num_kv_heads, head_dim;
    int64_t window;                            // 0: none
    float scale, softcap;                      // softcap 0: none
} Call;

typedef struct {
    float *query;                              // [row block][D][BLOCK_ROWS]; few rows: [row][D]
    float *output;                             // [row][D], not yet divided by sum
    vec scores[TILE][BLOCK_VECTORS];
    vec maximum[CHUNK_ROWS / LANES], sum[CHUNK_ROWS / LANES], slope[CHUNK_ROWS / LANES];
    ivec position[CHUNK_ROWS / LANES];
    int64_t first_position[CHUNK_BLOCKS], last_position[CHUNK_BLOCKS];
    float correction[BLOCK_ROWS];
    const float *keys[TILE + KEYS], *values[TILE];
} Scratch;

// Point keys[t], values[t] at tokens begin .. begin + count - 1. The last key repeats up to a multiple of
// KEYS, so that scores need no tail; false: the table names a block that does not exist.
static bool find_keys(const Call *c, Scratch *s, const int32_t *table, int64_t head, int64_t begin, int count) {
    int64_t block = begin / c->block_size, offset = begin % c->block_size;
    const float *k = NULL, *v = NULL;
    for (int t = 0; t < count; t++, offset++) {
        if (offset == c->block_size) { block++; offset = 0; }
        if (t == 0 || offset == 0) {
            int64_t id = table[block];
            if (id < 0 || id >= c->num_blocks) return false;
            k = c->k + id * c->k_block + head * c->k_head;
            v = c->v + id * c->v_block + head * c->v_head;
        }
        s->keys[t] = k + offset * c->k_token;
        s->values[t] = v + offset * c->v_token;
    }
    for (int t = count; t % KEYS; t++) s->keys[t] = s->keys[count - 1];
    return true;
}

// scores[key][row] of KEYS keys and num_vectors row vectors; query is [D][BLOCK_ROWS].
INLINE void score_block(vec (*scores)[BLOCK_VECTORS], const float *query, const float *const *keys, int64_t dim,
                        const int num_vectors) {
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

// scores[row] of one key and a few rows; query is [row][D].
INLINE void score_few(vec *scores, const float *query, const float *key, int64_t dim, const int rows) {
    vec sum[FEW_ROWS] = {0}, result = {0};
    float tail[FEW_ROWS] = {0};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
        for (int r = 0; r < rows; r++) sum[r] += load(key + d) * load(query + r * dim + d);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++) tail[r] += key[d] * query[r * dim + d];
    for (int r = 0; r < rows; r++) result[r] = sum_lanes(sum[r]) + tail[r];
    *scores = result;
}

static void score_tile(Scratch *s, const float *query, int count, int64_t dim, int num_vectors, int64_t few) {
    if (few == 1) for (int t = 0; t < count; t++) score_few(s->scores[t], query, s->keys[t], dim, 1);
    else if (few == 2) for (int t = 0; t < count; t++) score_few(s->scores[t], query, s->keys[t], dim, 2);
    else if (few == 3) for (int t = 0; t < count; t++) score_few(s->scores[t], query, s->keys[t], dim, 3);
    else for (int t = 0; t < count; t += KEYS) {
        if (num_vectors == 1) score_block(s->scores + t, query, s->keys + t, dim, 1);
        else if (num_vectors == 2) score_block(s->scores + t, query, s->keys + t, dim, 2);
        else score_block(s->scores + t, query, s->keys + t, dim, 3);
    }
}

// Cap, bias and mask the scores of row vector i for keys begin .. begin + count - 1.
static void adjust_scores(const Call *c, Scratch *s, int i, int64_t begin, int count, bool masked) {
    int v = i % BLOCK_VECTORS;
    for (int t = 0; t < count; t++) {
        vec score = s->scores[t][v];
        ivec distance = s->position[i] - splat_int((int32_t)(begin + t));
        if (c->softcap > 0) score = c->softcap * tanh_vec(score / c->softcap);
        if (c->alibi) score -= s->slope[i] * __builtin_convertvector(distance, vec);
        if (masked) {
            ivec visible = distance >= 0;
            if (c->window) visible &= distance < (int32_t)c->window;
            score = select_vec(visible, score, splat(-INFINITY));
        }
        s->scores[t][v] = score;
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
INLINE void add_values(Scratch *s, float *output, int row, int64_t d, int count, int64_t dim, const int rows,
                       const int vectors) {
    vec sum[VALUE_ROWS][VALUE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = load(output + (row + r) * dim + d + v * LANES) * s->correction[row + r];
    for (int t = 0; t < count; t++) {
        const float *weight = (const float *)s->scores[t] + row;
        for (int v = 0; v < vectors; v++) {
            vec value = load(s->values[t] + d + v * LANES);
            for (int r = 0; r < rows; r++) sum[r][v] += weight[r] * value;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(output + (row + r) * dim + d + v * LANES, sum[r][v]);
}

INLINE void add_value_rows(Scratch *s, float *output, int row, int count, int64_t dim, const int rows) {
    int64_t d = 0;
    for (; d + VALUE_VECTORS * LANES <= dim; d += VALUE_VECTORS * LANES)
        add_values(s, output, row, d, count, dim, rows, VALUE_VECTORS);
    for (; d + LANES <= dim; d += LANES) add_values(s, output, row, d, count, dim, rows, 1);
    for (; d < dim; d++)
        for (int r = row; r < row + rows; r++) {
            float sum = output[r * dim + d] * s->correction[r];
            for (int t = 0; t < count; t++) sum += ((const float *)s->scores[t])[r] * s->values[t][d];
            output[r * dim + d] = sum;
        }
}

static void add_value_block(Scratch *s, float *output, int rows, int count, int64_t dim) {
    int row = 0;
    for (; row + VALUE_ROWS <= rows; row += VALUE_ROWS) add_value_rows(s, output, row, count, dim, VALUE_ROWS);
    for (; row + 3 <= rows; row += 3) add_value_rows(s, output, row, count, dim, 3);
    for (; row < rows; row++) add_value_rows(s, output, row, count, dim, 1);
}

// Rows are (token, group head) pairs: row r belongs to token r / G and query head kv_head * G + r % G.
static void load_rows(const Call *c, Scratch *s, const int32_t *tokens, int64_t head, int64_t first, int rows) {
    int64_t group = c->num_heads / c->num_kv_heads, dim = c->head_dim;
    int padded = (rows + LANES - 1) / LANES * LANES;
    bool few = rows <= FEW_ROWS;
    for (int r = 0; r < padded; r++) {
        int block = r / BLOCK_ROWS, i = r / LANES, lane = r % LANES;
        // Padding repeats the last row; its results are not stored.
        int64_t source = first + (r < rows ? r : rows - 1);
        int64_t token = tokens[source / group], query_head = head * group + source % group;
        int64_t position = c->positions[token];
        const float *q = c->q + token * c->q_token + query_head * c->q_head;
        float *query = few ? s->query + r * dim : s->query + block * dim * BLOCK_ROWS + r % BLOCK_ROWS;
        if (!few || r < rows)
            for (int64_t d = 0; d < dim; d++) query[few ? d : d * BLOCK_ROWS] = q[d] * c->scale;
        s->position[i][lane] = (int32_t)position;
        s->slope[i][lane] = c->alibi ? c->alibi[query_head] : 0;
        s->maximum[i][lane] = -INFINITY;
        s->sum[i][lane] = 0;
        if (r % BLOCK_ROWS == 0) s->first_position[block] = s->last_position[block] = position;
        if (position < s->first_position[block]) s->first_position[block] = position;
        if (position > s->last_position[block]) s->last_position[block] = position;
    }
    memset(s->output, 0, sizeof(float) * (size_t)(rows * dim));
}

// Write the rows' results: to the token's output, or to the slot of its partial result.
static void store_rows(const Call *c, Scratch *s, const int32_t *tokens, const int32_t *slots, int64_t head,
                       int64_t first, int rows) {
    int64_t group = c->num_heads / c->num_kv_heads, dim = c->head_dim;
    for (int r = 0; r < rows; r++) {
        int64_t index = (first + r) / group, slot = slots[index];
        int64_t at = (slot < 0 ? tokens[index] : slot) * c->num_heads + head * group + (first + r) % group;
        float *out = (slot < 0 ? c->out : c->partial_out) + at * dim;
        float sum = s->sum[r / LANES][r % LANES], factor = sum == 0 ? 0 : 1 / sum;
        for (int64_t d = 0; d < dim; d++) out[d] = s->output[r * dim + d] * factor;
        (slot < 0 ? c->lse : c->partial_lse)[at] = s->maximum[r / LANES][r % LANES] + logf(sum);
    }
}

static void attend_tile(const Call *c, Scratch *s, int rows, int64_t begin, int count) {
    for (int first = 0, block = 0; first < rows; first += BLOCK_ROWS, block++) {
        int block_rows = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
        int num_vectors = (block_rows + LANES - 1) / LANES;
        int64_t low = s->first_position[block], high = s->last_position[block], last = begin + count - 1;
        if (begin > high || (c->window && last <= low - c->window)) continue;
        bool masked = last > low || (c->window && begin <= high - c->window);
        const float *query = s->query + block * BLOCK_ROWS * c->head_dim;
        score_tile(s, query, count, c->head_dim, num_vectors, rows <= FEW_ROWS ? rows : 0);
        for (int v = 0; v < num_vectors; v++) {
            int i = block * BLOCK_VECTORS + v;
            if (masked || c->alibi || c->softcap > 0) adjust_scores(c, s, i, begin, count, masked);
            weigh_scores(s, i, count);
        }
        add_value_block(s, s->output + first * c->head_dim, block_rows, count, c->head_dim);
    }
}

// Attend some rows of an item; tiles end at multiples of TILE, so results do not depend on how items are cut.
static int attend_rows(const Plan *p, const Call *c, Scratch *s, int64_t item, int64_t head, int64_t first, int rows) {
    const int32_t *tokens = p->tokens + p->token_begin[item], *slots = p->slots + p->token_begin[item];
    const int32_t *table = c->table + p->table_row[item] * c->table_row;
    load_rows(c, s, tokens, head, first, rows);
    int64_t low = s->first_position[0], high = s->last_position[0];
    for (int block = 1; block * BLOCK_ROWS < rows; block++) {
        if (s->first_position[block] < low) low = s->first_position[block];
        if (s->last_position[block] > high) high = s->last_position[block];
    }
    int64_t begin = p->kv_begin[item], end = p->kv_end[item];
    if (high + 1 < end) end = high + 1;
    if (c->window && low - c->window + 1 > begin) begin = low - c->window + 1;
    while (begin < end) {
        int64_t next = (begin / TILE + 1) * TILE;
        int count = (int)((next < end ? next : end) - begin);
        if (!find_keys(c, s, table, head, begin, count)) return BAD_BLOCK;
        attend_tile(c, s, rows, begin, count);
        begin += count;
    }
    store_rows(c, s, tokens, slots, head, first, rows);
    return OK;
}

// out = sum of partials weighted by exp(lse - maximum), over the total weight; all empty: 0 and -inf.
static void merge_partials(const Call *c, int64_t token, int64_t begin, int64_t end) {
    for (int64_t h = 0; h < c->num_heads; h++) {
        float top = -INFINITY, total = 0;
        for (int64_t i = begin; i < end; i++) top = fmaxf(top, c->partial_lse[i * c->num_heads + h]);
        float *out = c->out + (token * c->num_heads + h) * c->head_dim;
        memset(out, 0, sizeof(float) * (size_t)c->head_dim);
        for (int64_t i = begin; i < end && top > -INFINITY; i++) {
            float weight = expf(c->partial_lse[i * c->num_heads + h] - top);
            const float *partial = c->partial_out + (i * c->num_heads + h) * c->head_dim;
            total += weight;
            for (int64_t d = 0; d < c->head_dim; d++) out[d] += weight * partial[d];
        }
        for (int64_t d = 0; d < c->head_dim && total > 0; d++) out[d] /= total;
        c->lse[token * c->num_heads + h] = top + logf(total);
    }
}

static Scratch *new_scratch(int64_t dim, int64_t rows) {
    int64_t blocks = rows < CHUNK_ROWS ? (rows + BLOCK_ROWS - 1) / BLOCK_ROWS : CHUNK_BLOCKS;
    size_t floats = (size_t)(blocks * BLOCK_ROWS * dim + LANES) / LANES * LANES;
    size_t header = (sizeof(Scratch) + 63) / 64 * 64;
    Scratch *s = aligned_alloc(64, header + (2 * floats * sizeof(float) + 63) / 64 * 64);
    if (s) {
        s->query = (float *)((char *)s + header);
        s->output = s->query + floats;
    }
    return s;
}

// Attend a whole step. max_rows: most rows of an item (its tokens x G). Returns OK, BAD_BLOCK or NO_MEMORY.
int octavo_attend(const Plan *p, const Call *c, int64_t max_rows, int threads) {
    int status = OK;
#pragma omp parallel num_threads(threads)
    {
        Scratch *s = new_scratch(c->head_dim, max_rows);
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < p->num_items * c->num_kv_heads; unit++) {
            int64_t item = p->order[unit / c->num_kv_heads], head = unit % c->num_kv_heads;
            int64_t rows = (p->token_begin[item + 1] - p->token_begin[item]) * (c->num_heads / c->num_kv_heads);
            int result = s ? OK : NO_MEMORY;
            for (int64_t first = 0; first < rows && result == OK; first += CHUNK_ROWS)
                result = attend_rows(p, c, s, item, head, first,
                                     (int)(rows - first < CHUNK_ROWS ? rows - first : CHUNK_ROWS));
            if (result != OK) {
#pragma omp atomic write
                status = result;
            }
        }
        free(s);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < p->num_tokens; t++)
            if (p->merge_begin[t] < p->merge_begin[t + 1])
                merge_partials(c, t, p->merge_begin[t], p->merge_begin[t + 1]);
    }
    return status;
}
