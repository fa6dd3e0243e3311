"""The process of the peer, with a package that looks like vLLM 0.26: its names and arguments."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
FAKE = {
    "__init__.py": """
        __version__ = "0.26.0"
        import json, pathlib
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import SamplingParams
        from types import SimpleNamespace
        class LLM:
            def __init__(self, model, *, skip_tokenizer_init, dtype, gpu_memory_utilization, load_format,
                         max_model_len, kv_cache_dtype, quantization, disable_log_stats,
                         tensor_parallel_size):
                assert tensor_parallel_size == 1
                assert quantization == "fp8"
                fields = json.loads((pathlib.Path(model) / "config.json").read_text())
                assert (fields["hidden_size"], fields["bos_token_id"]) == (4096, 7)
                self.resets = [False, True, True, True]
                weights = type("Fp8Config", (), {})()
                self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(quant_config=weights))
            def reset_prefix_cache(self):
                return self.resets.pop(0)
            def generate(self, prompts, params, *, use_tqdm):
                return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * p.max_tokens)] * p.n)
                        for _, p in zip(prompts, params, strict=True)]
        """,
    "inputs.py": "class TokensPrompt(dict): pass",
    "sampling_params.py": """
        import enum
        from types import SimpleNamespace
        class RequestOutputKind(enum.Enum):
            DELTA = 1
        def SamplingParams(*, temperature, max_tokens, ignore_eos, detokenize, n=1, output_kind=None):
            return SimpleNamespace(max_tokens=max_tokens, n=n)
        """,
    "engine/arg_utils.py": """
        def AsyncEngineArgs(*, model, load_format, skip_tokenizer_init, dtype, max_model_len,
                            gpu_memory_utilization, kv_cache_dtype, quantization, disable_log_stats,
                            tensor_parallel_size):
            assert quantization is None
            import json, pathlib
            return json.loads((pathlib.Path(model) / "config.json").read_text())
        """,
    "usage/usage_lib.py": """
        import enum
        class UsageContext(enum.Enum):
            OPENAI_API_SERVER = 1
        """,
    "v1/engine/async_llm.py": """
        import asyncio
        from types import SimpleNamespace
        class AsyncLLM:
            @classmethod
            def from_engine_args(cls, engine_args, *, usage_context):
                assert engine_args["architectures"] == ["Qwen3ForCausalLM"]
                print("a log that is no JSON")
                return cls()
            async def get_supported_tasks(self):
                return ("generate",)
            async def reset_prefix_cache(self):
                return True
            async def generate(self, prompt, sampling_params, request_id):
                assert list(prompt) == ["prompt_token_ids"]
                left = sampling_params.max_tokens
                while left:
                    await asyncio.sleep(0.002)
                    num = min(left, 3)
                    left -= num
                    yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * num)])
        """,
}


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also checks that the process leaves no files behind."""
    for name, text in FAKE.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("fake_vllm")
def test_open_loop() -> None:
    from peers.vllm_serving import measure_in_child

    settings = {"model": "0.6b", "rate": 60, "seconds": 0.5, "seed": 1, "repeat": 2}
    settings |= {"prompt_len": [1, 9], "output_len": [1, 9]}
    figures = measure_in_child("open_loop", settings, 60)
    assert figures is not None
    assert figures["version"] == "0.26.0"
    assert figures["process_ready_s"] > figures["ready_s"]
    assert len(figures["runs"]) == 2
    for run in figures["runs"]:
        assert run["requests"] > 10
        assert run["steps"] is None
        assert run["ttft_ms"]["p50"] > 2
        assert run["inter_token_ms"]["p50"] == 0


@pytest.mark.usefixtures("fake_vllm")
def test_offline() -> None:
    from peers.vllm_serving import measure_in_child

    settings = {"model": "8b", "kv_cache_dtype": "fp8", "runs": 3, "workloads": ["single"]}
    settings |= {"quantization": "fp8", "fields": {"bos_token_id": 7}}
    figures = measure_in_child("offline", settings, 60)
    assert figures is not None
    assert figures["weights"] == "Fp8Config"
    single = figures["results"]["single"]
    assert len(single["seconds"]) == 3
    assert single["rate"] >= single["median_rate"] > 0


def test_without_vllm_there_are_no_figures_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from peers import vllm_serving

    assert vllm_serving.measure_in_child("offline", {}, 60) is None
    assert "vLLM was not measured" in capsys.readouterr().err
