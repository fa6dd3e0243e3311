// Paged attention for CPUs, float32: C11, OpenMP and the vector extensions that GCC and Clang share.
//
// A unit of work is (plan item, kv head): its rows are the item's query tokens x the G query heads of
// that kv head. Rows stay, keys and values stream past them tile by tile, with a running softmax:
//
//     scores[key][row] = K[key][:] . Q[:][row]      row vectors, one key element broadcast
//     weights          = exp(scores - row maximum)  vertical: no reduction across lanes
//     O[row][:]       += weights[key][row] * V[key][:]
//
// Few rows, as decoding has them, go another way (few.c). Keys and values are never transposed; those of a bfloat16
// cache become float32 a tile at a time (wide.c). Legend: D head dim, G = H / KH.
// Source of the running softmax: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.

#include <stdlib.h>
#include <string.h>

#include "few.c"
#include "plan.c"
#include "wide.c"

// Point the tile at tokens begin .. end - 1, at most up to the next multiple of TILE. The last key repeats up
// to a multiple of LANES, so that scores need no tail.
static void find_tile(const Call *c, Tile *tile, const int32_t *table, int64_t head, int64_t begin,
                      int64_t end) {
    int64_t next = (begin / TILE + 1) * TILE, block = begin / c->block_size, offset = begin % c->block_size;
    const char *k = NULL, *v = NULL;
    int64_t size = c->kv_bytes;
    int count = begin < end ? (int)((next < end ? next : end) - begin) : 0;
    for (int t = 0; t < count; t++, offset++) {
        if (offset == c->block_size) { block++; offset = 0; }
        if (t == 0 || offset == 0) {
            k = (const char *)c->k + (table[block] * c->k_block + head * c->k_head) * size;
            v = (const char *)c->v + (table[block] * c->v_block + head * c->v_head) * size;
        }
        tile->keys[t] = (const void *)(k + offset * c->k_token * size);
        tile->values[t] = (const void *)(v + offset * c->v_token * size);
    }
    for (int t = count; t % LANES; t++) tile->keys[t] = tile->keys[count - 1];
    tile->begin = begin;
    tile->count = count;
}

