"""The arithmetic behind benchmark figures: a wrong bound makes every fraction of it wrong."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from octavo.models import ModelConfig, parameter_shapes

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def benchmarks_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def prefixes(prompts: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_counts_every_distinct_prefix_once(seed: int) -> None:
    """Prompts of two letters share prefixes at every depth, and end at different times."""
    from support import gpu_bound
    from support.gpu_workloads import Workload

    rng = Random(seed)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 20))]
    max_tokens = [rng.randint(1, 5) for _ in prompts]
    workload = Workload(prompts, max_tokens, n=rng.randint(1, 3))
    bandwidth, flops = 1e12, 1e13  # from 10 sequences on GEMMs are bound by operations
    _, layers, heads, _ = gpu_bound.SHAPES["0.6b"]
    weights, head = gpu_bound.num_weights("0.6b")
    num_keys = sum(len(prefix) - 0.5 for prefix in prefixes(prompts))
    expected = (2 * weights * len(prefixes(prompts)) + 4 * layers * heads * 128 * num_keys) / flops
    for step in range(1, max(max_tokens)):
        live = [prompt for prompt, num in zip(prompts, max_tokens, strict=True) if num > step]
        num_tokens = len(prefixes(live)) + workload.n * len(live) * step
        expected += (gpu_bound.step_bytes("0.6b", num_tokens) - 2 * (weights + head)) / bandwidth
        operations = 2 * (weights + head) * workload.n * len(live)
        expected += max(2 * (weights + head) / bandwidth, operations / flops)
    assert gpu_bound.bound_s("0.6b", workload, bandwidth, flops, 2) == pytest.approx(expected, rel=1e-9)


def test_bounds_know_the_weights_of_the_models() -> None:
    from support import gpu_bound
    from support.model_folder import model_config

    for size in gpu_bound.SHAPES:
        config = ModelConfig.from_hf(model_config(size))
        shapes = parameter_shapes(config)
        found = sum(
            math.prod(shape)
            for name, shape in shapes.items()
            if name.startswith("model.layers") and len(shape) == 2
        )
        weights, head = gpu_bound.num_weights(size, num_tokens=10**6)
        assert (weights, head) == (found, math.prod(shapes["model.embed_tokens.weight"]))


def test_a_window_bounds_the_keys_that_a_step_reads() -> None:
    """Half of gpt-oss's layers read 128 keys of a sequence, and its experts are 4 bits and a scale."""
    from support import gpu_bound

    size, kv_bytes = "gpt-oss-20b", 24 * 2 * 8 * 64 * 2
    short, long = (gpu_bound.step_bytes(size, num, num_tokens=2) for num in (200, 2000))
    assert long - short == kv_bytes * ((2000 + 256) / 2 - 200)
    experts = gpu_bound.num_expert_weights(size, 2)
    dense = sum(gpu_bound.num_weights(size, 2)) - experts
    assert short == pytest.approx(2 * dense + experts * 17 / 32 + 200 * kv_bytes)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*gpu_serving*.json")), ids=lambda path: path.name
)
def test_every_result_file_can_be_drawn(path: Path) -> None:
    from plot_gpu import bars, unit
    from support.gpu_bound import EXPERTS

    report = json.loads(path.read_text())
    for workload, result in report["results"].items():
        rates = bars(report, workload)
        assert rates["Octavo"] > 0
        bound_is_larger = rates["physical bound"] > rates["Octavo"]
        if report["model"] in EXPERTS and workload == "shared":
            # The bound takes experts as chosen evenly; tokens after the same prefix choose less evenly.
            continue
        assert bound_is_larger == (unit(workload, result) == "tokens/s"), workload


# What a file says of a run and its machine.
RATES = {"model": "0.6b", "kv_cache_dtype": "auto", "copy_bytes_per_s": 4e12, "matrix_flops": 8e14}


def bound_rate(name: str) -> float:
    from support.gpu_bound import bound_s
    from support.gpu_workloads import WORKLOADS

    return WORKLOADS[name]().rate(bound_s("0.6b", WORKLOADS[name](), 4e12, 8e14, 2))


def test_bars_show_what_the_file_holds() -> None:
    from plot_gpu import bars

    result = {"unit": "tokens/s", "rate": 50.0, "seconds": [3.0, 2.0], "bound_s": 1.0}
    peers = {"hf": {"rate": 5.0, "note": ""}, "unshared": {"rate": 20.0, "seconds": [5.0]}}
    report = {**RATES, "results": {"nano": result | peers, "rag": result}}
    assert bars(report, "nano") == {
        "Octavo": 50.0,
        "Octavo, sharing off": 20.0,
        "HF transformers": 5.0,
        "vLLM 0.26 (recorded)": 23330,
        "physical bound": bound_rate("nano"),
    }
    assert bars(report, "rag") == {"Octavo": 50.0, "physical bound": bound_rate("rag")}


def test_vllm_of_the_same_run_replaces_what_was_recorded() -> None:
    from plot_gpu import bars

    result = {"unit": "tokens/s", "rate": 50.0, "seconds": [2.0], "bound_s": 1.0, "vllm": {"rate": 40.0}}
    report = {**RATES, "results": {"nano": result}}
    assert bars(report, "nano") == {"Octavo": 50.0, "vLLM": 40.0, "physical bound": bound_rate("nano")}


