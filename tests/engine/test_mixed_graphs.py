"""What needs no GPU of the graphs of decode and mixed steps; the rest is in tests/llm/test_llm_gpu.py."""

import itertools

import pytest

from octavo.engine.gpu.decode_graphs import ladder
from octavo.engine.gpu.mixed_graphs import padded_size


def test_padding_is_an_eighth_at_most_and_keeps_to_the_limit() -> None:
    for limit in (1, 7, 100, 8192, 10000):
        sizes = [padded_size(num, limit) for num in range(1, limit + 1)]
        assert sizes == sorted(sizes)
        assert sizes[-1] == limit
        for num, size in enumerate(sizes, start=1):
            assert num <= size <= limit
            assert size - num <= max(15, num // 8)


def test_there_are_few_sizes() -> None:
    assert len({padded_size(num, 8192) for num in range(1, 8193)}) < 60


@pytest.mark.parametrize(
    ("limit", "last"),
    [
        (1, [1]),
        (7, [1, 2, 4, 7]),
        (20, [4, 8, 16, 20]),
        (256, [208, 224, 240, 256]),
        (300, [240, 256, 288, 300]),
        (512, [416, 448, 480, 512]),
    ],
)
def test_decode_sizes_rise_to_the_limit(limit: int, last: list[int]) -> None:
    """Every 16 below 256, every 32 above."""
    sizes = ladder(limit)
    assert sizes[-len(last) :] == last
    assert sizes == sorted(set(sizes))
    steps = {b - a for a, b in itertools.pairwise(sizes)}
    assert max(steps, default=0) <= (32 if limit > 256 else 16)
