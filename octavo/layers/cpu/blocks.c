// y = x W^T for weights that stay in blocks of 32 small integers with a scale each, and perhaps a minimum:
//
//     weight = scale * q + min        q: 4 bits unsigned, or 8 bits signed
//
// Rows of x become blocks of 8-bit integers too, x = d * p; so for every block of 32
//
//     y += (scale * d) * sum(q * p) + min * (d * sum(p))
//
// Some weights have a scale for each half of a block. Integer sums are exact, and floats are added block after
// block, so no row depends on its neighbours.
//
// Eight outputs make a tile, whose weights lie in the order in which they are read:
//
//     one block of a tile    8 groups of 4 inputs x 8 outputs x 4 bytes    (one vector a group)
//     in 4 bits              group g in the low halves, group g + 4 in the high halves of vector g
//
// A vector of weights meets 4 bytes of a row of x, repeated for all outputs: no sum crosses a vector.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 32
#define TILE 8
#define GROUPS 8
#define HALF (GROUPS / 2)
#define ROWS 4

typedef float f32x8 __attribute__((vector_size(32), may_alias));
typedef float loose_f32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i32x8 __attribute__((vector_size(32), may_alias));
typedef uint8_t u8x32 __attribute__((vector_size(32), aligned(1), may_alias));
typedef _Float16 f16x8 __attribute__((vector_size(16), aligned(2), may_alias));

INLINE f32x8 load(const float *p) { return *(const loose_f32x8 *)p; }

// Scales are float16 or float32, as the checkpoint has them.
INLINE f32x8 load_scales(const void *p, size_t block, int is_half) {
    if (!is_half) return load((const float *)p + block * TILE);
#if defined(__F16C__)
    return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + block));
#else
    return __builtin_convertvector(((const f16x8 *)p)[block], f32x8);
#endif
}