def test_the_table_says_whether_vllm_ran_beside(capsys: pytest.CaptureFixture[str]) -> None:
    from gpu_serving import print_report
    from support.gpu_workloads import Workload, run_figures

    workload = Workload([[1]], [100])
    octavo, vllm = run_figures(workload, [4.0, 1.0, 2.0]), run_figures(workload, [5.0, 2.0, 2.5])
    assert (octavo["rate"], octavo["first_rate"], octavo["median_rate"]) == (100.0, 25.0, 50.0)
    result = {**octavo, "unit": "tokens/s", "bound_s": 0.5, "hf": None, "vllm_recorded": 7}
    report = {"model": "0.6b", "sharing": "on", "peer": None, "runs": 3, "ready_s": [1.0], "startup": None}
    print_report({**report, "vllm_version": "0.26.0", "results": {"nano": {**result, "vllm": vllm}}})
    printed = capsys.readouterr().out
    assert "vLLM 0.26.0, same run: best (first)" in printed
    assert "| nano | 100.0 (25.0) tokens/s | 50% | 50.0 (20.0) |" in printed
    print_report({**report, "vllm_version": None, "results": {"nano": {**result, "vllm": None}}})
    printed = capsys.readouterr().out
    assert "vLLM 0.26 (recorded)" in printed
    assert "| nano | 100.0 (25.0) tokens/s | 50% | 7 |" in printed


def test_a_digest_follows_the_packages_sources(tmp_path: Path) -> None:
    from support.common import sources

    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "inner" / "b.c").write_text("2")
    first = sources(tmp_path)
    assert re.fullmatch("[0-9a-f]{16}", first)
    (tmp_path / "notes.txt").write_text("not a source")
    assert sources(tmp_path) == first
    (tmp_path / "inner" / "b.c").write_text("3")
    changed = sources(tmp_path)
    assert changed != first
    (tmp_path / "inner" / "b.c").rename(tmp_path / "b.c")
    assert sources(tmp_path) not in (first, changed)


def test_git_names_the_commit_of_its_own_top_level_only(tmp_path: Path) -> None:
    from support.common import commit

    def git(*arguments: str) -> None:
        options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *options, *arguments], cwd=tmp_path, check=True, capture_output=True)

    copy = tmp_path / "copy"
    (copy / "octavo").mkdir(parents=True)
    (tmp_path / "octavo").mkdir()
    assert commit(tmp_path) == "unknown"
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    assert re.fullmatch("[0-9a-f]{7,}", commit(tmp_path))
    assert commit(copy) == "unknown"
    (tmp_path / "octavo" / "new.py").touch()
    assert commit(tmp_path).endswith("-dirty")


def test_a_commit_that_is_given_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from support import common

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    arguments = common.make_parser(None).parse_args(["--save", "box", "--commit", "abc1234"])
    common.publish("name", {"figure": 1}, arguments)
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"[\d-]{10}-box-abc1234-name\.json", file.name)
    report = json.loads(file.read_text())
    assert report == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["machine"]["commit"] == "abc1234"
    assert report["machine"]["sources"] == common.sources(ROOT / "octavo")


def test_every_script_that_publishes_takes_the_common_options() -> None:
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text()
        if "publish(" in text:
            assert "make_parser(" in text, path.name


def test_answers_are_compared_up_to_their_first_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    import prefix_accuracy

    monkeypatch.setattr(prefix_accuracy, "OUTPUT_LEN", 4)
    expected = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    got = [[1, 2, 3, 4], [1, 9, 3, 4], [1, 2, 3, 9]]
    divergences = prefix_accuracy.find_divergences(expected, got)
    assert divergences == [{"row": 1, "position": 1}, {"row": 2, "position": 3}]
    figures = prefix_accuracy.agreement([{**d, "margin": 0.5 * d["position"]} for d in divergences], 3)
    assert figures["equal_tokens"] == (4 + 1 + 3) / 12
    assert figures["equal_answers"] == pytest.approx(1 / 3)
    assert figures["margin_largest_at_a_difference"] == 1.5


def test_a_models_folder_goes_with_the_process_that_made_it(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from support.model_folder import model_folder
folder = Path(model_folder("tiny"))
child = os.fork()
if child == 0:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert (folder / "config.json").is_file(), "the child removed it"
assert len(os.listdir(os.environ["TMPDIR"])) == 1
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "benchmarks")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


def test_levels_of_a_cascade_hold_each_sequences_blocks_in_order() -> None:
    """Through FlashInfer's arrays every query finds its block table's row, level by level."""
    import torch
    from peers.flashinfer import Problem, make_levels
    from support.forest_workloads import BLOCK_SIZE, WORKLOADS, make_block_tables

    for workload in WORKLOADS:
        block_tables = make_block_tables(workload)
        q = torch.empty(workload.batch, workload.heads, 128)
        cache = torch.empty(1, workload.kv_heads, BLOCK_SIZE, 128)
        levels = make_levels(Problem(q, [(cache, cache)], block_tables, workload.levels, 1.0))
        assert [len(level.last_block_len) for level in levels] == [count for count, _ in workload.levels]
        for query in range(workload.batch):
            found = []
            for level in levels:
                node = int(torch.searchsorted(level.cu_queries, query, right=True)) - 1
                found += level.blocks[level.cu_blocks[node] : level.cu_blocks[node + 1]].tolist()
            assert found == block_tables[query].tolist()


def test_scripts_import_no_script_that_imports_them() -> None:
    """A circle of imports works or fails by which script is run."""
    folder = ROOT / "benchmarks"
    imports = {path.stem: _imported(path) for path in folder.glob("*.py")}
    for script, seen in imports.items():
        reached, todo = set[str](), [name for name in seen if name in imports]
        while todo:
            name = todo.pop()
            if name not in reached:
                reached.add(name)
                todo += [other for other in imports[name] if other in imports]
        assert script not in reached, script


def _imported(path: Path) -> list[str]:
    """First names of all modules that a file imports, anywhere in it."""
    return re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
