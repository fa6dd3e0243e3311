// Tiles of a bfloat16 cache, in float32. Included by attend.c, not compiled by itself.

INLINE void widen_row(float *to, const uint16_t *from, int64_t dim) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) store(to + d, load_bfloat16(from + d));
    if (d < dim) {
        uint16_t last[LANES] = {0};
        memcpy(last, from + d, (size_t)(dim - d) * sizeof *from);
        vec wide = load_bfloat16(last);
        memcpy(to + d, &wide, (size_t)(dim - d) * sizeof *to);
    }
}

// Write the tile to s->wide, whose rows lie in s->widened; meanwhile the next tile's come from memory. The last key
// repeats as in find_tile.
static void widen_tile(Scratch *s, const Tile *tile, const Tile *next, int64_t dim) {
    Tile *wide = &s->wide;
    float *keys = s->widened, *values = keys + TILE * dim;
    wide->begin = tile->begin;
    wide->count = tile->count;
    for (int t = 0; t < tile->count; t++) {
        if (t < next->count) {
            // As many bytes as half as many floats have.
            prefetch_row(next->keys[t], (dim + 1) / 2);
            prefetch_row(next->values[t], (dim + 1) / 2);
        }
        widen_row(keys + t * dim, (const void *)tile->keys[t], dim);
        widen_row(values + t * dim, (const void *)tile->values[t], dim);
        wide->keys[t] = keys + t * dim;
        wide->values[t] = values + t * dim;
    }
    for (int t = tile->count; t % LANES; t++) wide->keys[t] = wide->keys[tile->count - 1];
}
