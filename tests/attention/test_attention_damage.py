"""Plans, lengths and block ids that cannot be: each is refused by name, and no kernel follows it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import ALWAYS_SHARE, KERNELS, assert_accurate, make_case

from octavo.attention import (
    AttentionMetadata,
    ForestPlan,
    LayerCache,
    forest_attention,
    paged_attention,
    store_kv,
)
from octavo.errors import InvalidArgumentError

BAD_LENGTHS = [
    ([70, 40], [1, 2, 3], "cu_seqlens_q must begin at 0, got 1"),
    ([70, 40], [-1, 2, 3], "cu_seqlens_q must begin at 0, got -1"),
    ([70, 40], [0, 2, 1], "cu_seqlens_q must not decrease, but does by 1 at sequence 1"),
    ([70, 40], [0, -1, 1], "cu_seqlens_q must not decrease, but does by 1 at sequence 0"),
    ([70, 40], [0, -(2**31), 1], "cu_seqlens_q must not decrease"),
    ([70, -40], [0, 1, 1], r"seq_lens\[1\] must include the sequence's 0 query tokens, .* got -40"),
    (
        [2, 40],
        [0, 3, 3],
        r"seq_lens\[0\] must include the sequence's 3 query tokens, or be 0 for an empty row; got 2",
    ),
    ([70, 40], [0, 3], "cu_seqlens_q must have 3 entries, one more than seq_lens; got 2"),
    ([70, 2**40], [0, 1, 3], "seq_lens must fit int32, got 70 to 1099511627776"),
    ([70, 40], [0, 1, 2**40], "cu_seqlens_q must fit int32"),
    ([-(2**63), 40], [0, 1, 3], "seq_lens must fit int32"),
]


@pytest.mark.parametrize(("seq_lens", "cu_seqlens_q", "message"), BAD_LENGTHS)
def test_lengths_that_cannot_be_are_refused_everywhere(seq_lens, cu_seqlens_q, message):
    """By metadata, by both kinds of plan, by the operator that makes its own, with one message."""
    case = make_case([70, 40], [1, 2])
    lengths = np.array(seq_lens), np.array(cu_seqlens_q)
    table = case.metadata.block_table.numpy()
    changes = {"seq_lens": torch.from_numpy(lengths[0]), "cu_seqlens_q": torch.from_numpy(lengths[1])}
    for refuse in (
        lambda: replace(case.metadata, **changes),
        lambda: ForestPlan.flat(*lengths),
        lambda: ForestPlan.from_block_tables(table, *lengths, 16),
        lambda: forest_attention(case.q, case.cache, table, *lengths, scale=0.25),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            refuse()


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize(("name", "index", "value"), [("seq_lens", 0, -5), ("cu_seqlens_q", 1, 9)])
def test_lengths_that_change_later_are_refused(impl, name, index, value):
    """A tensor can be written to after the metadata was made of it."""
    case = make_case([70, 40], [1, 2])
    getattr(case.metadata, name)[index] = value
    with pytest.raises(InvalidArgumentError, match=r"must include the sequence's|must not decrease"):
        paged_attention(case.q, case.cache, case.metadata, scale=1.0, impl=impl)


@pytest.mark.parametrize("impl", KERNELS)
def test_a_length_beyond_the_table_is_refused_before_it_is_planned(impl):
    """2^31 tokens would be four million items."""
    case = make_case([70, 40], [1, 2])
    case.metadata.seq_lens[1] = 2**31 - 1
    with pytest.raises(InvalidArgumentError, match="a sequence of 2147483647 tokens does not fit"):
        case.run(impl)


@pytest.mark.parametrize("impl", KERNELS)
def test_an_empty_row_of_a_padded_batch_sees_nothing(impl):
    """Length 0, whatever its query length; its row of the table may hold anything."""
    case = make_case([0, 40, 0], [2, 3, 70])
    assert_accurate(case, impl)
    out, lse = case.run(impl)
    assert not out[:2].any()
    assert not out[5:].any()
    assert (lse[:2] == -torch.inf).all()


def test_queries_beyond_the_tokens_of_the_step_are_refused():
    case = make_case([70, 40], [1, 2])
    with pytest.raises(InvalidArgumentError, match="must end within the 3 query tokens of positions, got 30"):
        replace(case.metadata, cu_seqlens_q=torch.tensor([0, 1, 30]))


@pytest.mark.parametrize("values", [[70.0, 40.0], [[70, 40]], 70, None, [True, False], ["70", "40"]])
def test_lengths_are_integers(values):
    with pytest.raises(InvalidArgumentError, match="seq_lens must be one-dimensional and of integers"):
        ForestPlan.flat(values, np.array([0, 1, 3]))


def test_lengths_on_a_device_are_not_looked_at():
    """It would wait for the device. A tensor without data stands for one that must not be read."""
    metadata = make_case([70, 40], [1, 2]).metadata
    names = ("cu_seqlens_q", "seq_lens", "positions", "slot_mapping", "block_table")
    moved = {name: getattr(metadata, name).to("meta") for name in names}
    assert replace(metadata, **moved).seq_lens.device.type == "meta"
    with pytest.raises(InvalidArgumentError, match=r"block_table must be \[2, max_blocks\] int32"):
        replace(metadata, **{**moved, "block_table": moved["block_table"][:1]})


@pytest.mark.parametrize(
    ("table", "block_size", "message"),
    [
        (
            np.zeros((2, 5), np.int64),
            16,
            r"block_tables must be \[2, max_blocks\] int32, .* got \[2, 5\] int64",
        ),
        (np.zeros((1, 5), np.int32), 16, r"block_tables must be \[2, max_blocks\] int32"),
        (np.zeros(5, np.int32), 16, r"block_tables must be \[2, max_blocks\] int32"),
        (np.zeros((2, 4), np.int32), 16, "a sequence of 70 tokens does not fit the block table's 4 columns"),
        (np.zeros((2, 5), np.int32), 0, "block_size must be at least 1 token, got 0"),
    ],
)
def test_tables_that_do_not_fit_the_lengths_are_not_planned(table, block_size, message):
    with pytest.raises(InvalidArgumentError, match=message):
        ForestPlan.from_block_tables(table, [70, 40], [0, 1, 3], block_size, costs=ALWAYS_SHARE)


@pytest.mark.parametrize("sizes", [{"tile_tokens": 0}, {"split_tokens": 0}, {"tile_tokens": -4}])
def test_tiles_have_tokens(sizes):
    with pytest.raises(InvalidArgumentError, match="tile_tokens and split_tokens must be at least 1"):
        ForestPlan.flat([70, 40], [0, 1, 3], **sizes)


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("block_id", [-1, 9, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("column", [0, 3, 4])
@pytest.mark.parametrize("options", [{}, {"window": 5}], ids=["", "window"])
def test_a_block_that_does_not_exist_is_named(impl, block_id, column, options):
    """First, middle and last block, also where a window hides them; -1 does not stand for the last one."""
    case = make_case([40, 70], [1, 2])
    num_blocks = case.k_cache.shape[0]
    case.metadata.block_table[1, column] = num_blocks if block_id == 9 else block_id
    with pytest.raises(InvalidArgumentError) as error:
        case.run(impl, **options)
    assert str(error.value).startswith(
        f"block_table[1, {column}] names a block outside 0..{num_blocks - 1} within the sequence's length: "
        f"{case.metadata.block_table[1, column]};"
    )


@pytest.mark.parametrize("impl", KERNELS)
def test_what_lies_past_a_sequence_or_belongs_to_no_query_is_ignored(impl):
    case = make_case([40, 70, 33], [1, 2, 0])
    expected = case.run(impl)[0]
    case.metadata.block_table[0, 3:] = 2**31 - 1
    case.metadata.block_table[1, 5:] = -(2**31)
    case.metadata.block_table[2] = -1
    assert torch.equal(case.run(impl)[0], expected)


@pytest.mark.parametrize("impl", KERNELS)
def test_positions_before_the_first_key_see_nothing(impl):
    """Far below 0, where a 32-bit distance to a key would wrap around to one that is seen."""
    case = make_case([40], [3])
    case.metadata.positions[1] = -(2**31)
    out, lse = case.run(impl, alibi_slopes=torch.tensor([0.5, 0.1, 0.0, 1.0]))
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
    assert out[0].any()


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1])
def test_a_window_wider_than_int32_hides_nothing(impl, window):
    case = make_case([200, 40], [3, 40])
    torch.testing.assert_close(case.run(impl, window=window)[0], case.run("reference")[0])


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"scale": x}, "scale must be a finite") for x in (np.inf, -np.inf, np.nan, 1e39, None, "1", 1j)),
        *(({"softcap": x}, "softcap must be 0") for x in (np.inf, -np.inf, np.nan, -1.0, 1e39, 1e-46, None)),
        *(
            ({"window": x}, "window must be at least 1 token")
            for x in (0, -1, 2**64 + 5, 2.5, True, "4", np.nan)
        ),
    ],
)
def test_options_that_have_no_result_are_refused(impl, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make_case([20, 9], [2, 1]).run(impl, **options)


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("shape", [(2, 0, 2, 4), (2, 16, 0, 4), (2, 16, 2, 0)])
def test_caches_of_nothing_are_refused(impl, shape):
    """No kv heads would divide by zero, as would blocks of no tokens, in C without an exception."""
    metadata = make_case([9], [1]).metadata
    cache, q, k = torch.zeros(shape), torch.zeros(1, 4, shape[3]), torch.zeros(1, *shape[2:])
    message = "a cache's blocks must have at least one token, kv head and dimension"
    with pytest.raises(InvalidArgumentError, match=message):
        paged_attention(q, LayerCache(cache, cache), metadata, scale=1.0, impl=impl)
    with pytest.raises(InvalidArgumentError, match=message):
        store_kv(k, k, LayerCache(cache, cache), torch.tensor([0]), impl=impl)


def test_metadata_is_made_of_tensors_of_the_right_kind():
    metadata = make_case([20, 9], [2, 1]).metadata
    assert isinstance(metadata, AttentionMetadata)
    for name, message in (("positions", r"\[T\] int32"), ("seq_lens", r"\[S\] int32 or int64")):
        with pytest.raises(InvalidArgumentError, match=f"{name} must be {message}"):
            replace(metadata, **{name: getattr(metadata, name).double()})
