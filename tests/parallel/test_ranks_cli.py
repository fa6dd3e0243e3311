"""`--tensor-parallel-size`, or `-tp`, on the command line; and the document that says when to use it."""

import json
from pathlib import Path

import pytest
import tokenizers
from ranks_helpers import eventually, other_ranks
from tiny_model import TINY_LLAMA
from tokenizers import decoders, models, pre_tokenizers

from octavo.cli import main

ROOT = Path(__file__).parents[2]
OPTIONS = ("--load-format", "dummy", "--device", "cpu", "--num-blocks", "64")


def test_generate_gives_the_same_text_on_two_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:101]
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    found = []
    for ranks in ("1", "2"):
        main(["generate", "Hi", "--model", str(tmp_path), *OPTIONS, "-tp", ranks, "--seed", "7", "--json"])
        (completion,) = json.loads(capsys.readouterr().out)["outputs"]
        found.append(completion["text"])
    assert found[0] == found[1] != ""
    eventually(lambda: not other_ranks())


def test_inspect_plans_every_rank(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    main(["inspect", str(tiny_folder), *OPTIONS, "--tensor-parallel-size", "2", "--block-size", "4"])
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    rows = [(cells[1].strip(), cells[2].strip()) for cells in lines if len(cells) > 2]
    ranks = [value for name, value in rows if name == "ranks"]
    assert ranks in (["0, 1 of 2"], ["0 of 2", "1 of 2"])
    # Two layers, keys and values, one of two kv heads of 8 float32 numbers.
    assert ("KV cache per token", f"{2 * 2 * 8 * 4} bytes") in rows
    assert ("sums over ranks", "gloo") in rows


def test_inspect_refuses_by_name(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tiny_folder), *OPTIONS, "-tp", "3"])
    assert ended.value.code == 2
    assert "3 ranks must divide the model's 4 attention heads" in capsys.readouterr().err


def test_the_model_of_whole_experts_is_what_the_document_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import expert_parallel_model as model

    assert model.report() in (ROOT / "docs" / "scaling.md").read_text()
    # One token takes two of eight experts on two ranks: 3 times in 7 both are on one.
    (reading, products), *_ = model.unevenness(model.Mixture("", 8, 2), 1)
    assert reading == products == pytest.approx(1 + 3 / 7, abs=0.03)


def test_the_model_on_paper_is_what_the_document_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tensor_parallel_model as model

    assert model.report() in (ROOT / "docs" / "scaling.md").read_text()
    h200 = model.DEVICES[1]
    # What 8B on one H200 was measured to do: 512 in and 256 out alone, and 8,192 in.
    step_s, _ = model.decode_s(model.NETWORKS[0], h200, 1, batch=1, context=640)
    assert 1 / step_s == pytest.approx(235.9, rel=0.03)
    assert model.prompt_s(model.NETWORKS[0], 1)[0] == pytest.approx(0.2135, rel=0.03)
    # A second GPU helps, and never doubles.
    for network in model.NETWORKS:
        one, two = (model.decode_s(network, h200, n, batch=64)[0] for n in (1, 2))
        assert 1 < one / two < 2
