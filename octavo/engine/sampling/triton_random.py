"""Noise for sampling on a GPU: a pure function of (seed, position, stream, index), never of the batch.

Imported only where Triton runs.
"""

import triton
import triton.language as tl

# Independent noise for the two choices a draw makes.
TILE_STREAM = tl.constexpr(1)
TOKEN_STREAM = tl.constexpr(2)


@triton.jit
def gumbel(seed, position, index, STREAM: tl.constexpr):
    """Return standard Gumbel noise, -log(E) with E exponential, one float32 per element of `index`.

    E = -log(1 - u). The element with the smallest E wins a draw, so small E need full relative precision:
    there the power series serves, while 1 - u would have rounded it away. The smallest u is 2^-33.

    Args:
        seed: int64 scalar, the key.
        position: int32 scalar.
        index: int32 block: tile numbers or token ids.
        STREAM: TILE_STREAM or TOKEN_STREAM.

    Source: Salmon et al. 2011 (Philox 4x32-10).
    """
    zero = index * 0
    bits, _, _, _ = tl.philox(seed, index, zero + position, zero + STREAM, zero)
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # From the inverted bits: 1 - u itself could round to zero.
    complement = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(complement)))


@triton.jit
def inverse_temperature(temperature):
    """Return the factor of logits, float32; for a greedy row it is 1 and unused."""
    # The bound keeps the factor finite. Logits that differ at all differ by far more than 1e-10.
    return tl.where(temperature > 0.0, 1.0 / tl.maximum(temperature, 1e-10), 1.0)


@triton.jit
def draw_above(
    source_ptr,
    ids_ptr,
    length,
    cut,
    largest,
    factor,
    seed,
    position,
    HAS_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the id of one of the logits that reach a cut, drawn by Gumbel-max; their order does not matter.

    Args:
        source_ptr: [length] logits of any floating dtype, without NaN.
        ids_ptr: [length] int32, their tokens.
        length: int scalar.
        cut: float32 scalar; at least one logit reaches it.
        largest: float32 scalar, the largest logit.
        factor: float32 scalar, the inverse temperature.
        seed: as for gumbel.
        position: as for gumbel.
        HAS_IDS: False: logit i is token i, and ids_ptr is not read.
        CHUNK: logits read at a time.
    """
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    best_id = tl.full([CHUNK], 2147483647, tl.int32)
    start = 0
    while start < length:
        index = start + tl.arange(0, CHUNK)
        inside = index < length
        logits = tl.load(source_ptr + index, mask=inside, other=float("-inf")).to(tl.float32)
        token = tl.load(ids_ptr + index, mask=inside, other=0) if HAS_IDS else index
        noisy = (logits - largest) * factor + gumbel(seed, position, token, TOKEN_STREAM)
        noisy = tl.where(logits >= cut, noisy, float("-inf"))
        is_better = (noisy > best) | ((noisy == best) & (token < best_id))
        best = tl.where(is_better, noisy, best)
        best_id = tl.where(is_better, token, best_id)
        start += CHUNK
    return tl.min(tl.where(best == tl.max(best, axis=0), best_id, 2147483647), axis=0)
