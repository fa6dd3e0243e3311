// y = x W^T + b for a few rows of x: W is bfloat16, everything else float32.
//
// Such a product takes as long as its weight takes to be read. Its numbers become float32 in registers, which
// is exact. Each output is summed along its row of W in one order, whatever rows of x there are.

#include <stddef.h>

#include "../../attention/cpu/vector.c"

// Sums that a thread has in its registers: of so many rows of x and outputs.
#define ROWS 6
#if LANES == 16
#define OUTPUTS 4
#else
#define OUTPUTS 2
#endif
#define LINE 32                                // weights of a cache line
#define PREFETCH_LEVEL 2                       // into the second-level cache
#define SHARES 16                              // of a thread in a product: the last ones end together
#define PARALLEL_PRODUCTS 65536                // fewer take less time than waking threads

typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE vec widen(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const halves *)p, uvec) << 16); }

// Adds the products of LANES inputs.
INLINE void add_products(vec sums[ROWS][OUTPUTS], const uint16_t *w, size_t weight_stride, const float *x,
                         size_t stride, const int rows) {
    vec weights[OUTPUTS];
#pragma GCC unroll 8
    for (int n = 0; n < OUTPUTS; n++) weights[n] = widen(w + (size_t)n * weight_stride);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vec inputs = load(x + (size_t)r * stride);
#pragma GCC unroll 8
        for (int n = 0; n < OUTPUTS; n++) sums[r][n] += inputs * weights[n];
    }
}

// OUTPUTS outputs for some rows of x; those before `first` are there already.
INLINE void multiply(const uint16_t *w, const float *x, size_t size, const float *bias, float *out, size_t stride,
                     int first, const int rows) {
    vec sums[ROWS][OUTPUTS] = {0};
    size_t k = 0;
    for (; k + LINE <= size; k += LINE) {
        // The same inputs of the next outputs: the CPU itself looks no further than a page of a row.
#pragma GCC unroll 8
        for (size_t n = 0; n < OUTPUTS; n++) __builtin_prefetch(w + (OUTPUTS + n) * size + k, 0, PREFETCH_LEVEL);
#pragma GCC unroll 4
        for (size_t i = 0; i < LINE; i += LANES) add_products(sums, w + k + i, size, x + k + i, size, rows);
    }
    for (; k + LANES <= size; k += LANES) add_products(sums, w + k, size, x + k, size, rows);
    if (k < size) {
        uint16_t weights[OUTPUTS][LANES] = {0};
        float inputs[ROWS][LANES] = {0};
        for (size_t n = 0; n < OUTPUTS; n++) memcpy(weights[n], w + n * size + k, (size - k) * sizeof *w);
        for (size_t r = 0; r < (size_t)rows; r++) memcpy(inputs[r], x + r * size + k, (size - k) * sizeof *x);
        add_products(sums, *weights, LANES, *inputs, LANES, rows);
    }
    for (int r = 0; r < rows; r++)
        for (int n = first; n < OUTPUTS; n++)
            out[(size_t)r * stride + (size_t)n] = sum_lanes(sums[r][n]) + (bias ? bias[n] : 0);
}

// x [rows, size], w [outputs, size], bias [outputs] or NULL, out [rows, outputs]; outputs: at least OUTPUTS.
void octavo_bfloat16_linear(const uint16_t *w, const float *bias, const float *x, float *out, int64_t rows,
                            int64_t size, int64_t outputs, int threads) {
    int64_t groups = (outputs + OUTPUTS - 1) / OUTPUTS, share = groups / (SHARES * threads) + 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, share) if (rows * size * outputs > PARALLEL_PRODUCTS)
    for (int64_t g = 0; g < groups; g++) {
        // The last group begins within the one before, rather than end beyond W.
        int64_t n = g * OUTPUTS, begin = n < outputs - OUTPUTS ? n : outputs - OUTPUTS;
        int first = (int)(n - begin);
        for (int64_t r = 0; r < rows; r += ROWS) {
#define CASE(COUNT)                                                                                             \
    multiply(w + begin * size, x + r * size, (size_t)size, bias ? bias + begin : NULL, out + r * outputs + begin, \
             (size_t)outputs, first, COUNT)
            switch (rows - r) {
                case 1: CASE(1); break;
                case 2: CASE(2); break;
                case 3: CASE(3); break;
                case 4: CASE(4); break;
                case 5: CASE(5); break;
                default: CASE(ROWS);
            }
        }
    }
}
