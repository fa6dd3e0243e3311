"""octavo.ops computes no derivatives, and drops none that somebody asks for: each kind is refused."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from octavo.attention import (
    KVCache,
    available_impls,
    forest_attention,
    store_kv,
    uniform_attention_with_lse,
)
from octavo.attention.score_options import ScoreOptions
from octavo.errors import InvalidArgumentError
from octavo.hf.attention_function import octavo_attention
from octavo.ops import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# PyTorch loads its own rules of forward mode by a function that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def every_call():
    """Each public function as a function of one tensor of floats, by name; and that tensor."""
    x, bounds = torch.randn(2, 2, 2, 8), torch.tensor([0, 2, 4], dtype=torch.int32)
    flat, cache, lens = x.flatten(0, 1), torch.randn(2, 6, 2, 8), torch.tensor([2, 3], dtype=torch.int32)
    packed = torch.randn(2, 2, 2, 2, 8)

    def append(new):
        return flash_attn_with_kvcache(x, cache.clone(), cache.clone(), k=new, v=new, cache_seqlens=lens)

    def rotate(angles):
        given = {"k": x, "v": x, "rotary_cos": angles, "rotary_sin": angles, "cache_seqlens": lens}
        return flash_attn_with_kvcache(x, cache.clone(), cache.clone(), **given)

    def pack(q):
        return torch.stack([q, q, q], dim=-3)

    return {
        "func": (lambda q: flash_attn_func(q, x, x), x),
        "func-keys": (lambda k: flash_attn_func(x, k, x), x),
        "func-values": (lambda v: flash_attn_func(x, x, v), x),
        "func-sinks": (lambda sinks: flash_attn_func(x, x, x, s_aux=sinks), torch.randn(2)),
        "func-slopes": (lambda slopes: flash_attn_func(x, x, x, alibi_slopes=slopes), torch.randn(2)),
        "qkvpacked": (lambda q: flash_attn_qkvpacked_func(pack(q)), x),
        "kvpacked": (lambda kv: flash_attn_kvpacked_func(x, kv), packed),
        "varlen": (lambda q: flash_attn_varlen_func(q, flat, flat, bounds, bounds, 2, 2), flat),
        "varlen-qkvpacked": (lambda q: flash_attn_varlen_qkvpacked_func(pack(q), bounds, 2), flat),
        "varlen-kvpacked": (
            lambda kv: flash_attn_varlen_kvpacked_func(flat, kv, bounds, bounds, 2, 2),
            packed.flatten(0, 1),
        ),
        "kvcache": (lambda q: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lens), x),
        "kvcache-keys": (lambda k: flash_attn_with_kvcache(x, k, cache, cache_seqlens=lens), cache),
        "kvcache-new": (append, x),
        "kvcache-angles": (rotate, torch.randn(9, 4)),
        "combine": (lambda out: flash_attn_combine(out, torch.ones(2, 2, 2)), x.clone()),
    }


def forward_mode(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


def forward_mode_without_grad(function, x):
    """torch.no_grad() leaves forward mode on."""
    with torch.no_grad():
        return forward_mode(function, x)


# How derivatives, or a batch of calls, are asked for.
TRANSFORMS = {
    "reverse": lambda function, x: function(x.clone().requires_grad_()),
    "dual": forward_mode,
    "dual, no_grad": forward_mode_without_grad,
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "jacfwd": lambda function, x: torch.func.jacfwd(function)(x),
    "linearize": lambda function, x: torch.func.linearize(function, x),
    "vjp": lambda function, x: torch.func.vjp(function, x),
    "grad": lambda function, x: torch.func.grad(lambda x: function(x).sum())(x),
    "hessian": lambda function, x: torch.func.hessian(lambda x: function(x).sum())(x),
    "vmap": lambda function, x: torch.vmap(function)(torch.stack([x, x])),
    "jvp of others": lambda function, x: torch.func.jvp(lambda y: function(x) * y.sum(), (x,), (x,)),
    "functional.jvp": lambda function, x: torch.autograd.functional.jvp(function, x, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", every_call())
def test_no_kind_of_derivative_is_dropped(name, transform):
    """A tangent that is lost would be a silent zero; after the refusal, calls work as before."""
    function, x = every_call()[name]
    with pytest.raises(InvalidArgumentError, match="no gradients"):
        TRANSFORMS[transform](function, x)
    out = function(x)
    assert out.isfinite().all() if isinstance(out, torch.Tensor) else out[0].isfinite().all()


def test_inference_mode_drops_tangents_on_purpose():
    q = torch.randn(1, 3, 2, 8)
    expected = flash_attn_func(q, q, q)
    with forward_ad.dual_level(), torch.inference_mode():
        assert torch.equal(flash_attn_func(forward_ad.make_dual(q, q), q, q), expected)


@pytest.mark.parametrize("transform", ["reverse", "dual", "dual, no_grad", "jvp", "grad", "vmap"])
def test_compiled_calls_drop_no_derivative(transform):
    torch._dynamo.reset()
    q = torch.randn(1, 3, 2, 8)
    compiled = torch.compile(lambda x: flash_attn_func(x, q, q), backend="eager")
    assert torch.equal(compiled(q), flash_attn_func(q, q, q))
    with pytest.raises(InvalidArgumentError, match="no gradients"):
        TRANSFORMS[transform](compiled, q)


def test_a_graph_with_a_transform_inside_is_refused():
    """Trap: the operators of a graph have no tangents, and PyTorch took them for 0."""
    torch._dynamo.reset()
    q = torch.randn(1, 3, 2, 8)

    def function(x):
        return torch.func.jvp(lambda x: flash_attn_func(x, q, q), (x,), (x,))

    with pytest.raises(InvalidArgumentError, match="no gradients"):
        torch.compile(function, backend="eager")(q)


def every_operator_of_a_cache():
    """The operators of octavo.attention and octavo.hf, likewise."""
    cache = KVCache.allocate(num_layers=1, num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8).layer(0)
    q, slots = torch.randn(3, 4, 8), torch.tensor([0, 1, 2])
    keys = torch.randn(3, 2, 8)
    lens, table = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    arrays = table.numpy(), lens.numpy(), np.array([0, 3], dtype=np.int32)
    x = torch.randn(1, 2, 3, 8)

    def uniform(q, **options):
        given = ScoreOptions(1.0, None, 0.0, options.get("slopes"), 0, options.get("sinks"))
        return uniform_attention_with_lse(q, cache, lens, table, given, query_len=3, max_seq_len=4)[0]

    def forest(q, impl):
        return forest_attention(q, cache, *arrays, scale=1.0, impl=impl)

    def hugging_face(q):
        return octavo_attention(torch.nn.Module(), q, x, x, None, is_causal=True)[0]

    impls = [name for name, reason in available_impls("cpu", torch.float32).items() if reason is None]
    return {
        "uniform": (uniform, q),
        "sinks": (lambda sinks: uniform(q, sinks=sinks), torch.randn(4)),
        "slopes": (lambda slopes: uniform(q, slopes=slopes), torch.randn(4)),
        "keys": (lambda k: store_kv(k, keys, cache, slots), keys),
        "values": (lambda v: store_kv(keys, v, cache, slots), keys),
        "hf": (hugging_face, torch.randn(1, 2, 3, 8)),
    } | {f"forest-{impl}": (lambda q, impl=impl: forest(q, impl), q) for impl in impls}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", every_operator_of_a_cache())
def test_operators_of_a_cache_drop_no_derivative(name, transform):
    """Whatever computes, also the plain PyTorch of the reference."""
    function, x = every_operator_of_a_cache()[name]
    with pytest.raises(InvalidArgumentError, match="no gradients"):
        TRANSFORMS[transform](function, x)
    with torch.inference_mode():
        function(x)
