// All layers of a decoder in one call: one parallel region for a step, in which a team of threads goes from
// layer to layer. They wait for one another after each stage, so the next one reads what it has written:
//
//     hidden -> norm -> 8 bits -> qkv -> rotate, store -> attend -> 8 bits -> o       -> + hidden
//     hidden -> norm -> 8 bits -> gate, up -> silu(gate) * up    -> 8 bits -> down    -> + hidden

#include <stdlib.h>

#include "../../../attention/cpu/calls.h"
#include "blocks.h"
#include "layers.h"

#define BLOCK 32

typedef struct {
    const Linear *qkv, *o, *gate_up, *down;
    const float *attention_norm, *feed_forward_norm;   // [hidden]
    const float *head_norm;                            // of q and k heads [H + KH, D], or NULL
    int64_t cache_layer, rope, window;
    float attention_eps, feed_forward_eps, head_eps;
    float scale, softcap;
} Layer;

// What layers with one block table have in common. For an attention call, a layer fills in its own pointers and
// options. All groups have heads of one size.
typedef struct {
    Plan *plan;
    Call attend;
    Store store;
} Group;

// Where a layer of the cache is.
typedef struct {
    int64_t group;
    char *keys, *values;
} Place;

typedef struct {
    const float *const *query_rotations;       // of each rope: [T, D]
    const float *const *key_rotations;
    Group *groups;
    const Place *places;                       // of each layer of the cache
    int64_t failed;                            // the group in which something is wrong
} Step;

// The memory that layers share: T rows of each.
typedef struct {
    void *memory;
    float *normed, *qkv, *attended, *gate_up;
    void *rows;                                // in 8 bits
} Buffers;

static Buffers new_buffers(size_t rows, size_t hidden, size_t heads, size_t qkv, size_t gate_up) {
    size_t widest = gate_up / 2 > hidden ? gate_up / 2 : hidden;
    if (heads > widest) widest = heads;
    size_t floats = rows * (hidden + qkv + heads + gate_up);
    Buffers b;
    b.memory = malloc(floats * sizeof(float) + octavo_row_bytes(rows, widest / BLOCK) + 1);
    b.normed = b.memory;
    b.qkv = b.normed + rows * hidden;
    b.attended = b.qkv + rows * qkv;
    b.gate_up = b.attended + rows * heads;
    b.rows = b.gate_up + rows * gate_up;
    return b;
}

// out [T, stride] = norm(hidden) W^T + b.
static void norm_and_project(Team *team, const Linear *linear, const float *norm, float eps, float *hidden,
                             int64_t size, Buffers b, int64_t rows, float *out) {
    Rows x = octavo_place_rows(b.rows, (size_t)rows, (size_t)size / BLOCK);
    TEAM_FOR(team, r, rows) {
        octavo_norm_row(hidden + r * size, NULL, norm, b.normed + r * size, size, eps);
        octavo_quantise_row(x, (size_t)r, b.normed + r * size);
    }
    team_wait(team);
    octavo_linear_in_team(team, linear, x, out, (size_t)linear->num_outputs, 0);
}

static void rotate_and_store(Team *team, const Layer *layer, const Step *step, int64_t queries, const Store *store,
                             float *qkv, int64_t rows) {
    int64_t dim = store->head_dim, heads = queries + store->num_kv_heads;
    TEAM_FOR(team, t, rows) {
        float *row = qkv + t * store->k_token;
        for (int64_t h = 0; layer->head_norm && h < heads; h++)
            octavo_norm_row(row + h * dim, NULL, layer->head_norm + h * dim, row + h * dim, dim, layer->head_eps);
        octavo_rotate_token(row, step->query_rotations[layer->rope] + t * dim, queries, dim);
        octavo_rotate_token(row + queries * dim, step->key_rotations[layer->rope] + t * dim, heads - queries, dim);
        octavo_store_token(store, t);
    }
    team_wait(team);
}

static void set_options(Call *call, const Layer *layer) {
    call->scale = layer->scale;
    call->softcap = layer->softcap;
    call->window = layer->window;
}

