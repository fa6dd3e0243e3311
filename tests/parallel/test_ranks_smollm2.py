"""The real model on three ranks: slices of a quantised file, grammars, chats."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks_helpers import other_ranks

from octavo import LLM, SamplingParams, StructuredOutput
from octavo.errors import ConfigError

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_greedy_fp32.json"


@pytest.fixture(scope="module")
def three() -> Iterator[LLM]:
    exact = {"dtype": "float32", "quantization": "none"}
    llm = LLM("smollm2", **exact, device="cpu", num_blocks=64, tensor_parallel_size=3)
    yield llm
    llm.engine.close()


def test_the_reference_tokens(three: LLM) -> None:
    """The first prompts, and the first tokens of each."""
    rows = json.loads(GOLDEN.read_text())["rows"][:3]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = three.generate([row["prompt_ids"] for row in rows], params)
    assert [o.outputs[0].token_ids for o in outputs] == [row["output_ids"][:4] for row in rows]
    assert len(other_ranks()) == 2


def test_grammars_that_one_rank_follows(three: LLM) -> None:
    date = r"[0-9]{4}-[01][0-9]-[0-3][0-9]"
    params = [
        SamplingParams(seed=1, n=2, max_tokens=40, structured=StructuredOutput(regex=date)),
        SamplingParams(seed=2, max_tokens=8),
        SamplingParams(seed=3, max_tokens=40, structured=StructuredOutput(choice=["yes", "no"]), logprobs=1),
    ]
    dates, _, choice = three.generate(["When?", "Hello", "Is it so?"], params)
    assert all(re.fullmatch(date, completion.text) for completion in dates.outputs)
    assert choice.outputs[0].text in ("yes", "no")


def test_nine_heads_are_not_for_two_ranks() -> None:
    with pytest.raises(ConfigError, match="2 ranks must divide the model's 9 attention heads"):
        LLM("smollm2", tensor_parallel_size=2, device="cpu")
