"""octavo.ops in torch.compile, and its operators under torch's own checks."""

import pytest
import torch
from fewer import fewer
from kvcache_cases import kvcache_case
from ops_cases import Maker, dense_case, varlen_case

from octavo.ops import flash_attn_with_kvcache


def copied(arguments):
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("kind", [kvcache_case, varlen_case, dense_case])
@fewer("seed", range(300_000, 300_002))
def test_compiles_to_one_graph(kind, seed):
    case = kind(Maker(seed, "cpu", (torch.float32,)))
    window = tuple(int(side) for side in case.arguments["window_size"])
    arguments = {**case.arguments, "window_size": window}
    compiled_arguments = copied(arguments)
    torch._dynamo.reset()
    compiled = torch.compile(lambda kwargs: case.function(**kwargs), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = case.function(**arguments)
        actual = compiled(compiled_arguments)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    for name in ("k_cache", "v_cache"):
        if name in arguments:
            a, b = compiled_arguments[name], arguments[name]
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("op", ["append", "attend"])
@pytest.mark.parametrize("seed", [400_005, 400_010])
def test_opcheck(op, seed, monkeypatch):
    """torch.library.opcheck of the operators with the arguments of real calls."""
    from octavo.ops import custom_ops

    calls = {"append": [], "attend": []}
    for name in calls:
        real = getattr(custom_ops, f"{name}_op")

        def record(*args, real=real, name=name):
            calls[name].append((real, [x.clone() if isinstance(x, torch.Tensor) else x for x in args]))
            return real(*args)

        monkeypatch.setattr(custom_ops, f"{name}_op", record)
    # Once in a process torch.compile notes its special functions: let it find the real one.
    torch.compile(torch.sin, backend="eager")(torch.zeros(1))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    while not calls[op]:
        kvcache_case(Maker(seed, "cpu", (torch.float32,))).run()
        seed += 1
    real, arguments = calls[op][0]
    torch.library.opcheck(real, arguments)


def test_compiled_call_serves_other_lengths():
    """Lengths are data: one graph serves all, and the cache is written in place."""
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    caches = torch.randn(2, 2, 64, 2, 16)
    expected = caches.clone()
    for length in (0, 5, 63):
        q, k, v = torch.randn(2, 1, 4, 16), *torch.randn(2, 2, 1, 2, 16)
        lens = torch.full((2,), length, dtype=torch.int32)
        out = compiled(q, caches[0], caches[1], k, v, cache_seqlens=lens, causal=True)
        assert torch.equal(out, flash_attn_with_kvcache(q, *expected, k, v, cache_seqlens=lens, causal=True))
        assert torch.equal(caches, expected)
