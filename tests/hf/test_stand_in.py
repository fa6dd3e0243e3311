"""Modules that answer to flash-attention's names."""

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

import octavo.hf
from octavo.errors import InvalidArgumentError
from octavo.hf import flash_attn_3, padding
from octavo.hf import flash_attn_module as stand_in
from octavo.hf.rotary_tables import apply_rotary_emb
from octavo.ops import flash_attn_func, flash_attn_with_kvcache

HERE = Path(__file__).parent


def run(code: str) -> str:
    """Output of a new Python process, errors included."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody had imported transformers; what stands in for flash-attention is gone afterwards."""
    monkeypatch.delitem(sys.modules, "transformers.utils.import_utils", raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


def test_transformers_reads_pages_in_place_through_flash_attention_2() -> None:
    pytest.importorskip("transformers")
    lines = run(
        f"exec(compile(open({str(HERE / 'run_stand_in.py')!r}).read(), 'run_stand_in.py', 'exec'))"
    ).split("\n")
    counts = dict(line.split() for line in lines if line.split(" ")[0] in ("padded", "paged"))
    assert int(counts["padded"]) == 2 * 12  # two layers, twelve steps
    assert int(counts["paged"]) >= 2 * 11  # all steps but the first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_transformers_pages_through_octavo_on_a_gpu() -> None:
    pytest.importorskip("transformers")
    path = HERE / "run_gpu.py"
    lines = run(f"exec(compile(open({str(path)!r}).read(), 'run_gpu.py', 'exec'))").split("\n")
    counts = dict(line.split() for line in lines if line.split(" ")[0] in ("attached", "paged"))
    assert int(counts["paged"]) >= 2 * 11  # all steps but the first
    assert counts["attached"].startswith("octavo")


@pytest.mark.usefixtures("untouched")
def test_metadata_names_the_release() -> None:
    octavo.hf.stand_in_for_flash_attn()
    octavo.hf.stand_in_for_flash_attn(3)
    assert metadata.version("flash_attn") == importlib.import_module("flash_attn").__version__ == "2.8.3"
    assert metadata.version("flash-attn-3") == "3.0.0"
    assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert importlib.util.find_spec("flash_attn.cute") is None
    third = importlib.import_module("flash_attn_interface")
    assert third.flash_attn_with_kvcache.__module__ == "octavo.hf.flash_attn_3"


@pytest.mark.usefixtures("untouched")
def test_a_real_package_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidArgumentError, match="flash_attn is installed: Octavo does not hide it"):
        octavo.hf.stand_in_for_flash_attn()


def test_transformers_must_not_have_looked_yet() -> None:
    pytest.importorskip("transformers.utils.import_utils")
    before = list(sys.meta_path)
    with pytest.raises(InvalidArgumentError, match="transformers is imported already"):
        octavo.hf.stand_in_for_flash_attn()
    assert sys.meta_path == before
    assert "flash_attn" not in sys.modules


def test_there_are_two_versions() -> None:
    with pytest.raises(InvalidArgumentError, match="version must be 2 or 3; got 4"):
        octavo.hf.stand_in_for_flash_attn(4)


def test_what_is_in_flash_attn() -> None:
    modules = stand_in._flash_attn_2()
    assert len(modules["flash_attn"]) == 7
    first = list(inspect.signature(modules["flash_attn"]["flash_attn_with_kvcache"]).parameters)[:8]
    assert first == ["q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"]


def test_padding_goes_away_and_comes_back() -> None:
    x = torch.randn(3, 5, 2)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    tokens, indices, starts, longest, used = padding.unpad_input(x, mask, unused)
    assert starts.tolist() == [0, 3, 8, 10]
    assert starts.dtype == torch.int32
    assert (longest, used.tolist()) == (5, [2, 5, 2])
    back = padding.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, x * (mask + unused)[..., None])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_is_that_of_the_operators(interleaved: bool) -> None:
    q, k, v = (torch.randn(2, 3, 2, 16) for _ in range(3))
    angles = torch.rand(20, 4) * 6
    cos, sin, lengths = angles.cos(), angles.sin(), torch.tensor([5, 9], dtype=torch.int32)
    cache = torch.zeros(2, 20, 2, 16)
    flash_attn_with_kvcache(
        q, cache, cache.clone(), k, v, cos, sin, lengths, causal=True, rotary_interleaved=interleaved
    )
    turned = apply_rotary_emb(k, cos, sin, interleaved=interleaved, seqlen_offsets=lengths)
    for row, start in enumerate(lengths.tolist()):
        torch.testing.assert_close(turned[row], cache[row, start : start + 3], rtol=1e-5, atol=1e-5)
    ragged = apply_rotary_emb(
        k.flatten(0, 1), cos, sin, interleaved, seqlen_offsets=lengths, cu_seqlens=torch.tensor([0, 3, 6])
    )
    assert torch.equal(ragged, turned.flatten(0, 1))
    assert apply_rotary_emb(k, cos, sin, interleaved, inplace=True, seqlen_offsets=lengths) is k
    assert torch.equal(k, turned)


def test_tables_of_another_shape_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"cos \[4, 9\] and sin \[4, 9\]"):
        apply_rotary_emb(torch.zeros(1, 2, 1, 16), torch.zeros(4, 9), torch.zeros(4, 9))


@pytest.mark.parametrize("offset", [-1, 3])
def test_positions_outside_the_tables_are_refused(offset: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"positions go from {offset} to {offset + 1}, .* 4 rows"):
        apply_rotary_emb(torch.zeros(1, 2, 1, 16), *torch.zeros(2, 4, 8), seqlen_offsets=offset)


def test_flash_attn_3_takes_its_own_order() -> None:
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    out, lse = flash_attn_3.flash_attn_func(q, k, v, 0.5, True, return_attn_probs=True)
    assert torch.equal(out, flash_attn_func(q, k, v, softmax_scale=0.5, causal=True))
    assert lse.shape == (2, 2, 5)
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    ragged, _ = flash_attn_3.flash_attn_varlen_func(
        *flat, starts, starts, 5, 5, None, None, 0.5, True, return_attn_probs=True
    )
    torch.testing.assert_close(ragged, out.flatten(0, 1), rtol=1e-5, atol=1e-5)
    cached, _ = flash_attn_3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=5, softmax_scale=0.5, causal=True, return_softmax_lse=True
    )
    torch.testing.assert_close(cached, out, rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidArgumentError, match="qv"):
        flash_attn_3.flash_attn_with_kvcache(q, k, v, qv=q)
