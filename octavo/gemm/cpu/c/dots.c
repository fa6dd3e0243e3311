// Sums of products of small integers, for each kind of CPU. Included by blocks.c, not compiled by itself.
//
// A vector of weights is a group: 4 inputs of TILE outputs, a byte each. It meets 4 bytes of a row of x, repeated
// for all outputs, and adds to the TILE sums of that row.

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

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

#define GROUP 4                                // inputs

// TILE outputs: a number each, or a group of bytes each.
typedef float floats __attribute__((vector_size(TILE * 4), may_alias));
typedef float loose_floats __attribute__((vector_size(TILE * 4), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(TILE * 4), may_alias));
typedef uint32_t uints __attribute__((vector_size(TILE * 4), may_alias));
typedef int16_t shorts __attribute__((vector_size(TILE * GROUP), may_alias));
typedef uint16_t ushorts __attribute__((vector_size(TILE * GROUP), may_alias));
typedef uint8_t bytes __attribute__((vector_size(TILE * GROUP), may_alias));
typedef uint8_t loose_bytes __attribute__((vector_size(TILE * GROUP), aligned(1), may_alias));
typedef uint8_t loose_exponents __attribute__((vector_size(TILE), aligned(1), may_alias));
typedef _Float16 float16s __attribute__((vector_size(TILE * 2), aligned(2), may_alias));

// As fma_vec.
INLINE floats fma_floats(floats a, floats b, floats c) {
#if TILE == 16
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Scales of TILE outputs, as the checkpoint has them; see blocks.h.
INLINE floats load_scales(const void *p, size_t place, int scale_bytes) {
    if (scale_bytes == 4) return ((const loose_floats *)p)[place];
    if (scale_bytes == 1) {
        // Exponents, 127 too large. The least one is that of a number without an exponent, and codes are doubled.
        ints e = __builtin_convertvector(((const loose_exponents *)p)[place], ints);
        return (floats)((e << 23) | ((e == 0) & 1 << 22)) * 0.5f;
    }
#if TILE == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p + place));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + place));
#else
    return __builtin_convertvector(((const float16s *)p)[place], floats);
#endif
}

INLINE int32_t load4(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

// Sums of a block, of weights of so many bits, begin with begin_sums; add_products adds the products of a group and
// of 4 bytes of x; finish_sums returns them as numbers. `offset` is -128 times the sum of the bytes of x.
#if HAS_VNNI
// The instruction wants unsigned weights. Signed ones are 128 too large then, which `offset` takes back.
INLINE ints begin_sums(int32_t offset, int bits) { return (ints){0} + (bits == 4 ? 0 : offset); }

INLINE bytes as_unsigned(bytes group) { return group ^ 128; }

INLINE ints add_products(ints sums, bytes group, int32_t x, int bits) {
    (void)bits;
#if TILE == 16
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)group, _mm512_set1_epi32(x));
#elif defined(__AVX512VNNI__)
    return (ints)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)group, _mm256_set1_epi32(x));
#else
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)group, _mm256_set1_epi32(x));
#endif
}
#else
INLINE ints begin_sums(int32_t offset, int bits) {
    (void)offset, (void)bits;
    return (ints){0};
}

INLINE bytes as_unsigned(bytes group) { return group; }

#if defined(__AVX2__)
// Without this, GCC makes all products of a block before it adds any, and runs out of registers.
INLINE ints added_now(__m256i sums) {
    __asm__("" : "+x"(sums));
    return (ints)sums;
}

INLINE ints add_products(ints sums, bytes group, int32_t x, int bits) {
    __m256i q = (__m256i)group, p = _mm256_set1_epi32(x);
    // 4 bits: sums of inputs 0 and 1, and 2 and 3, in 16 bits each, which hold 16 products of at most 15 * 127.
    if (bits == 4) return added_now(_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16(q, p)));
    // q * p = |q| * (p with q's sign); two such products, of at most 128 * 127, fit 16 bits.
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(p, q));
    return added_now(_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
#elif defined(__aarch64__)
INLINE ints add_products(ints sums, bytes group, int32_t x, int bits) {
    (void)bits;
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
    return sums;
}
#else
INLINE ints add_products(ints sums, bytes group, int32_t x, int bits) {
    (void)bits;
    // Of every 16 bits the lower byte, then the higher one; two products, of at most 128 * 127 each, fit them.
    uints p = (uints){0} + (uint32_t)x;
    shorts pairs = ((shorts)((ushorts)group << 8) >> 8) * ((shorts)((ushorts)p << 8) >> 8);
    pairs += ((shorts)group >> 8) * ((shorts)p >> 8);
    return sums + ((ints)((uints)pairs << 16) >> 16) + ((ints)pairs >> 16);
}
#endif
#endif

// Twice the numbers of MXFP4 (e2m1), as weights of 8 bits, for codes of a byte each.
#define CODES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

INLINE bytes decode(bytes codes) {
#if defined(__AVX2__) || defined(__aarch64__)
    typedef int8_t numbers __attribute__((vector_size(16)));
    const numbers table = {CODES};
    bytes tables;
    for (size_t i = 0; i < sizeof tables; i += sizeof table) memcpy((char *)&tables + i, &table, sizeof table);
    tables = as_unsigned(tables);
#endif
#if TILE == 16
    return (bytes)_mm512_shuffle_epi8((__m512i)tables, (__m512i)codes);
#elif defined(__AVX2__)
    return (bytes)_mm256_shuffle_epi8((__m256i)tables, (__m256i)codes);
#elif defined(__aarch64__)
    uint8x16_t halves[2], from;
    memcpy(&from, &tables, sizeof from);
    memcpy(halves, &codes, sizeof halves);
    for (int h = 0; h < 2; h++) halves[h] = vqtbl1q_u8(from, halves[h]);
    memcpy(&codes, halves, sizeof codes);
    return codes;
#else
    static const int8_t table[] = {CODES};
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)table[codes[i]];
    return as_unsigned(codes);
#endif
}

INLINE ints finish_sums(ints sums, int bits) {
#if defined(__AVX2__) && !HAS_VNNI
    if (bits == 4) return (ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
    (void)bits;
    return sums;
}
