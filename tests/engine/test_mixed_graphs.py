"""What needs no GPU of the graphs of mixed steps; the rest is in tests/llm/test_llm_gpu.py."""

from octavo.engine.mixed_graphs import padded_size


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
