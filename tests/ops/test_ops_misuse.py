"""octavo.ops refuses what does not fit by naming the argument and its shape, and swallows nothing."""

import math

import pytest
import torch
from edge_rows import FORMS, check_dense_used, check_empty_rows, check_no_sequences

from octavo.errors import InvalidArgumentError
from octavo.ops import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)


def cached(**changes):
    """Arguments of a call that works, with some changed."""
    given = {
        "q": torch.randn(2, 1, 4, 16),
        "k_cache": torch.randn(8, 16, 2, 16),
        "v_cache": torch.randn(8, 16, 2, 16),
        "block_table": torch.arange(8, dtype=torch.int32).view(2, 4),
        "cache_seqlens": torch.tensor([20, 30], dtype=torch.int32),
    }
    return given | changes


NEW = {"k": torch.randn(2, 1, 2, 16), "v": torch.randn(2, 1, 2, 16)}
WRONG = [
    ({"q": torch.randn(2, 4, 16)}, r"q must be \[B, Sq, H, D\].*\[2, 4, 16\]"),
    ({"q": torch.randn(2, 1, 3, 16)}, "multiple of k_cache's; got 3 and 2"),
    ({"q": torch.randn(2, 1, 4, 300)}, "head dim of 1 to 256"),
    ({"q": torch.randn(2, 1, 4, 8)}, "head dim 8"),
    ({"q": torch.randn(2, 1, 4, 16).int()}, "q must be float16"),
    ({"k_cache": torch.randn(8, 16, 2, 16).half()}, "k_cache must be torch.float32"),
    ({"v_cache": torch.randn(8, 15, 2, 16)}, "k_cache and v_cache must differ in the last dimension only"),
    ({"block_table": torch.zeros(3, 4).int()}, r"block_table must be \[B, max_blocks\] = \[2, any\]"),
    ({"block_table": torch.zeros(2, 4)}, "block_table must be int32"),
    ({"block_table": None}, r"k_cache must be \[B, S, KH, D\] = \[2,"),
    ({"block_table": None, "cache_batch_idx": torch.tensor([0, 9])}, "sequence|block_table"),
    ({"page_table": torch.zeros(2, 4).int()}, "two names of one argument"),
    ({"cache_seqlens": torch.tensor([1, 2, 3])}, r"cache_seqlens must be \[B\] = \[2\]; got \[3\]"),
    ({"cache_seqlens": 2.5}, "cache_seqlens must be an int"),
    ({"cache_seqlens": torch.tensor([20, 65])}, "sequence 1 has keys from 0 to 65"),
    ({"block_table": torch.zeros(2, 0).int()}, "sequence 0 has keys from 0 to 20, but its cache holds 0"),
    (
        {"k_cache": torch.zeros(0, 16, 2, 16), "v_cache": torch.zeros(0, 16, 2, 16)},
        r"block_table\[0, 0\] is 0, but blocks go from 0 to -1",
    ),
    ({"cache_leftpad": torch.tensor([0, -3])}, "kv_begin|sequence 1"),
    ({"block_table": torch.tensor([[0, 1, 2, 3], [4, 99, 6, 7]])}, r"block_table\[1, 1\]"),
    ({"window_size": (1, 2, 3)}, r"window_size must be \(left, right\)"),
    ({"window_size": 3}, r"window_size must be \(left, right\).*got 3"),
    ({"window_size": (1.5, 0)}, r"whole numbers.*got \(1.5, 0\)"),
    ({"window_size": torch.tensor([1.0, 0.0])}, "whole numbers"),
    ({"causal": "no"}, "causal must be True or False; got 'no'"),
    ({"causal": torch.tensor(True)}, "causal must be True or False"),
    ({"max_seqlen_q": 2.5}, "max_seqlen_q must be a number of tokens"),
    ({"max_seqlen_q": "2"}, "max_seqlen_q must be a number of tokens"),
    ({"cache_seqlens": torch.tensor([20, 2**32])}, r"less than 2\*\*31; got \[20, 4294967296\]"),
    ({"block_table": torch.tensor([[0, 1, 2, 3], [2**32, 5, 6, 7]])}, r"less than 2\*\*31"),
    ({"softcap": -1.0}, "softcap"),
    ({"softmax_scale": "x"}, "softmax_scale"),
    ({**NEW, "softmax_scale": math.nan}, "softmax_scale must be a finite float32 number; got nan"),
    ({**NEW, "softmax_scale": 1e39}, "softmax_scale must be a finite float32 number; got 1e"),
    ({**NEW, "softcap": math.inf}, "softcap must be 0 .off. or a positive, finite float32 number"),
    ({"cache_seqlens": 2**40}, "cache_seqlens must be an int or .B. int32; got 1099511627776"),
    ({"cache_batch_idx": torch.tensor([0, 2])}, r"cache_batch_idx\[1\] is 2, but rows .* from 0 to 1"),
    ({"cache_batch_idx": torch.tensor([-1, 0])}, r"cache_batch_idx\[0\] is -1"),
    ({"q": torch.empty(2, 1, 4, 16, device="meta")}, "q must be on a CPU or an NVIDIA GPU; it is on meta"),
    ({"num_splits": -2}, "num_splits"),
    ({"alibi_slopes": torch.ones(5)}, r"alibi_slopes must be \[H\] or \[B, H\] = \[4\]; got \[5\]"),
    ({"s_aux": torch.ones(3)}, r"s_aux must be \[H\] = \[4\]"),
    ({"k_descale": torch.ones(2, 2)}, "k_descale is for float8"),
    ({"qv": torch.ones(1)}, "qv is not supported"),
    ({"attention_chunk": 3}, "attention_chunk is not supported"),
    ({"plan": "fast"}, "plan must be"),
    ({"k": NEW["k"]}, "k was given without both"),
    ({"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)}, "rotary_cos was given without both"),
    ({**NEW, "cache_seqlens": None}, "cache_seqlens is missing"),
    ({**NEW, "k": torch.randn(2, 1, 3, 16)}, r"k must be \[B, Sn, KH, D\] = \[2, any, 2, 16\]"),
    ({**NEW, "v": torch.randn(2, 2, 2, 16)}, r"v must be \[B, Sn, KH, D\] = \[2, 1, 2, 16\]"),
    ({**NEW, "k": NEW["k"].half()}, "k must be torch.float32"),
    ({**NEW, "v_cache": torch.randn(1, 16, 2, 16).expand(8, -1, -1, -1)}, "v_cache is expanded"),
    ({**NEW, "cache_seqlens": torch.tensor([20, 64])}, "cache of sequence 1 holds 64 tokens.*block_table"),
    ({**NEW, "block_table": torch.tensor([[99, 1, 2, 3], [4, 5, 6, 7]])}, r"block_table\[0, 0\] is 99"),
    ({**NEW, "cache_leftpad": torch.tensor([0, -3])}, "sequence 1 has keys from -3"),
    ({**NEW, "seqused_q": torch.tensor([1, 2])}, r"seqused_q\[1\] must be 0 to the 1 queries"),
    ({**NEW, "block_table": torch.tensor([[0, 99, 2, 3], [4, 5, 6, 7]])}, "new key of sequence 0"),
    ({**NEW, "rotary_cos": torch.ones(9, 4)}, "rotary_cos and rotary_sin must be given together"),
    ({**NEW, "rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)}, "sequence 0 is at position 20"),
    ({**NEW, "rotary_cos": torch.ones(99, 9), "rotary_sin": torch.ones(99, 9)}, "rotary dim"),
]


TENSORS = {
    **NEW,
    "rotary_cos": torch.ones(99, 4),
    "rotary_sin": torch.ones(99, 4),
    "cache_batch_idx": torch.arange(2),
    "cache_leftpad": torch.zeros(2).int(),
    "alibi_slopes": torch.ones(4),
    "s_aux": torch.ones(4),
    "seqused_q": torch.ones(2).int(),
    "rotary_seqlens": torch.zeros(2).int(),
}


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_refuses(changes, message):
    given = cached(**changes)
    before = given["k_cache"].clone()
    with pytest.raises(InvalidArgumentError, match=message):
        flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before), "a refused call writes nothing"


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "block_table", *TENSORS])
def test_refuses_what_is_not_a_tensor(name):
    with pytest.raises(InvalidArgumentError, match=f"{name} must be a tensor; got list"):
        flash_attn_with_kvcache(**cached(**TENSORS | {name: [1, 2]}))


def test_refuses_ragged_queries_before_it_appends():
    given = cached(**NEW, q=torch.randn(2, 4, 16), cu_seqlens_q=torch.tensor([0, 2, 1]))
    before = given["k_cache"].clone()
    with pytest.raises(InvalidArgumentError, match="cu_seqlens_q must rise"):
        flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before)


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_refuses_after_calls_that_were_right(changes, message):
    """Checks made once for alike calls refuse what is not alike."""
    flash_attn_with_kvcache(**cached())
    flash_attn_with_kvcache(**cached(**NEW, causal=True, num_splits=1, softcap=1.0))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=message):
            flash_attn_with_kvcache(**cached(**changes))


