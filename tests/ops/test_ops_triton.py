"""The GPU's path of octavo.ops, appending and attention, in Triton's interpreter on a CPU."""

import functools
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "attention"))

# Makes the interpreter fast and right before any kernel is defined.
from kvcache_cases import kvcache_case
from ops_cases import Maker, dense_case, varlen_case
from test_ops_matrix import check
from triton_cases import HAS_GPU

from octavo.attention import AttentionMetadata, choice, gpu_paged, uniform_attention_with_lse
from octavo.attention.options import ScoreOptions
from octavo.ops import attend as attend_module
from octavo.ops import run

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a GPU runs the matrix itself")


@pytest.fixture
def _on_triton(monkeypatch):
    """Send CPU tensors the way of a GPU's."""
    from octavo.ops.triton.append import append

    def attend(q, cache, metadata, *, num_splits, **options):
        options = ScoreOptions(**options)
        return gpu_paged.paged_attention_with_lse(q, cache, metadata, options, num_splits=num_splits)

    attend_uniform = functools.partial(uniform_attention_with_lse, impl="triton")
    monkeypatch.setattr(choice, "unsupported_reason", lambda *_: None)
    choice.choose_impl.cache_clear()
    monkeypatch.setattr(attend_module, "uniform_attention_with_lse", attend_uniform)
    monkeypatch.setattr(attend_module, "paged_attention_with_lse", attend)
    monkeypatch.setattr(attend_module, "_is_on_host", lambda q: False)
    # Lengths on a GPU are not looked at.
    monkeypatch.setattr(AttentionMetadata, "check_lengths", lambda self: None)
    monkeypatch.setattr(run, "append", append)
    yield
    choice.choose_impl.cache_clear()


def small(maker):
    """Shapes that the interpreter finishes in time."""
    draw = maker.shape

    def shape():
        draw()
        maker.head_dim, maker.v_dim = min(maker.head_dim, 40), min(maker.v_dim, 40)
        maker.batch = min(maker.batch, 2)

    maker.shape = shape
    maker.length = lambda edge: min(Maker.length(maker, edge), 70)
    return maker


@pytest.mark.usefixtures("_on_triton")
@pytest.mark.parametrize("seed", range(200_000, 200_020))
def test_agrees_with_the_oracle(seed):
    maker = small(Maker(seed, "cpu", (torch.float32, torch.float16)))
    kind = (kvcache_case, kvcache_case, varlen_case, dense_case)[seed % 4]
    check(kind(maker))
