// Sums of products of small integers, for each kind of CPU. Included by blocks.c, not compiled by itself.
//
// A vector of weights is a group: 4 inputs of 8 outputs, a byte each. It meets 4 bytes of a row of x, repeated
// for all outputs, and adds to the 8 sums of that row.

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Groups of a block whose code is written out. On other CPUs vectors become many instructions, which would take
// long to compile eight times over.
#if defined(__AVX2__) || defined(__aarch64__)
enum { UNROLLED = 8 };
#else
enum { UNROLLED = 1 };
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float f32x8 __attribute__((vector_size(32), may_alias));
typedef float loose_f32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i32x8 __attribute__((vector_size(32), may_alias));
typedef uint32_t u32x8 __attribute__((vector_size(32), may_alias));
typedef int16_t i16x16 __attribute__((vector_size(32), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), may_alias));
typedef uint8_t u8x32 __attribute__((vector_size(32), may_alias));
typedef uint8_t loose_u8x32 __attribute__((vector_size(32), aligned(1), may_alias));
typedef _Float16 f16x8 __attribute__((vector_size(16), aligned(2), may_alias));

// Scales are float16 or float32, as the checkpoint has them.
INLINE f32x8 load_scales(const void *p, size_t place, int is_half) {
    if (!is_half) return ((const loose_f32x8 *)p)[place];
#if defined(__F16C__)
    return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + place));
#else
    return __builtin_convertvector(((const f16x8 *)p)[place], f32x8);
#endif
}

INLINE int32_t load4(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

// add_products adds the products of a group of weights of so many bits and 4 bytes of x. The sums of a block
// are numbers once finish_sums has seen them.
#if defined(__AVX2__)
// Without this, GCC makes all products of a block before it adds any, and runs out of registers.
INLINE i32x8 added_now(__m256i sums) {
    __asm__("" : "+x"(sums));
    return (i32x8)sums;
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DPBUSD _mm256_dpbusd_epi32
#else
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif
INLINE i32x8 add_products(i32x8 sums, u8x32 group, int32_t x, int bits) {
    __m256i q = (__m256i)group, p = _mm256_set1_epi32(x);
    if (bits == 4) return added_now(DPBUSD((__m256i)sums, q, p));
    // The instruction wants unsigned weights: q * p = |q| * (p with q's sign).
    return added_now(DPBUSD((__m256i)sums, _mm256_abs_epi8(q), _mm256_sign_epi8(p, q)));
}

INLINE i32x8 finish_sums(i32x8 sums, int bits) {
    (void)bits;
    return sums;
}
#else
INLINE i32x8 add_products(i32x8 sums, u8x32 group, int32_t x, int bits) {
    __m256i q = (__m256i)group, p = _mm256_set1_epi32(x);
    // 4 bits: sums of inputs 0 and 1, and 2 and 3, in 16 bits each, which hold 16 products of at most 15 * 127.
    if (bits == 4) return added_now(_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16(q, p)));
    // q * p = |q| * (p with q's sign); two such products, of at most 128 * 127, fit 16 bits.
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(p, q));
    return added_now(_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}

INLINE i32x8 finish_sums(i32x8 sums, int bits) {
    return bits == 4 ? (i32x8)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)) : sums;
}
#endif
#else
INLINE i32x8 add_products(i32x8 sums, u8x32 group, int32_t x, int bits) {
    (void)bits;
#if defined(__aarch64__)
    int8x16_t p = vreinterpretq_s8_s32(vdupq_n_s32(x)), q[2];
    int32x4_t halves[2];
    memcpy(q, &group, sizeof q);
    memcpy(halves, &sums, sizeof halves);
    for (int h = 0; h < 2; h++) {
#if defined(__ARM_FEATURE_DOTPROD)
        halves[h] = vdotq_s32(halves[h], q[h], p);
#else
        // Two products, of at most 128 * 127 each, fit 16 bits.
        int16x8_t low = vmull_s8(vget_low_s8(q[h]), vget_low_s8(p)), high = vmull_high_s8(q[h], p);
        halves[h] = vpadalq_s16(halves[h], vpaddq_s16(low, high));
#endif
    }
    memcpy(&sums, halves, sizeof sums);
#else
    // Of every 16 bits the lower byte, then the higher one; two products, of at most 128 * 127 each, fit them.
    u32x8 p = (u32x8){0} + (uint32_t)x;
    i16x16 pairs = ((i16x16)((u16x16)group << 8) >> 8) * ((i16x16)((u16x16)p << 8) >> 8);
    pairs += ((i16x16)group >> 8) * ((i16x16)p >> 8);
    sums += ((i32x8)((u32x8)pairs << 16) >> 16) + ((i32x8)pairs >> 16);
#endif
    return sums;
}

INLINE i32x8 finish_sums(i32x8 sums, int bits) {
    (void)bits;
    return sums;
}
#endif