def test_alike_values_of_other_types_are_refused():
    flash_attn_with_kvcache(**cached(num_splits=1))
    for changes, message in (({"num_splits": True}, "num_splits"), ({"softmax_scale": [1]}, "softmax_scale")):
        with pytest.raises(InvalidArgumentError, match=message):
            flash_attn_with_kvcache(**cached(**changes))


def test_refuses_dropout_and_gradients():
    q = torch.randn(1, 2, 2, 8)
    with pytest.raises(InvalidArgumentError, match="dropout_p must be 0"):
        flash_attn_func(q, q, q, dropout_p=0.1)
    with pytest.raises(InvalidArgumentError, match="no gradients"):
        flash_attn_func(q.clone().requires_grad_(), q, q)
    with pytest.raises(InvalidArgumentError, match="no gradients"):
        flash_attn_with_kvcache(q.clone().requires_grad_(), q, q)
    for name in ("alibi_slopes", "s_aux"):
        with pytest.raises(InvalidArgumentError, match="no gradients"):
            flash_attn_func(q, q, q, **{name: torch.ones(2, requires_grad=True)})
    with pytest.raises(InvalidArgumentError, match="no gradients"):
        flash_attn_combine(torch.ones(2, 3, 4, 8, requires_grad=True), torch.ones(2, 3, 4))
    x, bounds = torch.randn(2, 2, 8).to(FLOAT8), torch.tensor([0, 2], dtype=torch.int32)
    for name in ("q_descale", "k_descale", "v_descale"):
        descale = {name: torch.ones(1, 2, requires_grad=True)}
        for call in (
            lambda given=descale: flash_attn_func(x[None], x[None], x[None], **given),
            lambda given=descale: flash_attn_with_kvcache(x[None], x[None], x[None], **given),
            lambda given=descale: flash_attn_varlen_func(x, x, x, bounds, bounds, **given),
        ):
            with pytest.raises(InvalidArgumentError, match="no gradients"):
                call()


