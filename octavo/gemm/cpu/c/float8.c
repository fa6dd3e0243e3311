// Products of a few rows by weights in float8 (e4m3) with scales, which become float32 exactly.

#include "../../../kernels/c/vector.c"

#if defined(__F16C__)
#include <immintrin.h>
#endif

typedef uint8_t numbers __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef _Float16 float16s __attribute__((vector_size(LANES * 2), may_alias));

#define NUMBER uint8_t
#define IS_SCALED 1

// A number's sign, exponent and mantissa, where float16 has them, are the number times 2^-8, subnormals included.
#define TOO_SMALL 256.0f

INLINE vec widen(const NUMBER *p) {
    halves bits = __builtin_convertvector(*(const numbers *)p, halves);
    bits = (bits & 0x80) << 8 | (bits & 0x7F) << 7;
#if LANES == 16
    return (vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)bits);
#else
    return __builtin_convertvector((float16s)bits, vec);
#endif
}

#if defined(__AVX512VBMI__)
#define HAS_LINES 1

// The upper two bytes of each number without its sign, as widen makes it; the others are 0.
static uint8_t LOW[128], HIGH[128];

// In which order unpacking bytes to words and splitting those gives 64 numbers in theirs.
static const uint8_t LINE_ORDER[64] = {
    0,  16, 1,  17, 2,  18, 3,  19, 32, 48, 33, 49, 34, 50, 35, 51, 4,  20, 5,  21, 6,  22,
    7,  23, 36, 52, 37, 53, 38, 54, 39, 55, 8,  24, 9,  25, 10, 26, 11, 27, 40, 56, 41, 57,
    42, 58, 43, 59, 12, 28, 13, 29, 14, 30, 15, 31, 44, 60, 45, 61, 46, 62, 47, 63,
};

__attribute__((constructor)) static void fill_tables(void) {
    for (uint8_t i = 0; i < 128; i += LANES) {
        uint8_t codes[LANES];
        uint32_t bits[LANES];
        for (uint8_t n = 0; n < LANES; n++) codes[n] = i + n;
        vec numbers = widen(codes);
        memcpy(bits, &numbers, sizeof bits);
        for (uint8_t n = 0; n < LANES; n++) {
            LOW[i + n] = bits[n] >> 16 & 0xFF;
            HIGH[i + n] = (uint8_t)(bits[n] >> 24);
        }
    }
}

// Makes 64 numbers at once: what widen makes, by two look-ups.
INLINE void widen_line(const NUMBER *p, vec *out) {
    __m512i codes = _mm512_permutexvar_epi8(_mm512_loadu_si512(LINE_ORDER), _mm512_loadu_si512(p));
    __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(LOW), codes, _mm512_loadu_si512(LOW + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(HIGH), codes, _mm512_loadu_si512(HIGH + 64));
    // The sign: high or (codes and 0x80).
    high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8(-128), 0xF8);
    __m512i halves[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    for (int i = 0; i < 2; i++) {
        out[2 * i] = (vec)_mm512_slli_epi32(halves[i], 16);
        out[2 * i + 1] = (vec)_mm512_and_si512(halves[i], _mm512_set1_epi32((int)0xFFFF0000));
    }
}
#else
#define HAS_LINES 0
#endif

#include "few.c"

// x [rows, size]; w [outputs, size], none of them NaN; scales [ceil(outputs / height), ceil(size / width)]; bias
// [outputs] or NULL; out [rows, outputs].
void octavo_float8_linear(const uint8_t *w, const float *scales, int64_t height, int64_t width, const float *bias,
                          const float *x, float *out, int64_t rows, int64_t size, int64_t outputs, int threads) {
    Weight weight = {w, scales, outputs, size, height, width, (size + width - 1) / width};
    multiply_rows(&weight, bias, x, out, rows, threads);
}

// Numbers of a row of W, `count` of them, times a scale, to bfloat16.
static void round_part(const uint8_t *w, float scale, uint16_t *out, size_t count) {
    size_t k = 0;
#if HAS_LINES
    for (; k + LINE <= count; k += LINE) {
        vec line[LINE / LANES];
        widen_line(w + k, line);
#pragma GCC unroll 8
        for (size_t i = 0; i < LINE / LANES; i++) store_bfloat16(out + k + i * LANES, line[i] * scale);
    }
#endif
    for (; k + LANES <= count; k += LANES) store_bfloat16(out + k, widen(w + k) * scale);
    if (k < count) {
        uint8_t last[LANES] = {0};
        uint16_t rounded[LANES];
        memcpy(last, w + k, count - k);
        store_bfloat16(rounded, widen(last) * scale);
        memcpy(out + k, rounded, (count - k) * sizeof *out);
    }
}

// Rows begin to end - 1 of W, times their scales, rounded to bfloat16: out [end - begin, size].
void octavo_float8_rows(const uint8_t *w, const float *scales, int64_t height, int64_t width, int64_t begin,
                        int64_t end, int64_t size, uint16_t *out, int threads) {
    int64_t parts = (size + width - 1) / width;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = begin; n < end; n++)
        for (int64_t part = 0; part < parts; part++) {
            int64_t k = part * width, count = k + width < size ? width : size - k;
            float scale = TOO_SMALL * scales[n / height * parts + part];
            round_part(w + n * size + k, scale, out + (n - begin) * size + k, (size_t)count);
        }
}