static void attention(Team *team, const Layer *layer, const Step *step, float *hidden, int64_t size, Buffers b,
                      Scratch *s) {
    const Place *place = &step->places[layer->cache_layer];
    Group *group = &step->groups[place->group];
    Call call = group->attend;
    Store store = group->store;
    int64_t rows = call.num_tokens, dim = call.head_dim, heads = call.num_heads * dim;
    norm_and_project(team, layer->qkv, layer->attention_norm, layer->attention_eps, hidden, size, b, rows, b.qkv);
    store.k = b.qkv + heads;
    store.v = store.k + call.num_kv_heads * dim;
    call.q = b.qkv;
    call.k = store.k_cache = place->keys;
    call.v = store.v_cache = place->values;
    call.out = b.attended;
    set_options(&call, layer);
    rotate_and_store(team, layer, step, call.num_heads, &store, b.qkv, rows);
    octavo_attend_in_team(team, group->plan, &call, s);
    Rows x = octavo_place_rows(b.rows, (size_t)rows, (size_t)heads / BLOCK);
    TEAM_FOR(team, r, rows) octavo_quantise_row(x, (size_t)r, b.attended + r * heads);
    team_wait(team);
    octavo_linear_in_team(team, layer->o, x, hidden, (size_t)size, 1);
}

static void feed_forward(Team *team, const Layer *layer, float *hidden, int64_t size, Buffers b, int64_t rows) {
    int64_t inner = layer->gate_up->num_outputs / 2;
    norm_and_project(team, layer->gate_up, layer->feed_forward_norm, layer->feed_forward_eps, hidden, size, b,
                     rows, b.gate_up);
    Rows x = octavo_place_rows(b.rows, (size_t)rows, (size_t)inner / BLOCK);
    TEAM_FOR(team, r, rows) {
        float *gate = b.gate_up + 2 * r * inner;
        octavo_silu_row(gate, gate + inner, gate, inner);
        octavo_quantise_row(x, (size_t)r, gate);
    }
    team_wait(team);
    octavo_linear_in_team(team, layer->down, x, hidden, (size_t)size, 1);
}

// hidden [T, size] float32 goes through all layers, in place. Slots were checked. Returns OK, or what is wrong
// with a plan, a block table or a layer's options, which the group step->failed then has; hidden is undefined then.
int octavo_run_layers(const Layer *layers, int64_t num_layers, Step *step, float *hidden, int64_t size,
                      int threads) {
    const Call *c = &step->groups[0].attend;
    size_t gate_up = 0;
    int64_t most = 1;
    for (int64_t i = 0; i < num_layers; i++) {
        step->failed = step->places[layers[i].cache_layer].group;
        Group *group = &step->groups[step->failed];
        set_options(&group->attend, &layers[i]);
        int status = octavo_check_call(group->plan, &group->attend);
        if (status != OK) return status;
        int64_t tokens = octavo_most_tokens(group->plan);
        if (tokens > most) most = tokens;
        if ((size_t)layers[i].gate_up->num_outputs > gate_up) gate_up = (size_t)layers[i].gate_up->num_outputs;
    }
    size_t rows = (size_t)c->num_tokens, qkv = (size_t)step->groups[0].store.k_token;
    Buffers b = new_buffers(rows, (size_t)size, (size_t)(c->num_heads * c->head_dim), qkv, gate_up);
    if (!b.memory) return NO_MEMORY;
    int status = OK;
    Crew crew = CREW;
#pragma omp parallel num_threads(threads)
    {
        Team team = team_begin(&crew);
        Scratch *s = octavo_new_scratch(most, c);
        if (!s) {
#pragma omp atomic write
            status = NO_MEMORY;
        }
        for (int64_t i = 0; i < num_layers; i++) {
            attention(&team, &layers[i], step, hidden, size, b, s);
            feed_forward(&team, &layers[i], hidden, size, b, c->num_tokens);
        }
        free(s);
    }
    free(b.memory);
    return status;
}
