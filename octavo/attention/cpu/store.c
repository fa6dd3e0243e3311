// Rotate heads, and store keys and values to their slots of the paged cache, float32.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Keys and values [T, KH, D] and where they go; strides in elements, slot -1 writes nothing.
typedef struct {
    const float *k, *v;
    float *k_cache, *v_cache;
    const int64_t *slots;
    int64_t k_token, k_head, v_token, v_head, kc_block, kc_token, kc_head, vc_block, vc_token, vc_head;
    int64_t num_tokens, num_kv_heads, head_dim, num_slots, block_size;
} Store;

// Rotate every head of [T, heads, D] in place: neighbouring elements are a complex number, multiplied by
// the token's rotation [T, D]. Tokens lie token_stride elements apart.
void octavo_rotate(float *heads, const float *rotations, int64_t num_tokens, int64_t num_heads,
                   int64_t head_dim, int64_t token_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (num_tokens * num_heads * head_dim > 32768)
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *rotation = rotations + t * head_dim;
        for (int64_t h = 0; h < num_heads; h++) {
            float *x = heads + t * token_stride + h * head_dim;
            for (int64_t d = 0; d < head_dim; d += 2) {
                float re = x[d] * rotation[d] - x[d + 1] * rotation[d + 1];
                x[d + 1] = x[d] * rotation[d + 1] + x[d + 1] * rotation[d];
                x[d] = re;
            }
        }
    }
}

// Returns -1, or the first token whose slot does not exist (then nothing is written).
int64_t octavo_store(const Store *c, int threads) {
    for (int64_t t = 0; t < c->num_tokens; t++)
        if (c->slots[t] < -1 || c->slots[t] >= c->num_slots) return t;
    size_t bytes = sizeof(float) * (size_t)c->head_dim;
#pragma omp parallel for num_threads(threads) if (c->num_tokens * c->num_kv_heads * c->head_dim > 16384)
    for (int64_t t = 0; t < c->num_tokens; t++) {
        if (c->slots[t] < 0) continue;
        int64_t block = c->slots[t] / c->block_size, offset = c->slots[t] % c->block_size;
        for (int64_t h = 0; h < c->num_kv_heads; h++) {
            memcpy(c->k_cache + block * c->kc_block + offset * c->kc_token + h * c->kc_head,
                   c->k + t * c->k_token + h * c->k_head, bytes);
            memcpy(c->v_cache + block * c->vc_block + offset * c->vc_token + h * c->vc_head,
                   c->v + t * c->v_token + h * c->v_head, bytes);
        }
    }
    return -1;
}
