"""A batch that shares blocks, in a table without spare columns."""

from dataclasses import replace

from attention_cases import make_case


def forest_case():
    """Three sequences of 70 tokens that share two blocks, and one of 40, in a table without spare columns."""
    rows = [[0, 1, 10 + i, 20 + i, 30 + i] for i in range(3)] + [[2, 3, 4]]
    case = make_case([70, 70, 70, 40], [1, 2, 1, 30], rows=rows)
    table = case.metadata.block_table[:, :5].contiguous()
    return replace(case, metadata=replace(case.metadata, block_table=table))


def capacity(case):
    return case.metadata.block_table.shape[1] * case.k_cache.shape[1]
