// Vectors of float32 lanes, exp and tanh. Included by others, not compiled by itself.

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)                       // 32 registers of 16 lanes
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4), may_alias));
typedef float loose_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t iquad __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), may_alias));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE vec splat(float x) { return x - (vec){0}; }
INLINE ivec splat_int(int32_t x) { return x - (ivec){0}; }
INLINE vec load(const float *p) { return *(const loose_vec *)p; }
INLINE void store(float *p, vec x) { *(loose_vec *)p = x; }
INLINE vec select_vec(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }
INLINE vec max_vec(vec a, vec b) { return select_vec(a > b, a, b); }

// What several products need is loaded once: GCC would load it again in each.
INLINE vec in_register(vec x) {
#if defined(__AVX__)
    __asm__("" : "+v"(x));
#endif
    return x;
}

// a * b + c, rounded once if the CPU can. GCC would do so in some loops and not in others: where a row's bits must not
// depend on how many rows there are, it is spelled out.
INLINE vec fma_vec(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE float fma_one(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE vec load_bfloat16(const uint16_t *p) {
    return (vec)(__builtin_convertvector(*(const halves *)p, uvec) << 16);
}
// The nearest bfloat16, of two the even one; none of x is NaN, but for the one that C calls NAN.
INLINE void store_bfloat16(uint16_t *p, vec x) {
    uvec bits = (uvec)x;
    *(halves *)p = __builtin_convertvector((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, halves);
}

// Add a vector's quarters, the first one first.
INLINE quad add_quads(quad sum, vec x) {
    quad parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
    for (int i = 0; i < LANES / 4; i++) sum += parts[i];
    return sum;
}

// Sums of four, of keys that begin with an even or an odd one: the same keys are neighbours.
#define SUM_OF_EVEN(x) (((x)[0] + (x)[1]) + ((x)[2] + (x)[3]))
#define SUM_OF_ODD(x) (((x)[3] + (x)[0]) + ((x)[1] + (x)[2]))

// Quarters first: a loop over single lanes would be compiled to scalar code.
INLINE float sum_lanes(vec x) {
    quad sum = add_quads((quad){0}, x);
    return SUM_OF_EVEN(sum);
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (iquad){__VA_ARGS__})
#endif

// The sums over the lanes of each of LANES vectors.
#if defined(__AVX2__) && !defined(__clang__)
// Two vectors become one, whose lanes are sums of neighbours' halves: neighbours in 128 bits, then 128 bits.
#define MEET(a, b, FIRST, SECOND) (__builtin_shuffle(a, b, FIRST) + __builtin_shuffle(a, b, SECOND))
#if LANES == 16
#define FIRST_ONES (ivec){0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}
#define LAST_ONES (ivec){2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31}
#define FIRST_TWOS (ivec){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}
#define LAST_TWOS (ivec){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}
#define EVEN_FOURS (ivec){0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}
#define ODD_FOURS (ivec){4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31}
#else
#define FIRST_ONES (ivec){0, 8, 1, 9, 4, 12, 5, 13}
#define LAST_ONES (ivec){2, 10, 3, 11, 6, 14, 7, 15}
#define FIRST_TWOS (ivec){0, 1, 8, 9, 4, 5, 12, 13}
#define LAST_TWOS (ivec){2, 3, 10, 11, 6, 7, 14, 15}
#define EVEN_FOURS (ivec){0, 1, 2, 3, 8, 9, 10, 11}
#define ODD_FOURS (ivec){4, 5, 6, 7, 12, 13, 14, 15}
#endif
INLINE vec sum_each(const vec *x) {
    vec fours[LANES / 4];
    for (int i = 0; i < LANES / 4; i++, x += 4) {
        vec low = MEET(x[0], x[1], FIRST_ONES, LAST_ONES), high = MEET(x[2], x[3], FIRST_ONES, LAST_ONES);
        fours[i] = MEET(low, high, FIRST_TWOS, LAST_TWOS);
    }
    for (int n = LANES / 4; n > 1; n /= 2)
        for (int i = 0; i < n / 2; i++) fours[i] = MEET(fours[2 * i], fours[2 * i + 1], EVEN_FOURS, ODD_FOURS);
    return fours[0];
}
#else
INLINE vec sum_each(const vec *x) {
    quad sums[LANES / 4], parts[4][LANES / 4];
    for (int i = 0; i < LANES / 4; i++, x += 4) {
        memcpy(parts, x, sizeof parts);
        for (int j = 0; j < LANES / 4; j++) {
            quad low = SHUFFLE(parts[0][j], parts[1][j], 0, 4, 1, 5) + SHUFFLE(parts[0][j], parts[1][j], 2, 6, 3, 7);
            quad high = SHUFFLE(parts[2][j], parts[3][j], 0, 4, 1, 5) + SHUFFLE(parts[2][j], parts[3][j], 2, 6, 3, 7);
            parts[0][j] = SHUFFLE(low, high, 0, 1, 4, 5) + SHUFFLE(low, high, 2, 3, 6, 7);
        }
        sums[i] = parts[0][0] + parts[0][1];
        if (LANES == 16) sums[i] += parts[0][LANES / 4 - 2] + parts[0][LANES / 4 - 1];
    }
    vec result;
    memcpy(&result, sums, sizeof result);
    return result;
}
#endif

// exp(x) for x <= 88, relative error 1e-7; below -87 (and at -inf) exactly 0.
// x = n ln 2 + r; the coefficients fit (exp(r) - 1 - r) / r^2 at Chebyshev nodes of |r| <= ln(2) / 2.
INLINE vec exp_vec(vec x) {
    const vec magic = splat(12582912.0f);      // 1.5 * 2^23: adding it rounds to an integer
    vec n = x * 1.44269504f + magic;
    uvec exponent = (uvec)n << 23;             // unsigned: may wrap for the x that give 0
    n -= magic;
    vec r = x - n * 0.693145752f;
    r -= n * 1.42860677e-6f;
    vec p = r * 1.39336525e-3f + 8.36318154e-3f;
    p = p * r + 4.16664649e-2f;
    p = p * r + 0.16666577f;
    p = p * r + 0.500000001f;
    p = p * (r * r) + r + 1.0f;
    p *= (vec)(exponent + (127u << 23));
    return select_vec(x < -87.0f, (vec){0}, p);
}

// tanh(x): near 0 a fit of (tanh(x) / x - 1) / x^2, since 1 - exp(-2x) would cancel there.
INLINE vec tanh_vec(vec x) {
    vec size = (vec)((ivec)x & 0x7fffffff), z = x * x;
    vec p = z * -6.00179064e-3f + 2.09314149e-2f;
    p = p * z - 5.38370137e-2f;
    p = p * z + 0.13332679f;
    p = p * z - 0.333333281f;
    vec near = x + x * z * p;
    vec e = exp_vec(-2.0f * size);
    vec far = (vec)((ivec)((1.0f - e) / (1.0f + e)) | ((ivec)x & INT32_MIN));
    return select_vec(size < 0.625f, near, far);
}
