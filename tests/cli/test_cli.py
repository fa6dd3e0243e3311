"""The command line: flags from the dataclasses, one-line errors with exit code 2, real output."""

import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from integer_checkpoints import CONFIG, FIELDS, make, write
from tiny_model import TINY_LLAMA

from octavo.cli import main


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(tmp_path)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let standard input hold a text."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Run in this process; return the one error line."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("octavo: error: ")
    return captured.err


def test_errors_are_one_line_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path
) -> None:
    assert "block_size must be a positive integer below 2**31, got 0" in fails(
        capsys, "generate", "a", "--block-size", "0"
    )
    assert "Did you mean" in fails(capsys, "generate", "a", "--blok-size", "4")
    assert "temperature" in fails(capsys, "generate", "a", "--temperature", "-1")
    assert "nowhere" in fails(capsys, "generate", "a", "--model", str(tmp_path / "nowhere"))
    assert "nowhere.gguf" in fails(capsys, "chat", "a", "--model", str(tmp_path / "nowhere.gguf"))
    assert "dtype" in fails(capsys, "inspect", tiny, "--dtype", "float8")
    assert "--json" in fails(capsys, "generate", "a", "--logprobs", "2")
    assert "num-prompts" in fails(capsys, "bench", "--num-prompts", "0")
    assert "tokenizer" in fails(capsys, "generate", "a", "--model", tiny, "--load-format", "dummy")
    assert "no chat template" in fails(capsys, "chat", "--model", tiny, "--load-format", "dummy")
    assert "frobnicate" in fails(capsys, "frobnicate")


def test_inspect_shows_weights_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.memory.devices._available_system_bytes", lambda: 2**16)
    with pytest.raises(SystemExit):
        main(["inspect", tiny, "--load-format", "dummy", "--device", "cpu"])
    captured = capsys.readouterr()
    assert "but 64 KiB are free on cpu" in captured.err
    assert re.search(r"feed-forward .* KiB: float32", captured.out)


def test_inspect_shows_the_plan_before_loading(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    main(["inspect", tiny, "--load-format", "dummy", "--num-blocks", "7", "--block-size", "5"])
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM" in shown
    assert "7 blocks x 5 tokens" in shown
    assert "256 bytes" in shown  # 2 (k, v) x 2 layers x 2 kv heads x 8 dim x 4 bytes


def test_inspect_shows_the_network_of_a_model_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], tiny: str
) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", tiny, "--load-format", "dummy", "--num-blocks", "999999999"])
    captured = capsys.readouterr()
    assert "LlamaForCausalLM" in captured.out
    assert captured.err.startswith("octavo: error: weights (")
    assert "do not fit" in captured.err


def test_inspect_names_the_form_of_each_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = FIELDS["awq-64"]
    write(tmp_path, make(fields)[0], CONFIG | {"quantization_config": fields})
    shown = inspected(capsys, str(tmp_path))
    assert re.search(r"attention \d+ KiB: 4 bits in groups of 64; 8-bit activations, by the C kernel", shown)
    assert re.search(r"feed-forward \d+ KiB: 4 bits in groups of 64; 8-bit activations", shown)
    assert re.search(r"LM head \d+ KiB: float32", shown)
    shown = inspected(capsys, str(tmp_path), "--quantization", "none")
    assert re.search(r"attention \d+ KiB: float32", shown)
    assert "a copy of the embedding" not in shown
    assert "dequantised while loading 14 x 4 bits in groups of 64: become float32" in shown
    # The embedded model's file mixes types.
    shown = inspected(capsys, "smollm2")
    assert re.search(r"attention \d+ MiB: Q4_1; 8-bit activations, by the C kernel", shown)
    assert re.search(r"embedding \d+ MiB: Q8_0; 8-bit activations", shown)
    assert "LM head" not in shown
    # In float32 the GEMMs have a layout of their own.
    shown = inspected(capsys, "smollm2", "--quantization", "none")
    assert re.search(r"LM head 108 MiB: float32, a copy of the embedding", shown)


