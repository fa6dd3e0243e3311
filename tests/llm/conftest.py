"""The real model, loaded once per test process, and small dummy models."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llm_helpers import assert_drained
from tiny_model import TINY_LLAMA

from octavo import LLM

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_greedy_fp32.json"
TINY_OPTIONS = {"num_blocks": 64, "block_size": 4, "prepare": False}


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    """Greedy float32 completions of the embedded model by Hugging Face transformers."""
    return json.loads(GOLDEN.read_text())["rows"]


@pytest.fixture(scope="session")
def smollm2() -> LLM:
    """As users have it: on a CPU in the blocks of its file."""
    return LLM("smollm2", num_blocks=1024)


@pytest.fixture(scope="session")
def exact() -> LLM:
    """The same model in float32, the reference's arithmetic."""
    return LLM("smollm2", dtype="float32", quantization="none", num_blocks=1024)


@pytest.fixture
def idle(smollm2: LLM) -> Iterator[LLM]:
    """The real model with an empty prefix cache; afterwards the pool must be back to full."""
    smollm2.reset_prefix_cache()
    yield smollm2
    assert_drained(smollm2)


@pytest.fixture
def idle_exact(exact: LLM) -> Iterator[LLM]:
    """Likewise in float32."""
    exact.reset_prefix_cache()
    yield exact
    assert_drained(exact)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., LLM]:
    """Make a tiny random model with the given engine options; on a GPU graphs are captured on first use."""

    def make(config: dict | None = None, **options: object) -> LLM:
        (tmp_path / "config.json").write_text(json.dumps({**TINY_LLAMA, **(config or {})}))
        return LLM(str(tmp_path), load_format="dummy", **{**TINY_OPTIONS, **options})

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: LLM) -> Path:
    """A tiny random model with a real tokenizer, and logits that are wider than it."""
    folder = tmp_path_factory.mktemp("structured")
    assert smollm2.engine.tokenizer is not None
    (folder / "tokenizer.json").write_text(smollm2.engine.tokenizer._backend.to_str())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "config.json").write_text(
        json.dumps({**TINY_LLAMA, "vocab_size": 49152 + 70, "max_position_embeddings": 2048})
    )
    return folder


@pytest.fixture(scope="module")
def make(folder: Path) -> Callable[..., LLM]:
    def make(**options: object) -> LLM:
        options = {"num_blocks": 512, "block_size": 4, "prepare": False, **options}
        return LLM(str(folder), load_format="dummy", **options)

    return make


@pytest.fixture(scope="module")
def random_model(make: Callable[..., LLM]) -> LLM:
    return make()
