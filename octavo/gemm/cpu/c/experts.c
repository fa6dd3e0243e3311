// The experts of a layer, for all tokens of a step in one parallel region:
//
//     x -> 8 bits -> gate, up -> activation -> 8 bits -> down -> each token's sum, in the order of its choice
//
// A pair is a token and one of its k experts. Pairs are sorted by expert, so that the rows of an expert lie
// together and its weights are read once. Threads share out the tiles of several experts at once, of as many
// as have some hundred pairs: what is between gate and down then stays in the cache.

#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "experts.h"
#include "layers.h"

#define BLOCK 32
#define COLUMNS 512                            // of a sum that a thread has at a time
#define PAIRS 512                              // of experts that are multiplied together, if they are several

// Pairs that are here, sorted: of expert e those from starts[e] to starts[e + 1] - 1.
typedef struct {
    void *memory;
    int64_t *starts, *pairs, *places;          // places: of each pair among the sorted ones, -1: elsewhere
    Product *products;
    float *gate_up, *rows;                     // [pairs of experts together, 2 inner], [pairs, hidden]
    char *quantised, *inner;                   // rows in 8 bits
} Sorted;

// Counts the pairs of each expert e in starts[e + 1], and returns the most that are multiplied together.
static size_t count_pairs(const Experts *e, const Step *step, int64_t *starts) {
    int64_t num = step->tokens * step->k, most = num < PAIRS ? num : PAIRS;
    for (int64_t i = 0; i <= e->number; i++) starts[i] = 0;
    for (int64_t p = 0; p < num; p++)
        if (step->experts[p] < e->number) starts[step->experts[p] + 1]++;
    for (int64_t i = 0; i < e->number; i++) most = starts[i + 1] > most ? starts[i + 1] : most;
    return (size_t)most;
}

// memory: NULL if there is none.
static Sorted sort_pairs(const Experts *e, const Step *step) {
    size_t num = (size_t)(step->tokens * step->k), experts = (size_t)e->number;
    size_t hidden = (size_t)e->hidden, inner = (size_t)e->inner;
    Sorted s = {0};
    int64_t *starts = malloc((experts + 1) * sizeof(int64_t));
    if (!starts) return s;
    size_t together = count_pairs(e, step, starts);
    size_t bytes = octavo_row_bytes(num, hidden / BLOCK) + octavo_row_bytes(together, inner / BLOCK);
    size_t floats = together * 2 * inner + num * hidden;
    s.memory = malloc(experts * sizeof(Product) + 2 * num * sizeof(int64_t) + floats * sizeof(float) + bytes + 1);
    s.starts = starts;
    if (!s.memory) return s;
    s.products = s.memory;
    s.pairs = (int64_t *)(s.products + experts);
    s.places = s.pairs + num;
    s.gate_up = (float *)(s.places + num);
    s.rows = s.gate_up + together * 2 * inner;
    s.quantised = (char *)(s.rows + num * hidden);
    s.inner = s.quantised + octavo_row_bytes(num, hidden / BLOCK);
    for (size_t i = 0; i < experts; i++) starts[i + 1] += starts[i];
    for (size_t p = 0; p < num; p++) {
        int32_t expert = step->experts[p];
        s.places[p] = expert < e->number ? starts[expert]++ : -1;
        if (s.places[p] >= 0) s.pairs[s.places[p]] = (int64_t)p;
    }
    // Each start has become the next one.
    memmove(starts + 1, starts, experts * sizeof(int64_t));
    starts[0] = 0;
    return s;
}

// The rows in 8 bits of expert i, in memory that begins with those of expert `first`.
static Rows rows_of(const Sorted *s, char *memory, int64_t first, int64_t i, int64_t size) {
    size_t blocks = (size_t)size / BLOCK, before = (size_t)(s->starts[i] - s->starts[first]);
    size_t count = (size_t)(s->starts[i + 1] - s->starts[i]);
    return octavo_place_rows(memory + octavo_row_bytes(before, blocks), count, blocks);
}

