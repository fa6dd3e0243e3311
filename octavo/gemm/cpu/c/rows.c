// Rows of x become blocks of 8-bit integers, x = d * p. Included by blocks.c, not compiled by itself.

#define BLOCK 32
#define PARTS (BLOCK / LANES)
#if TILE == 16                                 // 32 registers
#define ROWS 12
#else
#define ROWS 6
#endif

// Rows that lie side by side, the first of `left`.
INLINE size_t rows_beside(size_t left) {
    return left >= ROWS ? ROWS : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

size_t octavo_row_bytes(size_t rows, size_t blocks) {
    return rows * blocks * (BLOCK + 2 * sizeof(float) + sizeof(Offsets));
}

Rows octavo_place_rows(void *memory, size_t rows, size_t blocks) {
    size_t count = rows * blocks;
    float *scales = memory, *sums = scales + count;
    Offsets *offsets = (Offsets *)(sums + count);
    return (Rows){(int8_t *)(offsets + count), scales, sums, offsets, rows, blocks};
}

INLINE ivec larger(ivec a, ivec b) { return (ivec)select_vec(a > b, (vec)a, (vec)b); }

INLINE int32_t largest_lane(ivec x) {
    int32_t lanes[LANES], most = 0;
    memcpy(lanes, &x, sizeof x);
    for (int i = 0; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

INLINE int32_t sum_int_lanes(ivec x) {
    iquad sum = {0}, parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
    for (int i = 0; i < LANES / 4; i++) sum += parts[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

INLINE void quantise_block(const float *from, int8_t *to, float *scale, float *sum, Offsets *offsets) {
    const vec magic = splat(12582912.0f);      // 1.5 * 2^23: adding it rounds to an integer
    ivec most_bits = {0}, sums[2] = {{0}, {0}};
    // Without their signs, floats are in the order of their bits; infinities and NaNs come last.
    for (int i = 0; i < PARTS; i++) most_bits = larger((ivec)load(from + i * LANES) & INT32_MAX, most_bits);
    int32_t bits = largest_lane(most_bits), numbers[BLOCK];
    float most;
    memcpy(&most, &bits, 4);
    if (!(most <= FLT_MAX)) {
        // A NaN or an infinity: the block's answer is NaN, whatever its numbers are.
        memset(to, 0, BLOCK);
        *offsets = (Offsets){0, 0};
        *scale = *sum = NAN;
        return;
    }
    // Of smaller numbers the factor would be infinite.
    float factor = most >= 1e-36f ? 127 / most : 0;
    for (int i = 0; i < PARTS; i++) {
        ivec part = (ivec)(load(from + i * LANES) * factor + magic) - (ivec)magic;
        sums[2 * i / PARTS] += part;
        memcpy(numbers + i * LANES, &part, sizeof part);
    }
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) to[i] = (int8_t)numbers[i];
    int32_t first = sum_int_lanes(sums[0]), second = sum_int_lanes(sums[1]);
    *offsets = (Offsets){-128 * (first + second), -128 * second};
    *scale = most / 127;
    *sum = *scale * (float)(first + second);
}

void octavo_quantise_row(Rows to, size_t row, const float *x) {
    size_t first = row / ROWS * ROWS, beside = rows_beside(to.rows - first);
    for (; first + beside <= row; beside = rows_beside(to.rows - first)) first += beside;
    for (size_t b = 0; b < to.blocks; b++) {
        size_t place = first * to.blocks + b * beside + (row - first);
        quantise_block(x + b * BLOCK, to.values + place * BLOCK, to.scales + place, to.sums + place,
                       to.offsets + place);
    }
}
