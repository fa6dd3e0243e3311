// Products of a few rows by weights in float8 (e4m3) with scales, which become float32, rounded once.

#include "../../attention/cpu/vector.c"

#if defined(__F16C__)
#include <immintrin.h>
#endif

typedef uint8_t numbers __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), may_alias));
typedef _Float16 float16s __attribute__((vector_size(LANES * 2), may_alias));

#define NUMBER uint8_t
#define IS_SCALED 1

// A number's sign, exponent and mantissa, where float16 has them, are the number times 2^-8, subnormals included.
INLINE vec widen(const NUMBER *p, float scale) {
    halves bits = __builtin_convertvector(*(const numbers *)p, halves);
    bits = (bits & 0x80) << 8 | (bits & 0x7F) << 7;
#if LANES == 16
    vec small = (vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    vec small = (vec)_mm256_cvtph_ps((__m128i)bits);
#else
    vec small = __builtin_convertvector((float16s)bits, vec);
#endif
    return small * (256.0f * scale);
}

#include "few.c"

// x [rows, size]; w [outputs, size], none of them NaN; scales [ceil(outputs / height), ceil(size / width)]; bias
// [outputs] or NULL; out [rows, outputs].
void octavo_float8_linear(const uint8_t *w, const float *scales, int64_t height, int64_t width, const float *bias,
                          const float *x, float *out, int64_t rows, int64_t size, int64_t outputs, int threads) {
    Weight weight = {w, scales, outputs, size, height, width, (size + width - 1) / width};
    multiply_rows(&weight, bias, x, out, rows, threads);
}
