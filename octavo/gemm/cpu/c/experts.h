// The experts of a layer in blocks, as Python (experts.py) knows them.

#pragma once

#include <stdint.h>

#include "blocks.h"

// Weights of E experts in blocks. limit: of clamped_swiglu, whose slope is the other number; 0: silu.
typedef struct {
    const Linear *const *gate_up, *const *down;
    int64_t number, hidden, inner;
    float limit, slope;
} Experts;

// x [tokens, hidden], and each token's experts and their weights [tokens, k]. Experts from `number` on are
// elsewhere. out [tokens, hidden]: the sums, or they are added to it.
typedef struct {
    const float *x;
    const int32_t *experts;
    const float *weights;
    float *out;
    int64_t tokens, k;
    int adds;
} Step;

// Returns 0, or 1 if there is no memory.
int octavo_run_experts(const Experts *e, const Step *step, int threads);
