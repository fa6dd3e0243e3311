"""Calls at the edge: rows of a padded batch that are empty, queries that do not count."""

import itertools

import torch

from octavo.ops import flash_attn_with_kvcache

FORMS = list(itertools.product((None, 16), (0, 1, 3), (False, True), (False, True)))
"""(page, new keys, ragged, rotary) of calls."""


def check_empty_rows(device, dtype, page, num_new, is_ragged, is_rotary):
    """Rows 0 and 2 are empty: they change nothing and see nothing, and rows 1 and 3 are as without them."""
    if page is None:
        caches, places = torch.randn(2, 4, 64, 2, 16, device=device, dtype=dtype), {}
    else:
        caches = torch.randn(2, 8, page, 2, 16, device=device, dtype=dtype)
        table = torch.tensor([[-1] * 4, [0, 1, 2, 3], [-1] * 4, [4, 5, 6, 7]], device=device)
        places = {"block_table": table.int()}
    query_len = max(1, num_new)
    lens = torch.tensor([-1, 20, -2, 37], dtype=torch.int32, device=device)
    q = torch.randn(4, query_len, 4, 16, device=device, dtype=dtype)
    given = {"causal": True, "return_softmax_lse": True}
    new = torch.randn(2, 4, num_new, 2, 16, device=device, dtype=dtype)
    angles = torch.randn(2, 64, 8, device=device, dtype=dtype)
    rotary = {"rotary_cos": angles[0], "rotary_sin": angles[1]} if is_rotary and num_new else {}
    expected = caches.clone()
    rows = [1, 3]
    ours = {"cache_batch_idx": torch.tensor(rows, device=device)}
    if page is not None:
        ours = {"block_table": places["block_table"][rows]}
    if num_new:
        ours |= {"k": new[0][rows], "v": new[1][rows]}
    out, lse = flash_attn_with_kvcache(
        q[rows], *expected, cache_seqlens=lens[rows], **ours, **rotary, **given
    )
    if num_new:
        places |= {"k": new[0], "v": new[1]}
    if is_ragged:
        bounds = torch.arange(5, dtype=torch.int32, device=device)
        places |= {"cu_seqlens_q": bounds * query_len, "max_seqlen_q": query_len}
        if num_new:
            flat = {
                "k": new[0].flatten(0, 1),
                "v": new[1].flatten(0, 1),
                "cu_seqlens_k_new": bounds * num_new,
            }
            places |= flat
    queries = q.flatten(0, 1) if is_ragged else q
    actual, actual_lse = flash_attn_with_kvcache(
        queries, *caches, cache_seqlens=lens, **places, **rotary, **given
    )
    if is_ragged:
        actual = actual.unflatten(0, (4, query_len))
        actual_lse = actual_lse.unflatten(1, (4, query_len)).transpose(0, 1)
    torch.testing.assert_close(actual[rows], out)
    torch.testing.assert_close(actual_lse[rows], lse)
    assert bool((actual[[0, 2]] == 0).all())
    assert bool((actual_lse[[0, 2]] == -torch.inf).all())
    assert torch.equal(caches, expected), "an empty row stores nothing"


def check_dense_used(device):
    """Of dense queries, too, only the first seqused_q count, and the last of those is at the last key."""
    q = torch.randn(3, 5, 4, 16, device=device)
    caches = torch.randn(2, 3, 32, 2, 16, device=device)
    used, lens = [5, 0, 2], [30, 7, 4]
    given = {"causal": True, "return_softmax_lse": True}
    counts, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in (used, lens))
    out, lse = flash_attn_with_kvcache(q, *caches, cache_seqlens=ends, seqused_q=counts, **given)
    for b, n in enumerate(used):
        assert bool((out[b, n:] == 0).all())
        assert bool((lse[b, :, n:] == -torch.inf).all())
        if n:
            alone = flash_attn_with_kvcache(
                q[b : b + 1, :n], *caches[:, b : b + 1], cache_seqlens=lens[b], **given
            )
            torch.testing.assert_close(out[b, :n], alone[0][0])
            torch.testing.assert_close(lse[b, :, :n], alone[1][0])


def check_no_sequences(device):
    """Rows behind the last of no sequences are 0, as in a padded batch that nobody is in."""
    q = torch.randn(2, 4, 16, device=device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    bounds = torch.zeros(1, dtype=torch.int32, device=device)
    pages = torch.randn(2, 3, 16, 2, 16, device=device)
    places = [
        {"cache_seqlens": nothing, "block_table": nothing.view(0, 4), "seqused_q": nothing},
        {"cache_seqlens": nothing, "cache_batch_idx": nothing, "seqused_q": nothing},
    ]
    for place in places:
        out, lse = flash_attn_with_kvcache(q, *pages, cu_seqlens_q=bounds, return_softmax_lse=True, **place)
        assert bool((out == 0).all())
        assert lse.shape == (4, 2)
        assert bool((lse == -torch.inf).all())
