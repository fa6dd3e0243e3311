"""A bfloat16 cache of a float32 model on a CPU: the C kernels beside the specification."""

import pytest
import torch
from attention_cases import ALWAYS_SHARE, Case, make_case, with_bfloat16_cache

from octavo.attention import KVCache, available_impls, store_kv
from octavo.attention.implementations import choose_impl
from octavo.errors import ConfigError, InvalidArgumentError

pytestmark = pytest.mark.skipif(
    available_impls("cpu", torch.float32)["c"] is not None, reason="needs a C compiler"
)


def make(seq_lens: list[int], query_lens: list[int], **shape: int) -> Case:
    return with_bfloat16_cache(make_case(seq_lens, query_lens, **shape))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 4), (9, 3), (16, 2)])
@pytest.mark.parametrize("head_dim", [5, 16, 64, 80])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [([1, 17, 200, 1100], [1, 1, 1, 1]), ([90, 33, 64], [90, 20, 1]), ([130], [4])],
)
@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 5.0}])
def test_agrees_with_the_specification(
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_lens: list[int],
    query_lens: list[int],
    options: dict[str, float],
) -> None:
    case = make(seq_lens, query_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    expected = case.run("reference", **options)
    for impl in ("auto", "c", "torch"):
        for got, right in zip(case.run(impl, **options), expected, strict=True):
            torch.testing.assert_close(got, right, atol=2e-5, rtol=2e-5)


def test_shared_blocks() -> None:
    rows = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5, 6]]
    case = with_bfloat16_cache(make_case([60, 55, 50], [1, 1, 20], rows=rows))
    expected = case.run("reference")
    out, lse = case.run("c", case.forest(ALWAYS_SHARE))
    torch.testing.assert_close(out, expected[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, expected[1], atol=2e-5, rtol=2e-5)


def test_what_is_stored_is_rounded_to_the_nearest_number() -> None:
    numbers = torch.tensor(
        [1.0, 1.00390625, 1.01171875, -1.00390626, 3.4e38, torch.inf, -torch.inf, torch.nan, 1e-40]
    )
    rows = torch.cat([numbers, torch.randn(71) * 1e3]).view(5, 1, 16)
    caches = [
        KVCache.allocate(
            num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.bfloat16
        )
        for _ in range(2)
    ]
    slots = torch.tensor([7, -1, 0, 3, 5])
    for cache, impl in zip(caches, ("c", "reference"), strict=True):
        cache.data.zero_()
        store_kv(rows, rows * 2, cache.layer(0), slots, impl=impl)
    torch.testing.assert_close(caches[0].data, caches[1].data, rtol=0, atol=0, equal_nan=True)
    written = caches[0].layer(0).k.flatten(0, 1)[slots[slots >= 0]]
    torch.testing.assert_close(written, rows[slots >= 0].bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_other_dtypes_are_refused_by_name() -> None:
    case = make([20], [1])
    for dtype in (torch.float16, torch.float64):
        wrong = Case(case.q.to(dtype), case.k_cache, case.v_cache, case.metadata)
        with pytest.raises(InvalidArgumentError, match=r"q must have the cache.s dtype torch\.bfloat16"):
            wrong.run("auto")
    narrow = Case(case.q.bfloat16(), case.k_cache, case.v_cache, case.metadata)
    with pytest.raises(
        ConfigError, match=r'"c" cannot run: the compiled kernels take float32, .*got torch.bfloat16'
    ):
        narrow.run("c")
    assert narrow.run("auto")[0].dtype == torch.bfloat16
    wide = make_case([20], [1])
    with pytest.raises(InvalidArgumentError, match=r"q must have the cache.s dtype torch\.float32"):
        Case(wide.q.bfloat16(), wide.k_cache, wide.v_cache, wide.metadata).run("auto")
    with pytest.raises(InvalidArgumentError, match=r"k must have the cache.s dtype torch\.bfloat16"):
        store_kv(wide.q[:, :2].half(), wide.q[:, :2].half(), case.cache, torch.tensor([0]))


def test_who_runs() -> None:
    assert choose_impl("auto", "cpu", torch.bfloat16, torch.float32) == "c"
    assert (
        choose_impl("auto", "cpu", torch.bfloat16)
        == choose_impl("auto", "cpu", torch.bfloat16, torch.bfloat16)
        == "torch"
    )
    assert choose_impl("auto", "cpu", torch.float16, torch.float32) == "torch"