def test_refuses_gradients_of_angles_before_it_writes():
    """Trap: a cache that rotated keys were written into belonged to their graph from then on."""
    angles = {"rotary_cos": torch.ones(99, 4), "rotary_sin": torch.ones(99, 4)}
    for name in angles:
        given = cached(**NEW, **angles | {name: torch.ones(99, 4, requires_grad=True)})
        before = given["k_cache"].clone()
        with pytest.raises(InvalidArgumentError, match="no gradients"):
            flash_attn_with_kvcache(**given)
        assert torch.equal(given["k_cache"], before)
        assert not given["k_cache"].requires_grad


def test_a_maximum_below_the_longest_query_is_refused():
    q, bounds = torch.randn(5, 2, 8), torch.tensor([0, 1, 5], dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match="max_seqlen_q is 3, but sequence 1 has 4 queries"):
        flash_attn_varlen_func(q, q, q, bounds, bounds, 3, 4)


PAGED = {
    "k": torch.zeros(6, 4, 2, 8),
    "v": torch.zeros(6, 4, 2, 8),
    "block_table": torch.arange(6).view(2, 3),
}
NO_KEYS = {"k": torch.zeros(0, 2, 8), "v": torch.zeros(0, 2, 8), "cu_seqlens_k": torch.zeros(3).int()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 3])}, "cu_seqlens_k must be"),
        ({"cu_seqlens_k": None}, "lengths of k are missing|k must be"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 2])}, r"cu_seqlens_k must rise from 0 .*got \[0, 5, 2\]"),
        ({"cu_seqlens_k": torch.tensor([0, 2, 9])}, "at most the 5 tokens of k"),
        ({"seqused_k": torch.tensor([3, 3])}, r"seqused_k\[0\] must be 0 to the 2 keys of sequence 0"),
        (
            {"seqused_k": torch.tensor([1, -2])},
            r"seqused_k\[1\] must be 0 to the 3 keys of sequence 1; got -2",
        ),
        (
            PAGED | {"cu_seqlens_k": torch.tensor([0, 5, 2])},
            "cu_seqlens_k must not fall; sequence 1 has -3 keys by it",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 7, 5]), **NO_KEYS}, "cu_seqlens_q must rise"),
        ({"q": torch.empty(0, 2, 8)}, "cu_seqlens_q must rise"),
        ({"out": torch.empty(1, 2, 8).expand(5, 2, 8)}, "out is expanded: its tokens share memory"),
        ({"max_seqlen_q": torch.tensor(3)}, "max_seqlen_q must be a number"),
        ({"out": torch.empty(5, 2, 9)}, r"out must be \[T, H, Dv\]"),
        ({"out": torch.empty(5, 2, 8).half()}, "out must be torch.float32"),
        ({"q_v": torch.ones(1)}, "q_v is not supported"),
    ],
)
def test_varlen_refuses(changes, message):
    x, cu = torch.randn(5, 2, 8), torch.tensor([0, 2, 5])
    given = {"q": x, "k": x, "v": x, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3} | changes
    with pytest.raises(InvalidArgumentError, match=message):
        flash_attn_varlen_func(**given)


