// Products of a few rows by weights in bfloat16, which become float32 exactly.

#include "../../../kernels/c/vector.c"

#define NUMBER uint16_t
#define IS_SCALED 0
#define HAS_LINES 0

INLINE vec widen(const NUMBER *p) { return load_bfloat16(p); }

#include "few.c"

// x [rows, size], w [outputs, size], bias [outputs] or NULL, out [rows, outputs].
void octavo_bfloat16_linear(const uint16_t *w, const float *bias, const float *x, float *out, int64_t rows,
                            int64_t size, int64_t outputs, int threads) {
    Weight weight = {w, NULL, outputs, size, 1, size, 1};
    multiply_rows(&weight, bias, x, out, rows, threads);
}
