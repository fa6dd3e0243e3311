"""The engine on a GPU: graph = eager, GPU float32 = CPU float32, on a tiny random model."""

import pytest
import torch
from llm_helpers import assert_drained

from octavo import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PROMPTS = [
    [i % 101 for i in range(start, start + length)] for start, length in ((3, 1), (5, 4), (9, 17), (3, 40))
]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def tokens(llm: object, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]  # type: ignore[attr-defined]
    assert_drained(llm)  # type: ignore[arg-type]
    return outputs


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_gpu_float32_gives_the_cpus_tokens(tiny: object, block_size: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    options = {"dtype": "float32", "num_blocks": 1024 // block_size, "block_size": block_size}
    expected = tokens(tiny(device="cpu", **options))  # type: ignore[operator]
    assert tokens(tiny(device="cuda", **options)) == expected  # type: ignore[operator]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_graph_equals_eager(tiny: object, kv_cache_dtype: str) -> None:
    options = {"device": "cuda", "dtype": "bfloat16", "num_blocks": 256, "kv_cache_dtype": kv_cache_dtype}
    llm = tiny(**options)  # type: ignore[operator]
    params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True, temperature=0.8, top_p=0.9)
    with_graphs = tokens(llm), tokens(llm, params)
    assert llm.engine.runner.graphs is not None
    llm.engine.runner.graphs = None
    llm.engine.runner._plan = lambda step_input: None
    assert (tokens(llm), tokens(llm, params)) == with_graphs


def test_preempted_equals_undisturbed(tiny: object) -> None:
    expected = tokens(tiny(device="cuda", dtype="float32"))  # type: ignore[operator]
    llm = tiny(device="cuda", dtype="float32", num_blocks=19)  # type: ignore[operator]
    assert tokens(llm) == expected