INLINE int32_t load4(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

// One block of a tile, unpacked to a vector for each group.
typedef struct {
    u8x32 groups[GROUPS];
} tile_block;

INLINE tile_block unpack(const uint8_t *weights, size_t block, int bits) {
    tile_block tile;
    if (bits == 8) {
        const u8x32 *stored = (const u8x32 *)(weights + block * BLOCK * TILE);
        for (int g = 0; g < GROUPS; g++) tile.groups[g] = stored[g];
        return tile;
    }
    const u8x32 *stored = (const u8x32 *)(weights + block * BLOCK * TILE / 2);
    for (int g = 0; g < HALF; g++) {
        u8x32 both = stored[g];
        tile.groups[g] = both & 15;
        tile.groups[g + HALF] = both >> 4;
    }
    return tile;
}

// For each output of a tile, the sum of products of groups first to last - 1 with one block of a row of x;
// sum: of those numbers of x.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DPBUSD _mm256_dpbusd_epi32
#else
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif
INLINE i32x8 dot(const tile_block *tile, const int8_t *x, int first, int last, int bits, int32_t sum) {
    // The instruction wants unsigned weights: signed ones become q + 128, which adds 128 times the sum of x.
    __m256i total = _mm256_set1_epi32(bits == 8 ? -128 * sum : 0), flip = _mm256_set1_epi8((char)0x80);
    for (int g = first; g < last; g++) {
        __m256i q = (__m256i)tile->groups[g];
        if (bits == 8) q = _mm256_xor_si256(q, flip);
        total = DPBUSD(total, q, _mm256_set1_epi32(load4(x + 4 * g)));
    }
    return (i32x8)total;
}
#elif defined(__AVX2__)
INLINE i32x8 dot(const tile_block *tile, const int8_t *x, int first, int last, int bits, int32_t sum) {
    const __m256i ones = _mm256_set1_epi16(1);
    (void)sum;
    if (bits == 4) {
        // 16 products of at most 15 * 127 fit 16 bits.
        __m256i pairs = _mm256_setzero_si256();
        for (int g = first; g < last; g++) {
            __m256i p = _mm256_set1_epi32(load4(x + 4 * g));
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)tile->groups[g], p));
        }
        return (i32x8)_mm256_madd_epi16(pairs, ones);
    }
    __m256i total = _mm256_setzero_si256();
    for (int g = first; g < last; g++) {
        // q * p = |q| * (p with q's sign); two such products, of at most 128 * 127, fit 16 bits.
        __m256i q = (__m256i)tile->groups[g], p = _mm256_set1_epi32(load4(x + 4 * g));
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(p, q));
        total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, ones));
    }
    return (i32x8)total;
}
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
INLINE i32x8 dot(const tile_block *tile, const int8_t *x, int first, int last, int bits, int32_t sum) {
    int32x4_t halves[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    (void)bits, (void)sum;
    for (int g = first; g < last; g++) {
        int8x16_t p = vreinterpretq_s8_s32(vdupq_n_s32(load4(x + 4 * g))), q[2];
        memcpy(q, &tile->groups[g], sizeof q);
        for (int h = 0; h < 2; h++) halves[h] = vdotq_s32(halves[h], q[h], p);
    }
    i32x8 total;
    memcpy(&total, halves, sizeof total);
    return total;
}
#else
INLINE i32x8 dot(const tile_block *tile, const int8_t *x, int first, int last, int bits, int32_t sum) {
    i32x8 total = {0};
    (void)bits, (void)sum;
    for (int g = first; g < last; g++) {
        int8_t q[BLOCK];
        memcpy(q, &tile->groups[g], sizeof q);
        for (int i = 0; i < TILE; i++)
            for (int j = 0; j < 4; j++) total[i] += q[4 * i + j] * x[4 * g + j];
    }
    return total;
}
#endif

// Rows of x in 8 bits.
typedef struct {
    int8_t *values;      // [rows, size]
    float *scales;       // [rows, blocks]
    int32_t *sums;       // [rows, blocks, 2], of each half of a block
} quantised;

INLINE void quantise_block(const float *from, int8_t *to, float *scale, int32_t *sums) {
    float most = 0, undefined = 0;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < BLOCK; i++) most = fmaxf(most, fabsf(from[i]));
    // x - x is 0, but NaN for a NaN or an infinity, whose answer then is NaN.
#pragma omp simd reduction(+ : undefined)
    for (int i = 0; i < BLOCK; i++) undefined += from[i] - from[i];
    float factor = most > 0 ? 127 / most : 0;
    *scale = most / 127 + undefined;
    for (int half = 0; half < 2; half++) {
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = half * BLOCK / 2; i < (half + 1) * BLOCK / 2; i++) {
            // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
            float rounded = from[i] * factor + 12582912.0f;
            int32_t bits;
            memcpy(&bits, &rounded, 4);
            to[i] = (int8_t)bits;
            sum += (int8_t)bits;
        }
        sums[half] = sum;
    }
}

// What is the same for all products of a call, known to the compiler.
typedef struct {
    int bits;            // of a weight: 4 or 8
    int is_half;         // scales are float16
    int halves;          // scales of a block: 1 or 2
} form;

// One tile of outputs for `count` rows of x from `row` on.
INLINE void multiply(const uint8_t *weights, const void *scales, const void *mins, quantised x, size_t row,
                     int count, size_t blocks, form f, f32x8 *out) {
    for (int r = 0; r < count; r++) out[r] = (f32x8){0};
    for (size_t b = 0; b < blocks; b++) {
        tile_block tile = unpack(weights, b, f.bits);
        f32x8 scale = load_scales(scales, b * f.halves, f.is_half), second = {0}, min = {0};
        if (f.halves == 2) second = load_scales(scales, b * 2 + 1, f.is_half);
        if (mins) min = load_scales(mins, b, f.is_half);
        for (int r = 0; r < count; r++) {
            size_t place = (row + r) * blocks + b;
            float d = x.scales[place];
            const int8_t *p = x.values + place * BLOCK;
            int32_t sum = x.sums[2 * place], second_sum = x.sums[2 * place + 1];
            if (f.halves == 1) {
                i32x8 products = dot(&tile, p, 0, GROUPS, f.bits, sum + second_sum);
                out[r] += __builtin_convertvector(products, f32x8) * (scale * d);
            } else {
                i32x8 low = dot(&tile, p, 0, HALF, f.bits, sum);
                i32x8 high = dot(&tile, p, HALF, GROUPS, f.bits, second_sum);
                out[r] += __builtin_convertvector(low, f32x8) * (scale * d);
                out[r] += __builtin_convertvector(high, f32x8) * (second * d);
            }
            if (mins) out[r] += min * (d * (float)(sum + second_sum));
        }
    }
}

