"""Positional arguments are those of flash-attention 2.8.4, in its order and with its defaults."""

import inspect

import pytest

from octavo import ops

OPTIONS = (
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
FLASH_ATTENTION = {
    "flash_attn_func": f"q, k, v, dropout_p=0.0, {OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, dropout_p=0.0, {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, dropout_p=0.0, {OPTIONS}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"dropout_p=0.0, {OPTIONS}, block_table=None",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"dropout_p=0.0, {OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, dropout_p=0.0, {OPTIONS}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
    "num_splits=0, return_softmax_lse=False",
    # FlashAttention-3's.
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
    "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
}
# Without a default there; keys of a paged cache need none.
OPTIONAL_HERE = ("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@pytest.mark.parametrize("name", ops.__all__)
def test_positional_arguments(name):
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    positional = [x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    shown = [
        x.name if x.default is x.empty or x.name in OPTIONAL_HERE else f"{x.name}={x.default}"
        for x in positional
    ]
    assert ", ".join(shown) == FLASH_ATTENTION[name]


def test_flash_attention_3s_names_are_taken_by_keyword():
    """Of its flash_attn_with_kvcache, and of flash_attn_varlen_func with what vLLM's fork adds."""
    cached = "qv page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale "
    cached += "v_descale attention_chunk scheduler_metadata pack_gqa sm_margin s_aux"
    ragged = "seqused_q seqused_k qv q_descale k_descale v_descale attention_chunk num_splits pack_gqa "
    ragged += "sm_margin q_v scheduler_metadata s_aux out return_softmax_lse fa_version"
    for name, arguments in (("flash_attn_with_kvcache", cached), ("flash_attn_varlen_func", ragged)):
        assert set(arguments.split()) <= set(inspect.signature(getattr(ops, name)).parameters)