// Rows are (token, group head) pairs: row r belongs to token r / G and query head kv_head * G + r % G.
static void load_rows(const Call *c, Scratch *s, const int32_t *tokens, int64_t head, int64_t first,
                      int rows) {
    int64_t group = c->num_heads / c->num_kv_heads, dim = c->head_dim;
    int padded = (rows + LANES - 1) / LANES * LANES;
    bool few = rows <= FEW_ROWS;
    for (int r = 0; r < padded; r++) {
        int block = r / BLOCK_ROWS, i = r / LANES, lane = r % LANES;
        // Padding repeats the last row; its results are not stored.
        int64_t source = first + (r < rows ? r : rows - 1);
        int64_t token = tokens[source / group], query_head = head * group + source % group;
        // A position below 0 sees no key; clamping it to -1 keeps distances to keys within int32.
        int64_t position = c->positions[token] < -1 ? -1 : c->positions[token];
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

// Write the rows' results: to the token's output, or to its partial result (`slots`: item_partial_ids).
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

// Attend some rows of an item, tile by tile; the next tile is located early so that it can be prefetched.
static void attend_rows(const Plan *p, const Call *c, Scratch *s, int64_t item, int64_t head, int64_t first,
                        int rows) {
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
    static const Tile none;
    Tile *tile = &s->tiles[0], *next = &s->tiles[1];
    find_tile(c, tile, table, head, begin, end);
    while (tile->count) {
        find_tile(c, next, table, head, tile->begin + tile->count, end);
        const Tile *now = tile, *coming = next;
        if (c->kv_bytes == 2) {
            widen_tile(s, tile, next, c->head_dim);
            now = &s->wide;
            coming = &none;
        }
        if (rows <= FEW_ROWS) attend_few(c, s, now, coming, rows);
        else attend_tile(c, s, now, coming, rows);
        Tile *done = tile;
        tile = next;
        next = done;
    }
    store_rows(c, s, tokens, slots, head, first, rows);
}

// out = sum of partials weighted by exp(lse - maximum), over the total weight; all empty: 0 and -inf.
// Specification: octavo.attention.merge. It runs in the parallel region of the items, after their barrier.
static void merge_partials(const Call *c, int64_t token, int64_t begin, int64_t end) {
    for (int64_t h = 0; h < c->num_heads; h++) {
        float top = -INFINITY, total = 0;
        for (int64_t i = begin; i < end; i++) top = fmaxf(top, c->partial_lse[i * c->num_heads + h]);
        float *out = c->out + (token * c->num_heads + h) * c->head_dim;
        memset(out, 0, sizeof(float) * (size_t)c->head_dim);
        for (int64_t i = begin; i < end; i++) {
            float lse = c->partial_lse[i * c->num_heads + h], weight = expf(lse - top);
            if (lse == -INFINITY) continue;
            const float *partial = c->partial_out + (i * c->num_heads + h) * c->head_dim;
            total += weight;
            for (int64_t d = 0; d < c->head_dim; d++) out[d] += weight * partial[d];
        }
        for (int64_t d = 0; d < c->head_dim && total != 0; d++) out[d] /= total;
        c->lse[token * c->num_heads + h] = top + logf(total);
    }
}

// Room for the rows of the plan's largest item.
int64_t octavo_most_tokens(const Plan *p) {
    int64_t most = 1;
    for (int64_t i = 0; i < p->num_items; i++) {
        int64_t num_tokens = p->token_begin[i + 1] - p->token_begin[i];
        if (num_tokens > most) most = num_tokens;
    }
    return most;
}

Scratch *octavo_new_scratch(int64_t most, const Call *c) {
    int64_t rows = most * (c->num_heads / c->num_kv_heads);
    int64_t blocks = rows < CHUNK_ROWS ? (rows + BLOCK_ROWS - 1) / BLOCK_ROWS : CHUNK_BLOCKS;
    size_t floats = (size_t)(blocks * BLOCK_ROWS * c->head_dim + LANES) / LANES * LANES;
    size_t wide = c->kv_bytes == 2 ? 2 * TILE * (size_t)c->head_dim : 0;
    size_t header = (sizeof(Scratch) + 63) / 64 * 64;
    Scratch *s = aligned_alloc(64, header + ((2 * floats + wide) * sizeof(float) + 63) / 64 * 64);
    if (s) {
        s->query = (float *)((char *)s + header);
        s->output = s->query + floats;
        s->widened = s->output + floats;
    }
    return s;
}

void octavo_attend_in_team(Team *team, const Plan *p, const Call *c, Scratch *s) {
    TEAM_FOR(team, unit, p->num_items * c->num_kv_heads) {
        int64_t item = p->order[unit / c->num_kv_heads], head = unit % c->num_kv_heads;
        int64_t num_tokens = p->token_begin[item + 1] - p->token_begin[item];
        int64_t rows = num_tokens * (c->num_heads / c->num_kv_heads);
        for (int64_t first = 0; s && first < rows; first += CHUNK_ROWS)
            attend_rows(p, c, s, item, head, first,
                        (int)(rows - first < CHUNK_ROWS ? rows - first : CHUNK_ROWS));
    }
    team_wait(team);
    if (!p->num_partials) return;
    TEAM_FOR(team, t, p->num_tokens)
        if (p->merge_begin[t] < p->merge_begin[t + 1])
            merge_partials(c, t, p->merge_begin[t], p->merge_begin[t + 1]);
    team_wait(team);
}

// Attend a whole step. Returns OK or an error; then the plan says where it is, and the outputs are undefined.
int octavo_attend(Plan *p, const Call *c, int threads) {
    int status = octavo_check_call(p, c);
    if (status != OK) return status;
    Crew crew = CREW;
#pragma omp parallel num_threads(threads)
    {
        Team team = team_begin(&crew);
        Scratch *s = octavo_new_scratch(octavo_most_tokens(p), c);
        if (!s) {
#pragma omp atomic write
            status = NO_MEMORY;
        }
        octavo_attend_in_team(&team, p, c, s);
        free(s);
    }
    return status;
}
