"""Checkpoints of Phi-3, in which projections of one input are one matrix: floats, and quantised."""

from pathlib import Path
from typing import Any

import pytest
import torch
from integer_checkpoints import CONFIG, FIELDS, make, write
from test_integer_checkpoints import logprobs
from torch import Tensor

from octavo import LLM
from octavo.errors import WeightsError

PHI3 = CONFIG | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, as Phi-3 stores them: AWQ's matrices are [K, N], others [N, K]."""
    found = dict(tensors)
    for name in tensors:
        for whole, parts in FUSED.items():
            if f".{parts[0]}." in name:
                names = [name.replace(parts[0], part) for part in parts]
                dim = 0 if name.endswith(".weight") else 1
                found[name.replace(parts[0], whole)] = torch.cat([found.pop(each) for each in names], dim)
    return found


@pytest.mark.parametrize("name", ["floats", "awq-32"])
def test_a_model_is_what_its_projections_mean(tmp_path: Path, name: str) -> None:
    stored, meant = make(FIELDS["awq-32"], PHI3)
    fields: dict[str, Any] = {} if name == "floats" else {"quantization_config": FIELDS[name]}
    model = write(tmp_path / "stored", fused(meant if name == "floats" else stored), PHI3 | fields)
    # The same network by other names.
    expected = logprobs(write(tmp_path / "meant", meant, CONFIG))
    torch.testing.assert_close(logprobs(model, quantization="none"), expected, rtol=1e-5, atol=1e-5)
    llm = LLM(model, device="cpu", num_blocks=8, block_size=4)
    num_matrices = sum(each.endswith("_proj.weight") for each in meant)
    assert llm.engine.plan.dequantised == {}
    if name != "floats":
        assert 0 < (logprobs(model) - expected).abs().max() < 0.15
        assert num_matrices == 14
        numbers = sum(tensor.numel() for each, tensor in meant.items() if each.endswith("_proj.weight"))
        assert numbers / 2 < llm.engine.plan.quantised_bytes["blocks"] < numbers


def test_a_matrix_of_other_rows_is_refused_by_name(tmp_path: Path) -> None:
    tensors = fused(make(FIELDS["awq-32"], PHI3)[1])
    name = "model.layers.1.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][1:]
    with pytest.raises(WeightsError, match=rf"{name} is \[255, 128\], expected 256 rows for .*q_proj"):
        LLM(write(tmp_path, tensors, PHI3), device="cpu", num_blocks=8, block_size=4)