static int64_t expert_of(const Experts *e, const Sorted *s, int64_t place) {
    int64_t low = 0, high = e->number;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (s->starts[middle] <= place) low = middle;
        else high = middle;
    }
    return low;
}

// Products of experts first to last - 1 and their rows; out begins with those. The first thread that comes
// writes them down for all.
static void multiply(Team *team, const Sorted *s, int64_t first, int64_t last, const Linear *const *linears,
                     char *memory, int64_t size, float *out) {
    int64_t count = 0, is_first = team_take(team, 1) == 0;
    for (int64_t i = first; i < last; i++) {
        if (s->starts[i + 1] == s->starts[i]) continue;
        size_t stride = (size_t)linears[i]->num_outputs, before = (size_t)(s->starts[i] - s->starts[first]);
        if (is_first)
            s->products[count] =
                (Product){linears[i], rows_of(s, memory, first, i, size), out + before * stride, stride, 0};
        count++;
    }
    team_wait(team);
    octavo_products_in_team(team, s->products, count);
}

static void run_together(Team *team, const Experts *e, const Sorted *s, int64_t first, int64_t last) {
    int64_t begin = s->starts[first], num = s->starts[last] - begin;
    char *quantised = s->quantised + octavo_row_bytes((size_t)begin, (size_t)e->hidden / BLOCK);
    multiply(team, s, first, last, e->gate_up, quantised, e->hidden, s->gate_up);
    TEAM_FOR(team, place, num) {
        float *gate = s->gate_up + 2 * place * e->inner, *up = gate + e->inner;
        if (e->limit > 0) octavo_clamped_swiglu_row(gate, up, gate, e->inner, e->limit, e->slope);
        else octavo_silu_row(gate, up, gate, e->inner);
        int64_t i = expert_of(e, s, begin + place);
        octavo_quantise_row(rows_of(s, s->inner, first, i, e->inner), (size_t)(begin + place - s->starts[i]), gate);
    }
    team_wait(team);
    multiply(team, s, first, last, e->down, s->inner, e->inner, s->rows + begin * e->hidden);
}

static void add_up(Team *team, const Experts *e, const Step *step, const Sorted *s) {
    int64_t parts = (e->hidden + COLUMNS - 1) / COLUMNS;
    TEAM_FOR(team, turn, step->tokens * parts) {
        int64_t token = turn / parts, first = turn % parts * COLUMNS;
        int64_t size = e->hidden - first < COLUMNS ? e->hidden - first : COLUMNS;
        float sums[COLUMNS] = {0}, *out = step->out + token * e->hidden + first;
        for (int64_t p = token * step->k; p < (token + 1) * step->k; p++) {
            if (s->places[p] < 0) continue;
            const float *row = s->rows + s->places[p] * e->hidden + first;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) sums[i] += row[i] * step->weights[p];
        }
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[i] = step->adds ? out[i] + sums[i] : sums[i];
    }
    team_wait(team);
}

static void run(Team *team, const Experts *e, const Step *step, const Sorted *s) {
    int64_t num = s->starts[e->number];
    TEAM_FOR(team, place, num) {
        int64_t i = expert_of(e, s, place);
        octavo_quantise_row(rows_of(s, s->quantised, 0, i, e->hidden), (size_t)(place - s->starts[i]),
                            step->x + s->pairs[place] / step->k * e->hidden);
    }
    team_wait(team);
    for (int64_t first = 0, last; first < e->number; first = last) {
        for (last = first + 1; last < e->number && s->starts[last + 1] - s->starts[first] <= PAIRS;) last++;
        if (s->starts[last] > s->starts[first]) run_together(team, e, s, first, last);
    }
    add_up(team, e, step, s);
}

int octavo_run_experts(const Experts *e, const Step *step, int threads) {
    Sorted s = sort_pairs(e, step);
    if (!s.memory) {
        free(s.starts);
        return 1;
    }
    Crew crew = CREW;
#pragma omp parallel num_threads(threads)
    {
        Team team = team_begin(&crew);
        run(&team, e, step, &s);
    }
    free(s.memory);
    free(s.starts);
    return 0;
}
