// Small fused layers for CPUs, float32: what torch does in four to five operators each.

#include <stddef.h>
#include <stdint.h>

#include "../../attention/cpu/vector.c"

#define PARALLEL_FLOATS 32768

// hidden [rows, size] += delta (unless NULL); out = hidden / sqrt(mean(hidden^2) + eps) * weight.
void octavo_add_rms_norm(float *hidden, const float *delta, const float *weight, float *out, int64_t rows,
                         int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > PARALLEL_FLOATS)
    for (int64_t r = 0; r < rows; r++) {
        float *h = hidden + r * size, *o = out + r * size, squares = 0;
        if (delta) {
            const float *d = delta + r * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) h[i] += d[i];
        }
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += h[i] * h[i];
        float factor = 1 / sqrtf(squares / (float)size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) o[i] = h[i] * factor * weight[i];
    }
}

INLINE float silu(float x) { return x / (1 + expf(-x)); }

// out [rows, inner] = silu(gate) * up for gate_up [rows, 2 inner] = [gate | up].
void octavo_silu_and_multiply(const float *gate_up, float *out, int64_t rows, int64_t inner, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * inner > PARALLEL_FLOATS)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + 2 * r * inner, *up = gate + inner;
        float *o = out + r * inner;
        int64_t i = 0;
        for (; i + LANES <= inner; i += LANES) {
            vec x = load(gate + i);
            // exp_vec takes at most 88; beyond, silu(x) is 0 in float32 anyway.
            store(o + i, x / (1.0f + exp_vec(-max_vec(x, splat(-87.0f)))) * load(up + i));
        }
        for (; i < inner; i++) o[i] = silu(gate[i]) * up[i];
    }
}