def test_inspect_names_the_products_of_a_cpu_with_matrix_units(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | {"torch_dtype": "bfloat16"}))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    model = (str(tmp_path), "--load-format", "dummy")
    shown = inspected(capsys, *model)
    named = r"bfloat16; by oneDNN in bfloat16 \(AMX\); up to 16 rows by the C kernel in float32"
    for part in ("embedding", "attention", "feed-forward"):
        assert re.search(rf"{part} \d+ KiB: {named}", shown), part
    assert "device, dtype cpu, float32" in shown
    shown = inspected(capsys, *model, "--dtype", "float32")
    assert re.search(r"attention \d+ KiB: float32", shown)
    shown = inspected(capsys, *model, "--quantization", "int8")
    assert re.search(r"attention \d+ KiB: int8; 8-bit activations, by the C kernel", shown)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["inspect", *arguments, "--num-blocks", "7"])
    return " ".join(re.sub(r"[│┃|]", " ", capsys.readouterr().out).split())


def test_compile_says_where_kernels_lie(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    main(["compile", tiny, "--load-format", "dummy", "--num-blocks", "7", "--quiet"])
    assert re.search(r"octavo: the CPU's kernels, ready after \d", capsys.readouterr().out)
    main(["compile", tiny, "--load-format", "dummy", "--num-blocks", "7", "--dtype", "float16", "--quiet"])
    assert "nothing to compile: the CPU's kernels are float32" in capsys.readouterr().out
    assert "prepares everything" in fails(capsys, "compile", tiny, "--no-prepare")


@pytest.mark.parametrize(
    "name", ["attention.cpu.c_calls.unsupported_reason", "gemm.cpu.library.compile_failure"]
)
def test_compile_fails_where_kernels_cannot_be_compiled(
    capsys: pytest.CaptureFixture[str], tiny: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As without a compiler, or with a folder that cannot be used; engines would take PyTorch instead."""
    monkeypatch.setattr(f"octavo.{name}", lambda *_: "no C compiler")
    options = ["--load-format", "dummy", "--num-blocks", "7", "--quiet"]
    message = fails(capsys, "compile", tiny, *options, code=3)
    assert "the CPU's kernels cannot be compiled: no C compiler" in message


def test_inspect_shows_the_cache_dtype(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    main(["inspect", tiny, "--load-format", "dummy", "--num-blocks", "7", "--kv-cache-dtype", "fp8"])
    shown = capsys.readouterr().out
    assert "float8_e4m3fn" in shown
    assert " 64 bytes" in shown


def test_bench_ends_with_json(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    main(
        [
            *("bench", "--model", tiny, "--load-format", "dummy", "--num-blocks", "64"),
            *("--num-prompts", "3", "--input-len", "20", "--output-len", "5", "--shared-prefix-len", "16"),
        ]
    )
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["num_prompt_tokens"] == 60
    assert result["num_output_tokens"] == 15
    assert result["num_cached_tokens"] == 32
    assert result["output_tokens_per_s"] > 0


PREFIX_BENCH = (
    *("bench", "prefix", "--device", "cpu", "--batch-sizes", "1", "3", "--context-len", "21"),
    *("--block-size", "4", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "8"),
)


@pytest.fixture
def small_round(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.cli.bench import prefix

    monkeypatch.setattr(prefix, "_ROUND_BYTES", {"cpu": 1 << 16})
    # The times of so small a load are noise.
    monkeypatch.setattr(prefix, "timer", lambda call, device: lambda: 1e-3)


@pytest.mark.usefixtures("small_round")
def test_prefix_bench_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    main([*PREFIX_BENCH])
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["context_len"] == 20
    assert result["impl"] in ("c", "torch")
    points = result["points"]
    assert [(point["batch_size"], point["shared_len"]) for point in points] == [
        (batch_size, shared_len) for batch_size in (1, 3) for shared_len in (0, 4, 8, 12, 16)
    ]
    assert all(point["flat_us"] > 0 and point["forest_us"] > 0 for point in points)
    assert all(point["max_difference"] < 1e-5 for point in points)
    assert [point["bytes_ratio"] for point in points[5:]] == [60 / tokens for tokens in (60, 52, 44, 36, 28)]


def test_prefix_bench_deals_shared_blocks_first() -> None:
    from octavo.cli.bench.prefix import Sweep, make_block_tables
    from octavo.cli.options import PrefixBenchOptions

    sweep = Sweep.decide(PrefixBenchOptions(device="cpu", context_len=20, block_size=4))
    tables = make_block_tables(sweep, 3, 8)
    assert tables.shape == (3, 5)
    assert (tables[:, :2] == tables[0, :2]).all()
    assert sorted({*tables[0, :2].tolist(), *tables[:, 2:].ravel().tolist()}) == list(range(2 + 3 * 3))


@pytest.mark.usefixtures("small_round")
def test_prefix_bench_draws_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    main([*PREFIX_BENCH, "--plot", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "folder" in fails(capsys, *PREFIX_BENCH, "--plot", str(tmp_path / "nowhere" / "curves.png"))
    assert ".png, .svg or .pdf" in fails(capsys, *PREFIX_BENCH, "--plot", str(tmp_path / "curves.txt"))


def test_prefix_bench_refuses_before_it_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "two blocks of 4" in fails(capsys, "bench", "prefix", "--context-len", "7", "--block-size", "4")
    assert "batch-sizes" in fails(capsys, "bench", "prefix", "--batch-sizes", "0")
    assert "multiple of num_kv_heads" in fails(capsys, "bench", "prefix", "--num-heads", "9")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "[plot]" in fails(capsys, *PREFIX_BENCH, "--plot", "curves.png")


def test_environment_and_config_file(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny)
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)
    Path("octavo.toml").write_text("[inspect]\nnum_blocks = 9\n")
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "3")
    main(["inspect", ".", "--load-format", "dummy"])
    assert "9 blocks x 3 tokens" in capsys.readouterr().out
    main(["inspect", ".", "--load-format", "dummy", "--block-size", "4"])
    assert "9 blocks x 4 tokens" in capsys.readouterr().out, "a flag outranks the environment"


def test_seed_is_the_engines(tiny: str) -> None:
    """--seed belongs to the engine, which seeds every request; the sampler's own seed stays unset."""
    from octavo.cli.command_line import app

    _, bound, *_ = app.parse_args(["generate", "a", "--seed", "5"], exit_on_error=False, print_error=False)
    assert bound.arguments["engine"].seed == 5


@pytest.mark.usefixtures("loads_once")
def test_generate_reads_standard_input_and_prints_json(
    typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("One\nTwo\n")
    main(["generate", "--json", "--logprobs", "1", "--temperature", "0", "--max-tokens", "2"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["One", "Two"]
    assert all(len(row["outputs"][0]["logprobs"]) == 2 for row in rows)


@pytest.mark.usefixtures("loads_once")
def test_chat_answers_messages_with_a_summary_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["chat", "What is gravity?", "Why?", "--temperature", "0", "--max-tokens", "8"])
    answered = capsys.readouterr()
    assert "> What is gravity?\nGravity is a fundamental concept" in answered.out
    summaries = answered.err.strip().splitlines()
    assert len(summaries) == 2
    assert "tokens/s" in summaries[0]
    assert "first token after" in summaries[0]
    assert "prefix cache hit 32 of" in summaries[1]


@pytest.mark.usefixtures("loads_once")
def test_interactive_chat(typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    typed("Hi\n/nonsense\n/reset\n\nHi\n/quit\n")
    main(["chat", "--temperature", "0", "--max-tokens", "6"])
    answered = capsys.readouterr()
    assert "unknown command '/nonsense'" in answered.out
    assert len(answered.err.strip().splitlines()) == 2
