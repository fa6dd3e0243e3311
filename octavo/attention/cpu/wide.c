// Tiles of a bfloat16 cache, in float32. Included by kernel.c, not compiled by itself.

typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint16_t half_alias __attribute__((may_alias));

// A row in float32; meanwhile the row that is needed a tile later comes from memory.
INLINE void widen_row(float *to, const half_alias *from, const half_alias *later, int64_t dim) {
    for (int64_t d = 0; later && d < dim; d += 32) __builtin_prefetch(later + d, 0, PREFETCH_LEVEL);
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
        store(to + d, (vec)(__builtin_convertvector(*(const halves *)(from + d), uvec) << 16));
    for (; d < dim; d++) {
        uint32_t bits = (uint32_t)from[d] << 16;
        memcpy(to + d, &bits, sizeof bits);
    }
}

// Write the tile to s->wide, whose rows lie in s->widened; the last key repeats as in find_tile.
static void widen_tile(Scratch *s, const Tile *tile, const Tile *next, int64_t dim) {
    Tile *wide = &s->wide;
    float *keys = s->widened, *values = keys + TILE * dim;
    wide->begin = tile->begin;
    wide->count = tile->count;
    for (int t = 0; t < tile->count; t++) {
        const void *later_key = t < next->count ? next->keys[t] : NULL;
        const void *later_value = t < next->count ? next->values[t] : NULL;
        widen_row(keys + t * dim, (const void *)tile->keys[t], later_key, dim);
        widen_row(values + t * dim, (const void *)tile->values[t], later_value, dim);
        wide->keys[t] = keys + t * dim;
        wide->values[t] = values + t * dim;
    }
    for (int t = tile->count; t % LANES; t++) wide->keys[t] = wide->keys[tile->count - 1];
}
