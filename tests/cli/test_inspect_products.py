"""`octavo inspect --products`: dense models and experts, each form, here and on GPUs that are not here."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_checkpoints import TINY as GPT_OSS
from integer_checkpoints import CONFIG, FIELDS, make, write
from tiny_model import TINY_LLAMA

from octavo.cli import main

DUMMY = ("--load-format", "dummy")
WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
WIDE |= {"head_dim": 128, "vocab_size": 80000, "torch_dtype": "bfloat16", "num_hidden_layers": 2}
MIXTURE: dict[str, Any] = TINY_LLAMA | WIDE
MIXTURE |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 64}
MIXTURE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
MIXTURE |= {"decoder_sparse_step": 1, "mlp_only_layers": [0]}


@pytest.fixture(autouse=True)
def wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """Return the cells of the table that is printed, with names in each line."""
    main(["inspect", *arguments, "--products"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    for before, row in pairwise(rows):
        row[0], row[1] = row[0] or before[0], row[1] or before[1]
    return rows


def products(rows: list[list[str]], part: str) -> dict[str, str]:
    """Return the function that each group of rows of a part takes."""
    return {row[2]: row[3].rpartition(":")[2] for row in rows if row[0] == part}


def folder(path: Path, fields: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(fields))
    return str(path)


def test_a_dense_model_on_each_generation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = folder(tmp_path, TINY_LLAMA | WIDE)
    hopper = shown(capsys, model, *DUMMY, "--generation", "9")
    assert {row[0] for row in hopper} == {"embedding", "qkv", "o", "gate_up", "down", "lm_head"}
    assert products(hopper, "qkv") == {
        "1": "gemv_linear",
        "2 to 16": "hopper_linear",
        "17 to 64": "hopper_linear",
        "65 to 128": "hopper_linear",
        "129 to 256": "linear",
        "257 and more": "linear",
    }
    assert products(hopper, "lm_head")["1"] == "skinny_linear"
    assert all(row[4] for row in hopper), "each line says why"
    for generation in ("8", "10"):
        portable = shown(capsys, model, *DUMMY, "--generation", generation)
        assert products(portable, "o") == {
            "1": "skinny_linear",
            "2 to 4": "skinny_linear",
            "5 to 16": "linear",
            "17 to 256": "linear",
            "257 and more": "linear",
        }


def test_experts_and_the_router(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = folder(tmp_path, MIXTURE)
    hopper = shown(capsys, model, *DUMMY, "--generation", "9")
    # The first layer is dense.
    assert {row[0] for row in hopper} >= {"gate_up", "down", "experts", "router"}
    assert products(hopper, "experts") == {
        "1": "gemv",
        "2 to 4": "few",
        "5 to 16": "grouped",
        "17 to 256": "grouped",
        "257 and more": "grouped",
    }
    assert products(hopper, "router")["1"] == "norm_and_route"
    rounded = shown(capsys, model, *DUMMY, "--generation", "9", "--quantization", "fp8")
    assert products(rounded, "experts")["2 to 4"] == "gemv"
    assert products(rounded, "experts")["17 to 256"] == "rounded"
    here = shown(capsys, model, *DUMMY, "--device", "cpu", "--dtype", "float32")
    assert {row[0] for row in here} >= {"an expert's gate_up", "an expert's down", "router"}


def test_experts_in_mxfp4(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = GPT_OSS | {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}
    fields |= {"num_experts_per_tok": 4}
    model = folder(tmp_path, fields)
    hopper = products(shown(capsys, model, *DUMMY, "--generation", "9"), "experts")
    assert (hopper["1"], hopper["2 to 4"]) == ("gemv", "few")
    # 48 rows of an expert are 384 tokens.
    assert (hopper["257 to 384"], hopper["385 and more"]) == ("grouped", "persistent")
    assert "persistent" not in products(shown(capsys, model, *DUMMY, "--generation", "8"), "experts").values()


@pytest.mark.parametrize("name", ["awq-64", "gptq-128"])
def test_packed_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    fields = FIELDS[name]
    write(tmp_path, make(fields)[0], CONFIG | {"quantization_config": fields})
    for generation, medium in (("9", "hopper_medium_linear"), ("8.9", "medium_linear")):
        found = products(shown(capsys, str(tmp_path), "--generation", generation), "o")
        assert found["2 to 16"] == "few_linear"
        assert found["17 to 256"] == medium
        assert found["257 and more"] == "dequantised_linear"
    here = shown(capsys, str(tmp_path), "--device", "cpu")
    assert products(here, "qkv") == {"all": "cpu.block_linear"}


def test_forms_of_a_file_that_mixes_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "smollm2", "--generation", "9")
    assert products(found, "down")["1"] in ("gemv_linear", "few_linear", "packed_gemv_linear")
    assert any("Q4_1" in row[1] for row in found)


def test_float8_where_a_gpu_has_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = folder(tmp_path, TINY_LLAMA | WIDE)
    options = (model, *DUMMY, "--quantization", "fp8")
    assert products(shown(capsys, *options, "--generation", "8"), "o") == {"all": "dequantised"}
    assert "float8_linear" in products(shown(capsys, *options, "--generation", "8.9"), "o").values()


def test_a_cpu_with_units(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    model = folder(tmp_path, TINY_LLAMA | WIDE)
    found = shown(capsys, model, *DUMMY, "--device", "cpu")
    assert products(found, "o") == {
        "1": "C kernel",
        "2 to 16": "C kernel",
        "17 to 256": "oneDNN",
        "257 and more": "oneDNN",
    }
    assert products(shown(capsys, model, *DUMMY, "--device", "cpu", "--dtype", "float32"), "o") in (
        {"all": "cpu.mkl"},
        {"all": "linear"},
    )
    deterministic = shown(capsys, model, *DUMMY, "--generation", "9", "--deterministic")
    assert products(deterministic, "o") == {"all": "portable.invariant"}


@pytest.mark.parametrize("generation", ["7", "hopper", "9.12", ""])
def test_what_is_no_generation(capsys: pytest.CaptureFixture[str], tmp_path: Path, generation: str) -> None:
    with pytest.raises(SystemExit) as error:
        main(["inspect", folder(tmp_path, TINY_LLAMA), *DUMMY, "--products", "--generation", generation])
    assert error.value.code == 2
    assert re.search("--generation must be a compute capability from 8 on", capsys.readouterr().err)
