// Small fused layers for CPUs, float32: what torch does in four to five operators each.

#include "layers.h"

#include "../../../kernels/c/vector.c"

#define PARALLEL_FLOATS 32768

void octavo_norm_row(float *hidden, const float *delta, const float *weight, float *out, int64_t size,
                     float eps) {
    float squares = 0;
    if (delta) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) hidden[i] += delta[i];
    }
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares += hidden[i] * hidden[i];
    float factor = 1 / sqrtf(squares / (float)size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = hidden[i] * factor * weight[i];
}

// Of hidden [rows, size] to out, likewise.
void octavo_add_rms_norm(float *hidden, const float *delta, const float *weight, float *out, int64_t rows,
                         int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > PARALLEL_FLOATS)
    for (int64_t r = 0; r < rows; r++)
        octavo_norm_row(hidden + r * size, delta ? delta + r * size : NULL, weight, out + r * size, size, eps);
}

INLINE float silu(float x) { return x / (1 + expf(-x)); }

// x sigmoid(z), z of the sign of x. exp_vec takes at most 88; beyond, it is 0 in float32, of -inf NaN.
INLINE vec silu_vec(vec x, vec z) {
    const vec least = splat(-87.0f);
    return select_vec(z < least, x * 0.0f, x / (1.0f + exp_vec(-max_vec(z, least))));
}

void octavo_silu_row(const float *gate, const float *up, float *out, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec x = load(gate + i);
        store(out + i, silu_vec(x, x) * load(up + i));
    }
    for (; i < size; i++) out[i] = silu(gate[i]) * up[i];
}

void octavo_clamped_swiglu_row(const float *gate, const float *up, float *out, int64_t size, float limit,
                               float slope) {
    const vec most = splat(limit), least = splat(-limit);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        // NaNs are neither larger nor smaller, and stay.
        vec g = load(gate + i), u = load(up + i);
        g = select_vec(g > most, most, g);
        u = select_vec(u > most, most, select_vec(u < least, least, u));
        store(out + i, silu_vec(g, g * slope) * (u + 1.0f));
    }
    for (; i < size; i++) {
        float g = gate[i] > limit ? limit : gate[i], u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
        out[i] = g / (1 + expf(-slope * g)) * (u + 1);
    }
}

// out [rows, inner] = silu(gate) * up for gate_up [rows, 2 inner] = [gate | up].
void octavo_silu_and_multiply(const float *gate_up, float *out, int64_t rows, int64_t inner, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * inner > PARALLEL_FLOATS)
    for (int64_t r = 0; r < rows; r++)
        octavo_silu_row(gate_up + 2 * r * inner, gate_up + (2 * r + 1) * inner, out + r * inner, inner);
}
