"""Random numbers by counter: each depends on a seed and a position, and on nothing else."""

_MASK64 = 2**64 - 1


def counter_uniform(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) that depends on (seed, position) only.

    Source: splitmix64 finaliser (Steele, Lea and Flood, 2014), applied to the mixed pair.
    """
    # 48 bits: a product with the total mass then stays below it in float64.
    return (mix_seed(mix_seed(seed, 0), position) >> 16) / 2**48


def mix_seed(seed: int, stream: int) -> int:
    """Derive an independent 64-bit seed for a stream (a completion's index, a position)."""
    z = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
