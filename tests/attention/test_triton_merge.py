"""The merge of nodes' and leaves' partial results alone, against torch in float64."""

from itertools import product

import pytest
import torch
from triton_cases import DEVICE, HAS_GPU, poisoned_memory

from octavo.attention import DeviceForest, merge
from octavo.attention.triton.nodes import merge_nodes

# Partial results of each token; a CHUNK of them are loaded side by side.
COUNTS = [0, 9, 1, 4, 0, 5, 8, 2, 3, 7, 6, 1]
DEAD = [3, 4, 7]


def make_partials(counts, heads, head_dim, *, spread=3.0, seed=0):
    """A forest whose partial results are random and whose tokens DEAD have no key of their own."""
    generator = torch.Generator().manual_seed(seed)
    with poisoned_memory():
        forest = DeviceForest(
            max_num_seqs=len(counts),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            block_size=16,
            dtype=torch.float32,
            device=DEVICE,
            max_partials=sum(counts) + 1,
        )
    forest.merge_begin.copy_(torch.tensor([0, *counts]).cumsum(0))
    num_partials, num_tokens = sum(counts), len(counts)
    forest.partial_out[:num_partials] = torch.randn(num_partials, heads, head_dim, generator=generator)
    forest.partial_lse[:num_partials] = spread * torch.randn(num_partials, heads, generator=generator)
    forest.leaf_out[:] = torch.randn(num_tokens, heads, head_dim, generator=generator)
    forest.leaf_lse[:] = spread * torch.randn(num_tokens, heads, generator=generator)
    return forest


def kill(forest, tokens):
    """What the leaves' kernels leave of rows without keys."""
    forest.leaf_out[tokens] = 0.0
    forest.leaf_lse[tokens] = -torch.inf


def merged(forest, num_tokens, dtype):
    shape = (num_tokens, *forest.leaf_out.shape[1:])
    with poisoned_memory():
        out = torch.empty(shape, dtype=dtype, device=DEVICE)
        lse = torch.empty(shape[:2], dtype=torch.float32, device=DEVICE)
    merge_nodes((out, lse), forest)
    return out.cpu(), lse.cpu()


def expected(forest, num_tokens):
    """(out, lse) in float64: one softmax over a token's parts; 0 and -inf where the leaf has no key."""
    bounds, results = forest.merge_begin.tolist(), []
    for token in range(num_tokens):
        parts = slice(bounds[token], bounds[token + 1])
        lses = torch.cat([forest.partial_lse[parts], forest.leaf_lse[token, None]]).cpu().double()
        outs = torch.cat([forest.partial_out[parts], forest.leaf_out[token, None]]).cpu().double()
        out, lse = torch.einsum("ph,phd->hd", lses.softmax(0), outs), lses.logsumexp(0)
        dead = lses[-1] == -torch.inf
        results.append((out.masked_fill(dead[:, None], 0.0), lse.masked_fill(dead, -torch.inf)))
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs), torch.stack(lses)


def check(forest, num_tokens, dtype=torch.float32):
    out, lse = merged(forest, num_tokens, dtype)
    exact_out, exact_lse = expected(forest, num_tokens)
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    assert (lse - exact_lse).nan_to_num(0.0).abs().max() < 1e-5 * (1 + exact_lse.nan_to_num(neginf=0.0).max())
    eps = max(torch.finfo(dtype).eps, 4e-6)
    assert (out.double() - exact_out).abs().max() <= eps * exact_out.abs().max()
    return out, lse


# The interpreter takes seconds for a shape: there each number of heads, each width and each dtype comes once.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = (
    list(product((1, 3, 8, 9), (8, 64, 80), DTYPES))
    if HAS_GPU
    else [(1, 8, DTYPES[0]), (3, 64, DTYPES[1]), (3, 80, DTYPES[2]), (8, 64, DTYPES[0]), (9, 80, DTYPES[1])]
)


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), SHAPES)
def test_merges_any_number_of_parts(heads, head_dim, dtype):
    forest = make_partials(COUNTS, heads, head_dim)
    kill(forest, DEAD)
    out, lse = check(forest, len(COUNTS), dtype)
    assert not out[DEAD].any()
    assert (lse[DEAD] == -torch.inf).all()
    assert not (lse == -torch.inf).all(1)[[0, 1, 2, 5]].any()


def test_agrees_with_the_merge_of_whole_tensors():
    forest = make_partials([3] * 5, 4, 16)
    outs, lses = (x[:15].unflatten(0, (5, 3)).movedim(1, 0) for x in (forest.partial_out, forest.partial_lse))
    outs, lses = torch.cat([outs, forest.leaf_out[None]]), torch.cat([lses, forest.leaf_lse[None]])
    for actual, whole in zip(merged(forest, 5, torch.float32), merge(outs, lses), strict=True):
        torch.testing.assert_close(actual, whole.cpu())


def test_a_token_without_parts_keeps_its_leafs_result():
    forest = make_partials([0] * 4, 3, 16)
    out, lse = merged(forest, 4, torch.float32)
    assert torch.equal(out, forest.leaf_out.cpu())
    torch.testing.assert_close(lse, forest.leaf_lse.cpu(), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("where", ["leaf", "node"])
def test_a_part_that_is_no_number_shows_in_its_token_alone(where):
    """Trap: a sum of NaN is not above 0, as that of a row without keys, whose result is 0."""
    forest = make_partials([2, 3], 3, 16)
    expected, _ = merged(forest, 2, torch.float32)
    out, lse = (
        (forest.leaf_out, forest.leaf_lse) if where == "leaf" else (forest.partial_out, forest.partial_lse)
    )
    out[0], lse[0] = torch.nan, torch.nan
    got, got_lse = merged(forest, 2, torch.float32)
    assert got[0].isnan().all()
    assert got_lse[0].isnan().all()
    assert torch.equal(got[1], expected[1])


def test_parts_hundreds_apart_and_parts_without_keys():
    """No overflow; a node's part of -inf, as a row that was not read has, counts for nothing."""
    forest = make_partials([2, 6, 4, 1], 2, 16, spread=300.0)
    forest.partial_lse[[0, 3, 8, 9, 10, 11]] = -torch.inf
    check(forest, 4)


def test_a_batch_smaller_than_the_plan_reads_only_its_own_parts():
    forest = make_partials(COUNTS, 2, 16)
    first = sum(COUNTS[:5])
    forest.partial_out[first:] = torch.nan
    forest.partial_lse[first:] = torch.nan
    assert not check(forest, 5)[0].isnan().any()


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.gpu
def test_merges_many_tokens():
    forest = make_partials([i % 10 for i in range(600)], 32, 128)
    kill(forest, list(range(0, 600, 7)))
    check(forest, 600, torch.bfloat16)
