// y = x W^T + b for a few rows of x, float32. Included by bfloat16.c and float8.c, not compiled by itself: NUMBER is
// the type of W's numbers, of which widen(p) makes LANES floats that are TOO_SMALL. IS_SCALED says whether tiles have
// scales, HAS_LINES whether widen_line(p, out) makes the floats of a cache line.
//
// Such a product takes as long as its weight takes to be read. Its numbers become float32 in registers. Each
// output is summed along its row of W in one order, whatever rows of x there are.

#include <stddef.h>

// Sums that a thread has in its registers: of so many rows of x and outputs.
#define ROWS 6
#if LANES == 16
#define OUTPUTS 4
#else
#define OUTPUTS 2
#endif
#define LINE (64 / sizeof(NUMBER))             // weights of a cache line
#define PREFETCH_LEVEL 2                       // into the second-level cache
#define SHARES 16                              // of a thread in a product: the last ones end together
#define PARALLEL_PRODUCTS 65536                // fewer take less time than waking threads

// W [outputs, size]. scales: of tiles of `height` rows and `width` columns, `parts` of them in a row.
typedef struct {
    const NUMBER *numbers;
    const float *scales;
    int64_t outputs, size, height, width, parts;
} Weight;

// Adds the products of LANES inputs. scale: of the weights of each output, or NULL.
INLINE void add_products(vec sums[ROWS][OUTPUTS], const NUMBER *w, size_t weight_stride, const float *scale,
                         const float *x, size_t stride, const int rows) {
    vec weights[OUTPUTS];
#pragma GCC unroll 8
    for (int n = 0; n < OUTPUTS; n++) {
        weights[n] = widen(w + (size_t)n * weight_stride);
        if (scale) weights[n] *= scale[n];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vec inputs = load(x + (size_t)r * stride);
#pragma GCC unroll 8
        for (int n = 0; n < OUTPUTS; n++) sums[r][n] = fma_vec(inputs, weights[n], sums[r][n]);
    }
}

// Adds the products of a cache line's inputs, in the same order.
INLINE void add_line(vec sums[ROWS][OUTPUTS], const NUMBER *w, size_t size, const float *scale, const float *x,
                     const int rows) {
#if HAS_LINES
#pragma GCC unroll 8
    for (size_t n = 0; n < OUTPUTS; n++) {
        vec weights[LINE / LANES];
        widen_line(w + n * size, weights);
#pragma GCC unroll 8
        for (size_t i = 0; i < LINE / LANES; i++)
            if (scale) weights[i] *= scale[n];
#pragma GCC unroll 8
        for (size_t r = 0; r < (size_t)rows; r++)
#pragma GCC unroll 8
            for (size_t i = 0; i < LINE / LANES; i++)
                sums[r][n] = fma_vec(load(x + r * size + i * LANES), weights[i], sums[r][n]);
    }
#else
#pragma GCC unroll 8
    for (size_t i = 0; i < LINE; i += LANES) add_products(sums, w + i, size, scale, x + i, size, rows);
#endif
}

// Adds the products of inputs k to end - 1, whose numbers share a scale for each output, if they have one.
INLINE void add_part(vec sums[ROWS][OUTPUTS], const NUMBER *w, size_t size, const float *scale, const float *x,
                     size_t k, size_t end, const int rows) {
    for (; k + LINE <= end; k += LINE) {
        // The same inputs of the next outputs: the CPU itself looks no further than a page of a row.
#pragma GCC unroll 8
        for (size_t n = 0; n < OUTPUTS; n++) __builtin_prefetch(w + (OUTPUTS + n) * size + k, 0, PREFETCH_LEVEL);
        add_line(sums, w + k, size, scale, x + k, rows);
    }
    for (; k + LANES <= end; k += LANES) add_products(sums, w + k, size, scale, x + k, size, rows);
    if (k < end) {
        NUMBER weights[OUTPUTS][LANES] = {0};
        float inputs[ROWS][LANES] = {0};
        for (size_t n = 0; n < OUTPUTS; n++) memcpy(weights[n], w + n * size + k, (end - k) * sizeof *w);
        for (size_t r = 0; r < (size_t)rows; r++) memcpy(inputs[r], x + r * size + k, (end - k) * sizeof *x);
        add_products(sums, *weights, LANES, scale, *inputs, LANES, rows);
    }
}

// OUTPUTS outputs from `begin` on for some rows of x; those before `first` are there already.
INLINE void multiply(const Weight *w, int64_t begin, const float *x, const float *bias, float *out, int first,
                     const int rows) {
    vec sums[ROWS][OUTPUTS] = {0};
    size_t size = (size_t)w->size;
    const NUMBER *numbers = w->numbers + (size_t)begin * size;
#if IS_SCALED
    float scale[OUTPUTS] = {0};
    size_t width = (size_t)w->width;
    for (size_t part = 0, k = 0; k < size; part++, k += width) {
        for (int64_t n = 0; n < OUTPUTS; n++)
            scale[n] = TOO_SMALL * w->scales[(begin + n) / w->height * w->parts + (int64_t)part];
        if (w->parts > 1)
            add_part(sums, numbers, size, scale, x, k, k + width < size ? k + width : size, rows);
        else
            add_part(sums, numbers, size, NULL, x, 0, size, rows);
    }
    // The only scale of a row is that of its sum.
    if (w->parts == 1)
        for (int r = 0; r < rows; r++)
            for (int n = 0; n < OUTPUTS; n++) sums[r][n] *= scale[n];
#else
    add_part(sums, numbers, size, NULL, x, 0, size, rows);
#endif
    for (int r = 0; r < rows; r++)
        for (int64_t n = first; n < OUTPUTS; n++)
            out[r * w->outputs + begin + n] = sum_lanes(sums[r][n]) + (bias ? bias[begin + n] : 0);
}

// x [rows, size], bias [outputs] or NULL, out [rows, outputs]; outputs: at least OUTPUTS.
static void multiply_rows(const Weight *w, const float *bias, const float *x, float *out, int64_t rows,
                          int threads) {
    int64_t groups = (w->outputs + OUTPUTS - 1) / OUTPUTS, share = groups / (SHARES * threads) + 1;
    int64_t products = rows * w->size * w->outputs;
#pragma omp parallel for num_threads(threads) schedule(dynamic, share) if (products > PARALLEL_PRODUCTS)
    for (int64_t g = 0; g < groups; g++) {
        // The last group begins within the one before, rather than end beyond W.
        int64_t n = g * OUTPUTS, begin = n < w->outputs - OUTPUTS ? n : w->outputs - OUTPUTS;
        int first = (int)(n - begin);
        for (int64_t r = 0; r < rows; r += ROWS) {
#define CASE(COUNT) multiply(w, begin, x + r * w->size, bias, out + r * w->outputs, first, COUNT)
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
