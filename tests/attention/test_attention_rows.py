"""The C kernel gives a row the same bits whether it comes alone, as in decoding, or among others."""

import pytest
import torch
from attention_cases import Case, make_case, with_bfloat16_cache

from octavo.attention import available_impls

pytestmark = pytest.mark.skipif(
    available_impls("cpu", torch.float32)["c"] is not None, reason="needs a C compiler"
)

SEQ_LEN, QUERY_LEN = 530, 40
OPTIONS = ({}, {"window": 33}, {"window": 190, "softcap": 5.0})


def part(case: Case, begin: int, end: int) -> Case:
    """Query tokens begin to end - 1 of a case of one sequence, as a step of their own."""
    seq_len = SEQ_LEN - QUERY_LEN + end
    metadata = case.metadata.__class__(
        cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        positions=case.metadata.positions[begin:end],
        slot_mapping=case.metadata.slot_mapping[begin:end],
        block_table=case.metadata.block_table,
        max_query_len=end - begin,
        max_seq_len=seq_len,
    )
    return Case(case.q[begin:end], case.k_cache, case.v_cache, metadata)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 4), (16, 2)])
@pytest.mark.parametrize("head_dim", [5, 64, 72])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_row_has_the_same_bits_in_steps_of_any_length(
    heads: int, kv_heads: int, head_dim: int, options: dict[str, float], bfloat16: bool
) -> None:
    case = make_case([SEQ_LEN], [QUERY_LEN], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    case = with_bfloat16_cache(case) if bfloat16 else case
    together = case.run("c", **options)
    for length in (1, 2, 9, 33):
        starts = range(0, QUERY_LEN, length)
        parts = [part(case, start, min(start + length, QUERY_LEN)).run("c", **options) for start in starts]
        for got, expected in zip(zip(*parts, strict=True), together, strict=True):
            assert torch.equal(torch.cat(got), expected), f"{length} rows at a time"