INLINE void product(const uint8_t *weights, const void *scales, const void *mins, const float *bias,
                    quantised x, float *out, size_t rows, size_t blocks, size_t outputs, size_t stride, form f) {
    size_t tiles = (outputs + TILE - 1) / TILE, weight_bytes = blocks * BLOCK * TILE * f.bits / 8;
    size_t min_bytes = blocks * TILE * (f.is_half ? 2 : 4), scale_bytes = min_bytes * f.halves;
#pragma omp for schedule(static)
    for (size_t t = 0; t < tiles; t++) {
        const uint8_t *w = weights + t * weight_bytes;
        const void *s = (const char *)scales + t * scale_bytes;
        const void *m = mins ? (const char *)mins + t * min_bytes : NULL;
        size_t width = outputs - t * TILE < TILE ? outputs - t * TILE : TILE;
        for (size_t row = 0; row < rows; row += ROWS) {
            f32x8 sums[ROWS];
            int count = rows - row < ROWS ? (int)(rows - row) : ROWS;
            switch (count) {
                case 1: multiply(w, s, m, x, row, 1, blocks, f, sums); break;
                case 2: multiply(w, s, m, x, row, 2, blocks, f, sums); break;
                case 3: multiply(w, s, m, x, row, 3, blocks, f, sums); break;
                default: multiply(w, s, m, x, row, ROWS, blocks, f, sums);
            }
            for (int r = 0; r < count; r++) {
                float *to = out + (row + r) * stride + t * TILE;
                if (bias)
                    for (size_t i = 0; i < width; i++) sums[r][i] += bias[t * TILE + i];
                memcpy(to, &sums[r], width * sizeof(float));
            }
        }
    }
}

// x [rows, size] float32, size a multiple of 32, to out [rows, stride], of which `outputs` columns are written.
// weights, scales, mins (NULL: 0): tiles, see linear/blocks.py. Returns 0, or 1 if there is no memory.
int octavo_block_linear(const float *x, const uint8_t *weights, const void *scales, const void *mins,
                        const float *bias, float *out, int64_t rows, int64_t size, int64_t outputs,
                        int64_t stride, int bits, int is_half, int halves, int threads) {
    size_t blocks = (size_t)(size / BLOCK), num = (size_t)rows * blocks;
    float *row_scales = malloc(num * (sizeof(float) + 2 * sizeof(int32_t) + BLOCK));
    if (!row_scales) return 1;
    int32_t *sums = (int32_t *)(row_scales + num);
    quantised q = {(int8_t *)(sums + 2 * num), row_scales, sums};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (size_t b = 0; b < num; b++)
            quantise_block(x + b * BLOCK, q.values + b * BLOCK, q.scales + b, q.sums + 2 * b);
#define CASE(BITS, IS_HALF, HALVES)                                          \
    if (bits == BITS && is_half == IS_HALF && halves == HALVES)              \
        product(weights, scales, mins, bias, q, out, (size_t)rows, blocks, (size_t)outputs, (size_t)stride, \
                (form){BITS, IS_HALF, HALVES})
        CASE(4, 1, 1);
        CASE(4, 0, 1);
        CASE(8, 1, 1);
        CASE(8, 0, 1);
        CASE(8, 0, 2);
    }
    free(row_scales);
    return 0;
}
