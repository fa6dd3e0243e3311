// Rotate heads, and store keys and values to their slots of the paged cache.

#include <string.h>

#include "calls.h"
#include "../../kernels/c/vector.c"

// Neighbouring elements are a complex number, multiplied by the token's rotation [D].
void octavo_rotate_token(float *heads, const float *rotation, int64_t num_heads, int64_t head_dim) {
    for (int64_t h = 0; h < num_heads; h++) {
        float *x = heads + h * head_dim;
        for (int64_t d = 0; d < head_dim; d += 2) {
            float re = x[d] * rotation[d] - x[d + 1] * rotation[d + 1];
            x[d + 1] = x[d] * rotation[d + 1] + x[d + 1] * rotation[d];
            x[d] = re;
        }
    }
}

// Rotate every head of [T, heads, D] in place by rotations [T, D]. Tokens lie token_stride elements apart.
void octavo_rotate(float *heads, const float *rotations, int64_t num_tokens, int64_t num_heads,
                   int64_t head_dim, int64_t token_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (num_tokens * num_heads * head_dim > 32768)
    for (int64_t t = 0; t < num_tokens; t++)
        octavo_rotate_token(heads + t * token_stride, rotations + t * head_dim, num_heads, head_dim);
}

static void round_vec(uint16_t *to, vec x) { store_bfloat16(to, select_vec(x == x, x, splat(NAN))); }

// Write a row to element `at` of the cache.
static void store_row(const Store *c, void *cache, int64_t at, const float *row) {
    int64_t dim = c->head_dim, d = 0;
    if (c->kv_bytes == 4) {
        memcpy((float *)cache + at, row, sizeof(float) * (size_t)dim);
        return;
    }
    uint16_t *to = (uint16_t *)cache + at;
    for (; d + LANES <= dim; d += LANES) round_vec(to + d, load(row + d));
    if (d < dim) {
        vec last = {0};
        uint16_t rounded[LANES];
        memcpy(&last, row + d, (size_t)(dim - d) * sizeof *row);
        round_vec(rounded, last);
        memcpy(to + d, rounded, (size_t)(dim - d) * sizeof *to);
    }
}

void octavo_store_token(const Store *c, int64_t token) {
    if (c->slots[token] < 0) return;
    int64_t block = c->slots[token] / c->block_size, offset = c->slots[token] % c->block_size;
    for (int64_t h = 0; h < c->num_kv_heads; h++) {
        store_row(c, c->k_cache, block * c->kc_block + offset * c->kc_token + h * c->kc_head,
                  c->k + token * c->k_token + h * c->k_head);
        store_row(c, c->v_cache, block * c->vc_block + offset * c->vc_token + h * c->vc_head,
                  c->v + token * c->v_token + h * c->v_head);
    }
}

int64_t octavo_bad_slot(const Store *c) {
    for (int64_t t = 0; t < c->num_tokens; t++)
        if (c->slots[t] < -1 || c->slots[t] >= c->num_slots) return t;
    return -1;
}

// Returns -1, or the first token whose slot does not exist (then nothing is written).
int64_t octavo_store(const Store *c, int threads) {
    int64_t bad_token = octavo_bad_slot(c);
    if (bad_token >= 0) return bad_token;
#pragma omp parallel for num_threads(threads) if (c->num_tokens * c->num_kv_heads * c->head_dim > 16384)
    for (int64_t t = 0; t < c->num_tokens; t++) octavo_store_token(c, t);
    return -1;
}
