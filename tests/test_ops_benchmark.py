"""The benchmark of octavo.ops beside FlashAttention-3, dry: on a CPU, with a peer that stands in."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_flash_attention_3 import SCHEMAS, FakePeer

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def fake_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePeer]:
    import gpu_ops

    peer = FakePeer(can_append=True)
    monkeypatch.setattr(gpu_ops, "graphs_us", lambda calls, *_: [(2.0, 3.0)[i] for i in range(len(calls))])
    monkeypatch.setattr(gpu_ops, "eager_us", lambda *_: (1.0, 2.0))
    with ExitStack() as stack:
        for namespace, schema in SCHEMAS.items():
            library = stack.enter_context(torch.library._scoped_library(namespace, "FRAGMENT"))
            library.define(" ".join(schema.split()))
            name = schema.split("(")[0]
            library.impl(name, getattr(peer, name), "CompositeExplicitAutograd")
        yield peer


_RATES = {"copy": 1e12, "matrix": 1e14}


def tiny_inputs(query_len: int) -> Any:
    from gpu_attention import Workload
    from support.ops_calls import make_inputs

    shortest = 100 if query_len == 1 else None
    kind = "decode" if query_len == 1 else "prefill"
    workload = Workload(f"{kind} tiny", 3, query_len, 256, 4, 2, 32, shortest=shortest)
    return make_inputs(workload, 2, "cpu")


@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("form", ["paged", "append"])
@pytest.mark.parametrize(("can_append", "has_vllm"), [(True, True), (False, True), (False, False)])
def test_decode_rows_agree_with_their_peer(
    fake_peer: FakePeer, form: str, page: int, *, can_append: bool, has_vllm: bool
) -> None:
    import gpu_ops

    fake_peer.can_append, fake_peer.has_vllm = can_append, has_vllm
    row = gpu_ops.measure(form, tiny_inputs(1), page, _RATES, has_peer=True)
    in_call = can_append or form == "paged"
    vllm, pytorch = gpu_ops.APART
    assert row["peer"] == (gpu_ops.PEER if in_call else vllm if has_vllm else pytorch)
    failures = ["fa3: RuntimeError: This flash attention build does not support appending KV."]
    failures += [] if has_vllm else [f"{vllm}: AttributeError: no rotary_embedding"]
    assert row.get("failed") == (None if in_call else "; ".join(failures))
    assert 0 <= row["error"] <= row["tolerance"] < 0.1
    assert not gpu_ops.is_wrong(row)
    assert gpu_ops.ratio(row) == 1.5
    last = fake_peer.calls[-1]
    assert (last["max_seqlen_q"], last["max_seqlen_k"], last["is_causal"]) == (1, 256, True)
    assert (last["window_size_left"], last["window_size_right"], last["num_splits"]) == (-1, -1, 0)
    assert (last["cp_world_size"], last["cp_rank"], last["sm_margin"]) == (1, 0, 0)


@pytest.mark.parametrize(("form", "page"), [("paged", 64), ("dense", 0), ("ragged", 0)])
@pytest.mark.parametrize("query_len", [256, 40])
def test_prefill_rows_agree_with_their_peer(
    fake_peer: FakePeer, form: str, page: int, query_len: int
) -> None:
    import gpu_ops

    row = gpu_ops.measure(form, tiny_inputs(query_len), page, _RATES, has_peer=True)
    assert "failed" not in row
    assert not gpu_ops.is_wrong(row)
    assert fake_peer.calls[-1]["max_seqlen_q"] == query_len


def test_a_wrong_result_is_found(fake_peer: FakePeer) -> None:
    import gpu_ops

    for factor in (1.1, float("nan")):
        fake_peer.factor = factor
        row = gpu_ops.measure("paged", tiny_inputs(1), 16, _RATES, has_peer=True)
        assert gpu_ops.is_wrong(row)
        assert gpu_ops.line(row).endswith(" WRONG")


def test_an_operator_that_appends_nothing_gives_nan() -> None:
    import gpu_ops
    from support.ops_calls import make_pages, octavo_call

    inputs = tiny_inputs(1)
    pages = make_pages(inputs, 16)
    out, _ = gpu_ops.first_call(octavo_call("paged", inputs, pages), "append", pages)
    assert out.isnan().all()


def test_a_row_goes_on_without_a_peer(
    fake_peer: FakePeer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_ops

    def graphs_us(calls: list[Any], *_: Any) -> list[float]:
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return [2.0]

    monkeypatch.setattr(gpu_ops, "graphs_us", graphs_us)
    row = gpu_ops.measure("paged", tiny_inputs(1), 16, _RATES, has_peer=True)
    assert row["octavo_us"] == 2.0
    assert gpu_ops.ratio(row) is None
    assert "timing with fa3: RuntimeError: operation not permitted" in capsys.readouterr().err
    fake_peer.fwd = None  # pyright: ignore[reportAttributeAccessIssue]
    alone = gpu_ops.measure("paged", tiny_inputs(1), 16, _RATES, has_peer=False)
    assert "failed" not in alone
    assert not gpu_ops.is_wrong(alone)


def test_every_cache_has_pages_of_its_own() -> None:
    from support.ops_calls import count_caches, kv_bytes, make_pages

    inputs = tiny_inputs(1)
    for page in (16, 64, 256):
        pages = make_pages(inputs, page)
        ids = torch.cat([each.flatten() for each in pages.tables])
        assert ids.unique().shape == ids.shape
        assert pages.k.shape == (2 * 3 * 256 // page, page, 2, 32)
        for table, slots in zip(pages.tables, pages.slots, strict=True):
            last = inputs.seq_lens.long() - 1
            assert torch.equal(slots // page, table[torch.arange(3), last // page].long())
            assert torch.equal(slots % page, last % page)
    workload = inputs.workload
    assert kv_bytes(workload) == 2 * sum(workload.seq_lens) * 2 * 32 * 2
    assert count_caches(workload, 10 * kv_bytes(workload)) == 30
    assert count_caches(workload, 10**9) == 100


def test_ratios_are_summarised_by_kind_and_form() -> None:
    import gpu_ops

    rows: list[Any] = [
        {"workload": "decode a", "form": "paged", "page": 16, "octavo_us": 2.0, "fa3_us": 4.0},
        {"workload": "decode a", "form": "append", "page": 16, "octavo_us": 2.0, "fa3_us": 1.0},
        {"workload": "extend a", "form": "dense", "page": 0, "octavo_us": 2.0, "fa3_us": 2.0},
        {"workload": "decode a", "form": "paged", "page": 64, "octavo_us": 2.0},
    ]
    summary = gpu_ops.summarise(rows)
    assert summary["decode"] == {
        "rows": 2,
        "geometric_mean": pytest.approx(1.0),
        "least": 0.5,
        "least_at": "decode a append 16",
    }
    assert summary["decode paged"]["geometric_mean"] == pytest.approx(2.0)
    assert summary["prefill"]["least"] == 1.0
    assert gpu_ops.line(rows[3]).count("-") >= 1
    assert gpu_ops.line(rows[0]).count("|") == len(gpu_ops.COLUMNS) + 1


def test_page_sizes_are_read() -> None:
    import gpu_ops

    assert gpu_ops.parse_pages("16,64,256") == [16, 64, 256]
    for text, message in (("48", "must divide"), ("0", "must divide"), ("16,x", "invalid"), ("", "invalid")):
        with pytest.raises(ValueError, match=message):
            gpu_ops.parse_pages(text)
    rows = {workload.name: rows for workload, rows in gpu_ops.plan("", [16, 64])}
    assert len(rows) == len(gpu_ops.WORKLOADS)
    assert rows["decode 1x512 16/8"] == [("paged", 16), ("paged", 64), ("append", 16), ("append", 64)]
    assert rows["prefill 1x8192 32/8"] == [("paged", 16), ("paged", 64), ("dense", 0), ("ragged", 0)]
    # Without pages every key counts.
    for workload, todo in gpu_ops.plan("", [16]):
        assert ("dense", 0) not in todo or workload.seq_len % gpu_ops.LARGEST_PAGE == 0


def test_the_peer_is_found_without_importing_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peers.flash_attention_3 import find_flash_attention_3

    (tmp_path / "vllm" / "vllm_flash_attn").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="_vllm_fa3_C"):
        find_flash_attention_3()
    path = tmp_path / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    path.touch()
    assert find_flash_attention_3() == path


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_run_ends_with_its_json_and_fails_on_wrong_results(
    fake_peer: FakePeer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    import gpu_ops
    from support.ops_calls import make_inputs

    fake_peer.factor = factor
    workload = tiny_inputs(1).workload
    monkeypatch.setattr(gpu_ops, "WORKLOADS", (workload,))
    monkeypatch.setattr(gpu_ops, "make_inputs", lambda workload, num, _: make_inputs(workload, num, "cpu"))
    monkeypatch.setattr(gpu_ops, "load_peer", lambda path: None)
    for name in ("copy_rate", "matrix_rate"):
        monkeypatch.setattr(gpu_ops, name, lambda: 1e12)
    properties = type("Properties", (), {"L2_cache_size": 1000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    arguments = ["gpu_ops.py", "--fa3", "auto", "--page", "16,64", "--commit", "abc"]
    monkeypatch.setattr("sys.argv", arguments)
    assert gpu_ops.main() == (0 if factor == 1 else 1)
    printed = capsys.readouterr().out.splitlines()
    report = json.loads(printed[-1])
    assert [(row["form"], row["page"]) for row in report["results"]] == [
        *(("paged", 16), ("paged", 64)),
        *(("append", 16), ("append", 64)),
    ]
    assert report["wrong"] == (0 if factor == 1 else 4)
    assert report["summary"]["decode"]["geometric_mean"] == pytest.approx(1.5)
    assert sum(line.startswith("| decode tiny |") for line in printed) == 4
