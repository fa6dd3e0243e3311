"""Rotary frequencies and the ways models stretch them beyond the context they were trained on."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors", "proportional"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """One set of rotary frequencies. Fields after `query_growth` belong to the types named.

    Attributes:
        theta: base of the frequencies.
        rope_type: how they are stretched; "factors" divides each frequency by its own number.
        query_growth: b, by which queries at position p grow: 1 + b ln(1 + p // original_max_positions); 0: by
            nothing.
        factor: by how much the context is stretched (linear, dynamic, llama3, yarn, longrope, proportional).
        proportion: proportional; the part of the frequencies, the highest ones, that is not 0.
        original_max_positions: context before stretching, tokens (dynamic, llama3, yarn, longrope).
        low_freq_factor: llama3; wavelengths above original_max_positions / this are stretched fully.
        high_freq_factor: llama3; wavelengths below original_max_positions / this are kept.
        beta_fast: yarn; rotations over the original context above which a frequency is kept.
        beta_slow: yarn; rotations below which a frequency is stretched fully.
        truncate: yarn; round the bounds between the two outwards to whole dimensions.
        attention_factor: yarn, longrope; factor of rotated queries and keys. None: from `factor`, and yarn's
            mscales.
        mscale: yarn; numerator of the derived attention factor.
        mscale_all_dim: yarn; denominator of the derived attention factor.
        factors: "factors", and longrope beyond original_max_positions; one divisor per frequency.
        short_factors: longrope; those for contexts up to original_max_positions.
    """

    theta: float
    rope_type: RopeType = "default"
    query_growth: float = 0.0
    factor: float = 1.0
    proportion: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()


def without_rotation(rotary_dim: int) -> RopeConfig:
    """Return frequencies of 0: queries and keys stay as they are at any position."""
    return RopeConfig(theta=1.0, rope_type="factors", factors=(math.inf,) * (rotary_dim // 2))


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """Return the angle per position of each rotated pair, and the factor of rotated queries and keys.

    "dynamic" and "longrope" depend on the length of the text. Cached keys keep the rotation they were stored
    with, so all texts of a run must share one length: max_model_len. Up to original_max_positions, "dynamic"
    stretches nothing.

    Args:
        rope: the frequencies' description.
        rotary_dim: dimensions of a head that turn, an even number.
        max_model_len: longest text of the run in tokens; matters to "dynamic" and "longrope" only.

    Returns:
        ([rotary_dim / 2] float32 on the CPU, attention factor).

    Source: Su et al. 2021 (rotary embeddings); Peng et al. 2023, YaRN; the Llama 3.1 release (llama3); Ding
    et al. 2024, LongRoPE.
    """
    theta = _dynamic_theta(rope, rotary_dim, max_model_len) if rope.rope_type == "dynamic" else rope.theta
    plain = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "proportional":
        plain[int(rope.proportion * rotary_dim // 2) :] = 0
        return plain / rope.factor, 1.0
    if rope.rope_type == "factors":
        return plain / torch.tensor(rope.factors, dtype=torch.float32), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "longrope":
        factors = rope.factors if max_model_len > rope.original_max_positions else rope.short_factors
        return plain / torch.tensor(factors, dtype=torch.float32), _longrope_attention_factor(rope)
    if rope.rope_type == "yarn":
        return _yarn(rope, plain), _yarn_attention_factor(rope)
    return plain, 1.0


def _dynamic_theta(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> float:
    length = max(max_model_len, rope.original_max_positions)
    stretch = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
    return rope.theta * stretch ** (rotary_dim / (rotary_dim - 2))


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Keep short wavelengths, stretch long ones, blend in between."""
    rotations = rope.original_max_positions * plain / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Keep dimensions that rotate often over the original context, stretch the slow ones, blend between."""
    num_pairs = plain.shape[0]
    low, high = (
        _yarn_dimension(rope, rotations, num_pairs) for rotations in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    # A ramp of width zero becomes a step.
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def _yarn_dimension(rope: RopeConfig, rotations: float, num_pairs: int) -> float:
    """The (fractional) pair that makes `rotations` turns over the original context."""
    wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
    return num_pairs * math.log(wavelength) / math.log(rope.theta)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