def test_packed_forms_equal_the_plain_ones():
    qkv, kv, q = torch.randn(2, 6, 3, 4, 16), torch.randn(2, 6, 2, 2, 16), torch.randn(2, 6, 4, 16)
    options = (0.0, 0.3, True, (3, 0), 5.0)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, *options), flash_attn_func(*qkv.unbind(2), *options))
    assert torch.equal(flash_attn_kvpacked_func(q, kv, *options), flash_attn_func(q, *kv.unbind(2), *options))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    flat, flat_kv, flat_q = qkv.flatten(0, 1), kv.flatten(0, 1), q.flatten(0, 1)
    assert torch.equal(
        flash_attn_varlen_qkvpacked_func(flat, cu, 7, *options),
        flash_attn_varlen_func(*flat.unbind(1), cu, cu, 7, 7, *options),
    )
    assert torch.equal(
        flash_attn_varlen_kvpacked_func(flat_q, flat_kv, cu, cu, 7, 7, *options),
        flash_attn_varlen_func(flat_q, *flat_kv.unbind(1), cu, cu, 7, 7, *options),
    )


def test_out_is_written_and_returned():
    x, cu = torch.randn(5, 2, 8), torch.tensor([0, 2, 5])
    out = torch.full((5, 2, 8), torch.nan)
    given = (x, x, x, cu, cu, 3, 3)
    result, lse = flash_attn_varlen_func(*given, causal=True, out=out, return_softmax_lse=True, fa_version=3)
    assert result is out
    assert torch.equal(out, flash_attn_varlen_func(*given, causal=True))
    assert lse.shape == (2, 5)
    assert lse.is_contiguous()


def test_combine_merges_halves_of_the_keys():
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 8)
    whole, whole_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    halves = [
        flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True)
        for part in (slice(0, 7), slice(7, 20))
    ]
    outs, lses = (torch.stack(x) for x in list(zip(*halves, strict=True))[:2])
    out, lse = flash_attn_combine(outs, lses.transpose(2, 3))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse.transpose(1, 2), whole_lse)
    written = torch.empty(2, 3, 4, 8, dtype=torch.bfloat16)
    assert flash_attn_combine(outs, lses.transpose(2, 3), out=written)[0] is written
    with pytest.raises(InvalidArgumentError, match="out must hold floats"):
        flash_attn_combine(outs, lses.transpose(2, 3), out=written.int())
    with pytest.raises(InvalidArgumentError, match="out is expanded"):
        flash_attn_combine(outs, lses.transpose(2, 3), out=written[:1].expand(2, -1, -1, -1))
    with pytest.raises(InvalidArgumentError, match="out_partial must be"):
        flash_attn_combine(outs, lses)
    with pytest.raises(InvalidArgumentError, match=r"must hold floats; got torch\.int32"):
        flash_attn_combine(outs.int(), lses.transpose(2, 3))
    with pytest.raises(InvalidArgumentError, match=r"out_dtype must be a torch\.dtype of floats"):
        flash_attn_combine(outs, lses.transpose(2, 3), out_dtype=torch.int32)
    assert get_scheduler_metadata(1, 1, 1, 4, 2, 16, torch.zeros(1)).shape == (0,)


FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64, torch.complex64])
def test_what_a_float8_cache_does_not_take(dtype):
    caches = {name: torch.zeros(8, 16, 2, 16).to(FLOAT8) for name in ("k_cache", "v_cache")}
    new = {name: value.to(dtype) for name, value in NEW.items()}
    with pytest.raises(InvalidArgumentError, match=f"must be float16, .*got {dtype}"):
        flash_attn_with_kvcache(**cached(**caches, **new))
    with pytest.raises(InvalidArgumentError, match=f"v must be torch.float32, got {dtype}"):
        flash_attn_with_kvcache(**cached(**caches, k=NEW["k"], v=new["v"]))


def test_new_keys_in_float8_are_stored_as_they_are():
    """As FlashAttention-3 does; those in other dtypes are divided by the descale factors first."""
    descale = torch.rand(2, 2) + 0.5
    given = cached(k_descale=descale, v_descale=descale.flip(0), causal=True)
    new = {name: value.to(FLOAT8) for name, value in NEW.items()}
    scales = {"k": descale.view(2, 1, 2, 1), "v": descale.flip(0).view(2, 1, 2, 1)}
    plain = {name: new[name].float() * scales[name] for name in new}
    results, caches = [], []
    for keys in (new, plain):
        caches.append([given[name].to(FLOAT8) for name in ("k_cache", "v_cache")])
        both = dict(zip(("k_cache", "v_cache"), caches[-1], strict=True))
        results.append(flash_attn_with_kvcache(**given | both | keys))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    for stored, expected in zip(*caches, strict=True):
        assert torch.equal(stored.float(), expected.float())
    assert torch.equal(caches[0][0][1, 4].float(), new["k"][0, 0].float())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_negative_length_is_empty(dtype, form):
    check_empty_rows("cpu", dtype, *form)


def test_dense_queries_that_do_not_count():
    check_dense_used("cpu")


def test_queries_that_do_not_count_need_no_angle():
    """A table of 6 rows is enough for the query at position 5; the two after it do not count."""
    angles = {"rotary_cos": torch.randn(6, 4), "rotary_sin": torch.randn(6, 4)}
    given = cached(**NEW, **angles, cache_seqlens=torch.tensor([5, 5]), causal=True)
    expected = flash_attn_with_kvcache(**given)
    q = torch.cat([given["q"], torch.randn(2, 2, 4, 16)], 1)
    got = flash_attn_with_kvcache(**given | {"q": q, "seqused_q": torch.tensor([1, 1])})
    torch.testing.assert_close(got[:, :1], expected)
    assert not got[:, 1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_of_minus_infinity_is_none(dtype):
    """Also where a query sees no key: empty sequences, more queries than keys."""
    q, caches = torch.randn(3, 4, 4, 16, dtype=dtype), torch.randn(2, 3, 16, 2, 16, dtype=dtype)
    lens = torch.tensor([0, 2, 16], dtype=torch.int32)
    given = {"cache_seqlens": lens, "causal": True, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, *caches, **given, s_aux=torch.full((4,), -torch.inf))
    expected, expected_lse = flash_attn_with_kvcache(q, *caches, **given)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_tensors_that_are_negative_by_a_bit_of_their_own():
    x = torch.randn(1, 3, 2, 8)
    negative = torch._neg_view(x)
    for given in ((negative, x, x), (x, negative, x), (x, x, negative)):
        assert torch.equal(flash_attn_func(*given), flash_attn_func(*(each.resolve_neg() for each in given)))


def test_no_sequences():
    check_no_sequences("cpu")
