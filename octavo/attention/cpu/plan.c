// Checks a plan and a call before the kernel uses them. After check_call, every index is within its array, each
// output is written once, and nothing divides by 0. Time: linear in items, pairs and blocks.
// Included by attend.c, not compiled by itself.

#include <stdlib.h>

static int fail(Plan *p, int status, int64_t index, int64_t value) {
    p->fault_index = index;
    p->fault_value = value;
    return status;
}

// begins[0 .. count] rises from 0 to end.
static int check_begins(Plan *p, const int32_t *begins, int64_t count, int64_t end, int status) {
    if (begins[0] != 0) return fail(p, status, 0, begins[0]);
    for (int64_t i = 0; i < count; i++)
        if (begins[i + 1] < begins[i]) return fail(p, status, i + 1, begins[i + 1]);
    return begins[count] == end ? OK : fail(p, status, count, begins[count]);
}

// Every item occurs once in the order, and reads blocks that exist. seen: [I] zeros.
static int check_items(Plan *p, const Call *c, uint8_t *seen) {
    int64_t capacity = c->num_columns * c->block_size;
    for (int64_t i = 0; i < p->num_items; i++) {
        int64_t item = p->order[i], row = p->table_row[i], begin = p->kv_begin[i], end = p->kv_end[i];
        if (item < 0 || item >= p->num_items || seen[item]++) return fail(p, BAD_ORDER, i, item);
        if (row < 0 || row >= c->num_rows) return fail(p, BAD_ROW, i, row);
        if (begin < 0 || begin > end) return fail(p, BAD_BEGIN, i, begin);
        if (end > capacity) return fail(p, BAD_END, i, end);
        if (begin == end) continue;
        const int32_t *table = c->table + row * c->table_row;
        for (int64_t block = begin / c->block_size; block <= (end - 1) / c->block_size; block++)
            if (table[block] < 0 || table[block] >= c->num_blocks)
                return fail(p, BAD_BLOCK, row * c->num_columns + block, table[block]);
    }
    return OK;
}

// Every pair writes a place of its own: one of its token's slots or, if it is the token's only pair, the token's
// output. Every place is written. seen: [num_partials + T] zeros.
static int check_pairs(Plan *p, uint8_t *seen) {
    int64_t num_places = p->num_partials;
    for (int64_t i = 0; i < p->num_pairs; i++) {
        int64_t token = p->tokens[i], slot = p->slots[i];
        if (token < 0 || token >= p->num_tokens) return fail(p, BAD_TOKEN, i, token);
        int64_t begin = p->merge_begin[token], end = p->merge_begin[token + 1];
        bool is_its_own = slot == -1 ? begin == end : slot >= begin && slot < end;
        if (!is_its_own || seen[slot < 0 ? p->num_partials + token : slot]++)
            return fail(p, BAD_SLOT, i, slot);
    }
    for (int64_t t = 0; t < p->num_tokens; t++) num_places += p->merge_begin[t] == p->merge_begin[t + 1];
    return p->num_pairs == num_places ? OK : fail(p, UNWRITTEN, p->num_pairs, num_places);
}

int octavo_check_call(Plan *p, const Call *c) {
    if (c->block_size < 1 || c->head_dim < 1 || c->num_kv_heads < 1 || c->num_heads < 1 ||
        c->num_heads % c->num_kv_heads || p->num_tokens > c->num_tokens)
        return fail(p, BAD_SIZES, 0, 0);
    if (!isfinite(c->scale) || !isfinite(c->softcap) || c->softcap < 0 || c->window < 0)
        return fail(p, BAD_SCORES, 0, 0);
    int status = check_begins(p, p->token_begin, p->num_items, p->num_pairs, BAD_TOKEN_BEGIN);
    if (status == OK) status = check_begins(p, p->merge_begin, p->num_tokens, p->num_partials, BAD_MERGE);
    if (status != OK) return status;
    uint8_t *seen = calloc((size_t)(p->num_items + p->num_partials + p->num_tokens + 1), 1);
    if (!seen) return NO_MEMORY;
    status = check_items(p, c, seen);
    if (status == OK) status = check_pairs(p, seen + p->num_items);
    free(seen);
    return status;
}
