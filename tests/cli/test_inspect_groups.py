"""`octavo inspect` of models whose layers keep different keys: groups, pages and the tokens that fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 65536,
    "sliding_window": 64,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 16,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
}


def rows(folder: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    """Return what inspect prints of a model, by name."""
    (folder / "config.json").write_text(json.dumps(config))
    main(
        ["inspect", str(folder), "--load-format", "dummy", "--device", "cpu", "--dtype", "float32", *options]
    )
    lines = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in lines}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_groups_pages_and_tokens_beside_one_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(tmp_path, GEMMA, capsys, "--num-blocks", "100", "--block-size", "16")
    # A page has a block of each of 5 windowed layers, or 5 blocks of the full one.
    assert found["KV cache"] == "2.0 MiB: 100 pages of 20 KiB, blocks of 16 tokens"
    assert found["1 layer"] == "all keys, 2 kv heads x 16: 256 bytes per token"
    assert found["5 layers"] == "the last 64 keys, 2 kv heads x 16: 1,280 bytes per token"
    # A window is in 5 pages at most; a sequence has the other 95, and 1,024 tokens have 13 + 5.
    assert found["tokens that fit, in sequences of 1,024"] == f"{100 * 1024 // 18:,} (in one group 1,333)"
    assert found["tokens that fit, in sequences of 7,600"] == "7,600 (in one group 1,333)"
    assert not [name for name in found if "32,768" in name], "no sequence is so long in this cache"


def test_windows_alone_have_no_row_of_layers_that_do_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(tmp_path, MISTRAL, capsys, "--num-blocks", "60", "--block-size", "16")
    assert [name for name in found if name.endswith(("layer", "layers"))] == ["layers", "3 layers"]
    assert found["tokens that fit, in sequences of 4,096"] == "40,960 (in one group 960)"


@pytest.mark.parametrize(("window", "max_len"), [(None, 4096), (4096, 4096), (64, 64)])
def test_windows_as_long_as_a_sequence_make_no_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], window: int | None, max_len: int
) -> None:
    config = MISTRAL | {"sliding_window": window}
    found = rows(tmp_path, config, capsys, "--num-blocks", "60", "--max-model-len", str(max_len))
    assert found["KV cache"].endswith("60 blocks x 16 tokens")
    assert found["tokens that fit"] == "960"
