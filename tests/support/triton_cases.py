"""Runs the Triton kernels: on a GPU if there is one, else in Triton's interpreter on the CPU."""

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when the kernels are defined, that is before anything imports them.
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
tl = triton.language

from attention_cases import assert_error, dense_oracle, finite_max, make_case  # noqa: E402

from octavo.attention import LayerCache, gpu_paged  # noqa: E402
from octavo.attention.score_options import ScoreOptions  # noqa: E402
from octavo.attention.triton import float8_pairs as triton_float8  # noqa: E402
from octavo.attention.triton.kernel_call import empty_results, make_call  # noqa: E402

if not HAS_GPU:
    import interpreted_float8
    import interpreted_triton

    interpreted_float8.patch()
    interpreted_triton.patch()

    @triton.jit
    def _unpack(pairs):
        """What triton_float8.unpack does in assembly, which the interpreter cannot run."""
        low = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True)
        high = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float16), high.to(tl.float16)

    triton_float8.unpack = _unpack

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


@contextmanager
def poisoned_memory():
    """Every torch.empty holds NaN, or the largest integer: what a kernel forgets to write shows."""
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def to_device(case):
    """Move a case to the device, keeping the cache's [N, KH, B, D] memory."""
    metadata = case.metadata
    names = ("cu_seqlens_q", "seq_lens", "positions", "slot_mapping", "block_table")
    if metadata.kv_begin is not None:
        names = (*names, "kv_begin")
    metadata = replace(metadata, **{name: getattr(metadata, name).to(DEVICE) for name in names})
    return replace(
        case,
        q=case.q.to(DEVICE),
        k_cache=case.k_cache.to(DEVICE),
        v_cache=case.v_cache.to(DEVICE),
        metadata=metadata,
    )


def run(case, *, scale=None, k_scale=None, v_scale=None, num_splits=0, **options):
    """Attend with the Triton kernels; returns (out, lse) on the CPU."""
    moved = to_device(case)
    options = ScoreOptions(case.q.shape[-1] ** -0.5 if scale is None else scale, **options)
    if options.alibi_slopes is not None:
        options = replace(options, alibi_slopes=options.alibi_slopes.to(DEVICE))
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(DEVICE))
    scales = () if k_scale is None else (k_scale.to(DEVICE), v_scale.to(DEVICE))
    cache = LayerCache(moved.k_cache, moved.v_cache, *scales)
    with poisoned_memory():
        out, lse = gpu_paged.paged_attention_with_lse(
            moved.q, cache, moved.metadata, options, num_splits=num_splits
        )
    return out.cpu(), lse.cpu()


def call_of(moved):
    """A call of kernels over a case on the device."""
    tables = (moved.metadata.positions, moved.metadata.block_table)
    return make_call(moved.q, moved.cache, *tables, ScoreOptions(0.1), empty_results(moved.q))


def check(
    seq_lens,
    query_lens,
    *,
    scale=None,
    window=None,
    softcap=0.0,
    alibi_slopes=None,
    right=0,
    sinks=None,
    num_splits=0,
    **shape,
):
    """Make a case, run it, and hold it to err(kernel) <= 2 x err(plain torch) + eps against float64."""
    case = make_case(seq_lens, query_lens, **shape)
    options = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "right": right,
        "sinks": sinks,
    }
    assert_close(case, run(case, **options, num_splits=num_splits), **options)


def assert_close(case, results, *, eps=0.0, **options):
    """eps: of the numbers products are made of, if they are coarser than q."""
    out, lse = results
    operand_eps = max(eps, torch.finfo(case.q.dtype).eps)
    exact_out, exact_lse = dense_oracle(case, **options)
    plain = {name: value for name, value in options.items() if value is not None or name == "right"}
    plain_out, plain_lse = case.run("reference", **plain)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    assert out.dtype == case.q.dtype
    assert_error(out, exact_out, plain_out, 4 * operand_eps)
    lse_eps = max(eps, 4 * torch.finfo(torch.float32).eps)
    if case.q.dtype != torch.float32:
        # Products of 16-bit numbers are exact in float32, sums are not in the reference's order.
        lse_eps *= 4
    assert_error(lse, exact_lse, plain_lse, lse_eps * (1 + finite_max(exact_lse)))
