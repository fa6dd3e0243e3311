// Rows of the small layers, as the decoder's layers (stack.c) call them.

#pragma once

#include <stdint.h>

// hidden += delta (unless NULL); out = hidden / sqrt(mean(hidden^2) + eps) * weight. out may be hidden.
void octavo_norm_row(float *hidden, const float *delta, const float *weight, float *out, int64_t size, float eps);

// out = silu(gate) * up; out may be gate.
void octavo_silu_row(const float *gate, const float *up, float *out, int64_t size);

// out = (up + 1) * gate * sigmoid(slope * gate), with gate <= limit and -limit <= up <= limit; out may be gate.
void octavo_clamped_swiglu_row(const float *gate, const float *up, float *out, int64_t size, float limit,
                               float slope);
