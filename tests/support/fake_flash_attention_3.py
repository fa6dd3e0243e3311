"""Stands in on a CPU for FlashAttention-3 and two of vLLM's operators, with their schemas."""

import re
from itertools import pairwise
from typing import Any

import torch

_FA3_SCHEMA = """fwd(Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v,
    Tensor(b!)? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
    Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k,
    Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,
    Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal,
    int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved,
    Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux,
    int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
_FA3_ARGUMENTS = re.findall(
    r"(\w+)(?=[,)])", _FA3_SCHEMA.replace("(a!)", "").replace("(b!)", "").split(" ->")[0]
)


SCHEMAS = {
    "_vllm_fa3_C": _FA3_SCHEMA,
    "_C": """rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size,
        Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()""",
    "_C_cache_ops": """reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache,
        Tensor(b!) value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale)
        -> ()""",
}


class FakePeer:
    """Stands in on a CPU for FlashAttention-3 and vLLM's operators, with their schemas.

    Attributes:
        can_append: whether the build can.
        has_vllm: whether vLLM's operators are there.
        factor: what results are multiplied by; 1 is right.
        calls: arguments of every call.
    """

    def __init__(self, *, can_append: bool) -> None:
        self.can_append, self.has_vllm, self.factor = can_append, True, 1.0
        self.calls: list[dict[str, Any]] = []

    def fwd(self, *values: Any) -> list[torch.Tensor]:
        given = dict(zip(_FA3_ARGUMENTS, values, strict=True))
        self.calls.append(given)
        if given["k_new"] is not None and not self.can_append:
            raise RuntimeError("This flash attention build does not support appending KV.\nmore")
        paged = given["page_table"] is not None
        q, k, v = (given[name].float() for name in ("q", "k", "v"))
        lens, bounds = given["seqused_k"], given["cu_seqlens_k"]
        if given["k_new"] is not None:
            assert not given["is_rotary_interleaved"]
            assert given["rotary_cos"].shape[0] >= given["max_seqlen_k"]
            at = lens.long()
            slots = (given["page_table"].gather(1, at[:, None] // k.shape[1]).long()[:, 0], at % k.shape[1])
            angles = (given["rotary_cos"][at], given["rotary_sin"][at])
            q = self.rotated(q, *angles)
            given["k"][slots] = self.rotated(given["k_new"][:, 0].float(), *angles).to(given["k"].dtype)
            given["v"][slots] = given["v_new"][:, 0]
            k, v, lens = given["k"].float(), given["v"].float(), lens + 1
        out = torch.empty(q.shape)
        for s, (begin, end) in enumerate(pairwise(given["cu_seqlens_q"].tolist())):
            if paged:
                keys, values_ = (c[given["page_table"][s].long()].flatten(0, 1)[: lens[s]] for c in (k, v))
            else:
                keys, values_ = (c[bounds[s] : bounds[s + 1]] for c in (k, v))
            out[begin:end] = self.attend(q[begin:end], keys, values_, given["softmax_scale"])
        return [(out * self.factor).to(given["q"].dtype)]

    @staticmethod
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    @staticmethod
    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, H, D] by halves at angles [T, D / 2]."""
        first, second = x.chunk(2, -1)
        cos, sin = cos.float()[:, None], sin.float()[:, None]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def rotary_embedding(self, positions, query, key, head_size, cos_sin_cache, is_neox, *_) -> None:
        if not self.has_vllm:
            raise AttributeError("no rotary_embedding")
        assert is_neox
        assert head_size == query.shape[-1]
        for x in (query, key):
            x.copy_(self.rotated(x.float(), *cos_sin_cache[positions].chunk(2, -1)))

    def reshape_and_cache_flash(
        self, key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    ) -> None:
        assert (kv_cache_dtype, float(k_scale), float(v_scale)) == ("auto", 1.0, 1.0)
        key_cache.flatten(0, 1)[slot_mapping] = key
        value_cache.flatten(0, 1)[slot_mapping] = value
