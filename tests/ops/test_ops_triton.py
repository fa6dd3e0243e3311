"""The GPU's path of octavo.ops, appending and attention, in Triton's interpreter on a CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "attention"))

# Makes the interpreter fast and right before any kernel is defined.
from empty_rows import FORMS, check_empty_rows
from kvcache_cases import kvcache_case
from ops_cases import Maker, dense_case, varlen_case
from test_ops_matrix import check
from triton_cases import HAS_GPU

from octavo.attention import AttentionMetadata, gpu_paged
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

    monkeypatch.setattr(attend_module, "choose_for_call", lambda *_: "triton")
    monkeypatch.setattr(attend_module, "paged_attention_with_lse", attend)
    monkeypatch.setattr(attend_module, "_is_on_host", lambda q: False)
    # Lengths on a GPU are not looked at.
    monkeypatch.setattr(AttentionMetadata, "check_lengths", lambda self: None)
    monkeypatch.setattr(run, "append", append)


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


@pytest.mark.usefixtures("_on_triton")
@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_negative_length_is_empty(form):
    check_empty_rows("cpu", torch.float32, *form)
