"""Finding a cut in a row of logits by bisection, for kernels that filter; imported only where Triton runs."""

import triton
import triton.language as tl

# The largest logit weighs 2^40, so a million of them stay below 2^63.
_FIXED_POINT = tl.constexpr(float(2**40))


@triton.jit
def tally(source_ptr, length, threshold, largest, factor, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """Count and weigh the values that reach a threshold.

    Masses are integers, so that their sum does not depend on the order of the values.

    Args:
        source_ptr: [length] values of any floating dtype, without NaN.
        length: int scalar.
        threshold: float32 scalar.
        largest: float32 scalar, none of the values is larger.
        factor: float32 scalar, the inverse temperature.
        BY_MASS: weigh each value exp((value - largest) * factor) * 2^40; otherwise 1.
        CHUNK: values read at a time.

    Returns:
        (count int32, weight int64).
    """
    count = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.int64)
    start = 0
    while start < length:
        index = start + tl.arange(0, CHUNK)
        value = tl.load(source_ptr + index, mask=index < length, other=float("-inf")).to(tl.float32)
        reaches = value >= threshold
        count += reaches.to(tl.int32)
        if BY_MASS:
            weight = tl.exp((value - largest) * factor) * _FIXED_POINT
            mass += tl.where(reaches, weight, 0.0).to(tl.int64)
        start += CHUNK
    total = tl.sum(count, axis=0)
    if BY_MASS:
        return total, tl.sum(mass, axis=0)
    else:
        return total, total.to(tl.int64)


@triton.jit
def highest_reaching(
    source_ptr,
    length,
    floor,
    largest,
    factor,
    target,
    BY_MASS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the highest threshold, not below the floor, whose values together weigh at least the target.

    Bisects the floats in their order as integers. Ends once at most one value is in doubt, which is soon
    unless many are equal; the threshold then keeps the same values as the highest one does.

        floor ..... low ........ high ..... largest      low reaches the target (or is the floor),
                      values in doubt                    high does not

    Args:
        source_ptr: [length] values without NaN.
        length: int scalar.
        floor: float32 scalar, finite; smaller values do not exist.
        largest: float32 scalar, the largest value.
        factor: float32 scalar, the inverse temperature.
        target: float64 scalar, above 0.
        BY_MASS: as for tally.
        UNUSED_BITS: low bits of a float32 pattern that no value sets.
        CHUNK: as for tally.
    """
    low = _to_order(floor) >> UNUSED_BITS
    high = (_to_order(largest) >> UNUSED_BITS) + 1
    num_low, _ = tally(source_ptr, length, floor, largest, factor, False, CHUNK)
    num_high = num_low * 0
    while (high - low > 1) & (num_low - num_high > 1):
        middle = (low + high) >> 1
        threshold = tl.maximum(_from_order(middle << UNUSED_BITS), floor)
        count, weight = tally(source_ptr, length, threshold, largest, factor, BY_MASS, CHUNK)
        reaches = weight.to(tl.float64) >= target
        low = tl.where(reaches, middle, low)
        num_low = tl.where(reaches, count, num_low)
        high = tl.where(reaches, high, middle)
        num_high = tl.where(reaches, num_high, count)
    return tl.maximum(_from_order(low << UNUSED_BITS), floor)


@triton.jit
def lowest_kept(
    source_ptr,
    length,
    floor,
    largest,
    factor,
    top_k,
    top_p,
    known_mass,
    UNUSED_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return a threshold that keeps what top-k and then top-p keep of the values that reach the floor.

    Args:
        source_ptr: [length] values without NaN.
        length: int scalar.
        floor: float32 scalar, finite.
        largest: float32 scalar, the largest value.
        factor: float32 scalar, the inverse temperature.
        top_k: int32 scalar; 0 or less: off.
        top_p: float32 scalar; 1: off.
        known_mass: float32 scalar, the mass that top_p is a fraction of, exp((value - largest) * factor)
            summed; 0: the mass of the values that reach the floor and top-k's cut.
        UNUSED_BITS: as for highest_reaching.
        CHUNK: as for tally.
    """
    cut = floor
    if top_k > 0:
        target = top_k.to(tl.float64)
        cut = highest_reaching(source_ptr, length, cut, largest, factor, target, False, UNUSED_BITS, CHUNK)
    if top_p < 1.0:
        mass = known_mass.to(tl.float64) * _FIXED_POINT
        if known_mass == 0.0:
            _, left = tally(source_ptr, length, cut, largest, factor, True, CHUNK)
            mass = left.to(tl.float64)
        target = top_p.to(tl.float64) * mass
        cut = highest_reaching(source_ptr, length, cut, largest, factor, target, True, UNUSED_BITS, CHUNK)
    return cut


@triton.jit
def _to_order(value):
    """Map a float32 scalar to an int64 of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_order(order):
    """Invert _to_order."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
