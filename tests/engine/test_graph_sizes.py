"""The sizes of graphs: few, and close together where a token of padding costs."""

import itertools

import pytest

from octavo.engine.gpu.graphs import next_size, sequence_sizes, token_sizes


@pytest.mark.parametrize("limit", [1, 7, 16, 100, 1024, 8192, 10000, 16384])
def test_padding_of_tokens_is_bounded(limit: int) -> None:
    """At most 15 tokens, half of them up to 256, a GEMM's tile of 128 rows above, four from 4,096 on."""
    sizes = token_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == limit
    for number in range(1, limit + 1):
        size = next_size(sizes, number)
        assert number <= size <= limit
        most = max(15, number // 2) if number <= 256 else 127 if number <= 4096 else 511
        assert size - number <= most


def test_there_are_few_sizes() -> None:
    assert len(token_sizes(8192)) <= 48
    assert len(sequence_sizes(512)) <= 20


@pytest.mark.parametrize(
    ("limit", "last"),
    [
        (1, [1]),
        (7, [1, 2, 4, 7]),
        (20, [4, 8, 16, 20]),
        (256, [160, 192, 224, 256]),
        (300, [224, 256, 300]),
        (512, [320, 384, 448, 512]),
    ],
)
def test_numbers_of_sequences_rise_to_the_limit(limit: int, last: list[int]) -> None:
    sizes = sequence_sizes(limit)
    assert sizes[-len(last) :] == last
    assert sizes == sorted(set(sizes))
    for small, large in itertools.pairwise(sizes):
        assert large - small <= max(16, small // 4)
