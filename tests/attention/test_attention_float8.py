"""float8 caches through the checked operators on a CPU, and what is refused."""

from dataclasses import replace

import pytest
import torch
from attention_cases import make_case, make_float8_case

from octavo.attention import KVCache, LayerCache, available_impls, paged_attention, store_kv
from octavo.attention.cache import FLOAT8
from octavo.errors import ConfigError, InvalidArgumentError

SIZES = {"num_layers": 2, "num_blocks": 5, "block_size": 4, "num_kv_heads": 3, "head_dim": 6}


def new_cache():
    return KVCache.allocate(**SIZES, dtype=FLOAT8)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attends_over_the_numbers_it_stands_for(impl, dtype):
    case, (k_scale, v_scale) = make_float8_case([70, 40, 20], [1, 3, 20], dtype=dtype)
    plain = replace(
        case,
        q=case.q.float(),
        k_cache=case.k_cache.float() * k_scale[:, None],
        v_cache=case.v_cache.float() * v_scale[:, None],
    )
    out, lse = case.run(impl, k_scale=k_scale, v_scale=v_scale)
    expected_out, expected_lse = plain.oracle()
    assert out.dtype == dtype
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected_out, rtol=eps, atol=eps)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_without_scales_a_number_is_itself(impl):
    case, _ = make_float8_case([40], [2])
    ones = torch.ones(2)
    for actual, expected in zip(case.run(impl), case.run(impl, k_scale=ones, v_scale=ones), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store_scales_rounds_and_saturates(impl, dtype):
    cache = new_cache()
    cache.data.view(torch.uint8).fill_(1)
    k_cache, v_cache = cache.layer(1).k, cache.layer(1).v
    k, v = torch.randn(2, 3, 3, 6).to(dtype)
    k[0, 0, :3] = torch.tensor([1000.0, -torch.inf, torch.nan])
    v[0] *= 10000
    k_scale, v_scale = torch.tensor([[0.5, 1.0, 3.0], [2.0, 0.1, 1.0]])
    slots = torch.tensor([19, -1, 6])
    store_kv(k, v, LayerCache(k_cache, v_cache, k_scale, v_scale), slots, impl=impl)
    for rows, stored, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        for token, slot in [(0, 19), (2, 6)]:
            expected = (rows[token].float() / scale[:, None]).clamp(-448, 448).to(FLOAT8).float()
            actual = stored[slot // 4, slot % 4].float()
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert k_cache[4, 3, 0, :2].tolist() == [448.0, -448.0]
    assert (cache.data[0].view(torch.uint8) == 1).all()


def test_a_float8_cache_has_scales_of_one_and_others_have_none():
    cache = new_cache()
    k_scale, v_scale = cache.layer(1).k_scale, cache.layer(1).v_scale
    assert torch.equal(k_scale, torch.ones(3))
    assert torch.equal(v_scale, torch.ones(3))
    assert (k_scale.data_ptr() - cache.scales.data_ptr()) % 16 == 0
    assert (v_scale.data_ptr() - k_scale.data_ptr()) % 16 == 0
    assert cache.layer(1) is cache.layer(1)
    plain = KVCache.allocate(**SIZES).layer(1)
    assert plain.k_scale is plain.v_scale is None
    cache.scales[1, 1] = 4.0
    assert cache.layer(1).v_scale.tolist() == [4.0] * 3
    assert cache.layer(1).k_scale.tolist() == [1.0] * 3


def test_copies_blocks():
    cache = new_cache()
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.float()
    cache.copy_blocks([(0, 3), (4, 1)])
    after = cache.data.float()
    assert torch.equal(after[:, :, [3, 1]], before[:, :, [0, 4]])
    assert torch.equal(after[:, :, [0, 2, 4]], before[:, :, [0, 2, 4]])


def test_auto_takes_torch_and_the_compiled_kernels_refuse():
    case, _ = make_float8_case([40], [2])
    assert torch.equal(case.run("auto")[0], case.run("torch")[0])
    assert "float8" in available_impls("cpu", FLOAT8)["c"]
    with pytest.raises(ConfigError, match=r'"c" cannot run: the compiled kernels take float32.*"torch"'):
        case.run("c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": torch.ones(2), "v_scale": None}, "v_scale is missing"),
        ({"k_scale": torch.ones(3)}, r"k_scale must be contiguous \[2\] float32"),
        ({"v_scale": torch.ones(2).double()}, r"v_scale must be contiguous \[2\] float32"),
        ({"v_scale": torch.ones(4)[::2]}, "v_scale must be contiguous"),
        ({"k_scale": torch.ones(2, device="meta")}, "k_scale is on meta"),
        ({"q": torch.zeros(2, 4, 16).double()}, "q must be float32, bfloat16 or float16 for a float8 cache"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    case, _ = make_float8_case([40], [2])
    arguments = {"q": case.q, "k_scale": torch.ones(2), "v_scale": torch.ones(2), **changes}
    cache = LayerCache(case.k_cache, case.v_cache, arguments["k_scale"], arguments["v_scale"])
    with pytest.raises(InvalidArgumentError, match=message):
        paged_attention(arguments["q"], cache, case.metadata, scale=1.0)


def test_scales_without_a_float8_cache_are_refused():
    case = make_case([40], [2])
    with pytest.raises(InvalidArgumentError, match=r"are for float8 caches, this one is torch.float32"):
        case.run("torch", k_scale=torch.ones(2), v_scale=torch.ones(2))
    k = torch.zeros(1, 2, 16)
    with pytest.raises(InvalidArgumentError, match="are for float8 caches"):
        store_kv(
            k, k, LayerCache(case.k_cache, case.v_cache, torch.ones(2), torch.ones(2)), torch.tensor([0])
        )
