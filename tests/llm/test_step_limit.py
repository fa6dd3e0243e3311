"""max_step_ms in a whole engine: tokens stay what they are, prompts come in smaller chunks."""

from collections.abc import Callable

import pytest
from llm_helpers import assert_drained

from octavo import LLM, SamplingParams
from octavo.engine.step.pace import StepTime, StepWork
from octavo.engine.step.result import StepResult

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
READER = [3, 1, 4]
LONG = [[(7 * i + number) % 100 for i in range(100)] for number in range(3)]
OPTIONS = {"num_blocks": 400, "max_num_batched_tokens": 80}


def chunks_beside_a_stream(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Returns all requests' tokens, and the prompt tokens of every step from the stream's second token on."""
    launched: list[int] = []
    runner = llm.engine.runner
    launch = runner.launch

    def noting(step: object) -> Callable[[], StepResult]:
        launched.append(step.work.num_prompt_tokens)  # type: ignore[attr-defined]
        return launch(step)  # type: ignore[arg-type]

    runner.launch = noting  # type: ignore[method-assign]
    outputs = [llm.engine.add_request(READER, PARAMS)]
    for _ in range(12):
        llm.engine.step()
    launched.clear()
    outputs += [llm.engine.add_request(prompt, PARAMS) for prompt in LONG]
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert_drained(llm)
    return [output.outputs[0].token_ids for output in outputs], launched


@pytest.mark.parametrize("max_step_ms", [0.001, 1e6])
def test_a_limit_changes_chunks_and_no_token(
    tiny: Callable[..., LLM], max_step_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = StepTime.learn

    def learn_without_noise(self: StepTime, work: StepWork, seconds: float) -> None:
        learn(self, work, 1e-3 + 1e-5 * work.num_prompt_tokens)

    monkeypatch.setattr(StepTime, "learn", learn_without_noise)
    expected, whole = chunks_beside_a_stream(tiny(**OPTIONS))
    tokens, chunks = chunks_beside_a_stream(tiny(max_step_ms=max_step_ms, **OPTIONS))
    assert tokens == expected
    assert max(whole) == 79, "one of the budget decodes"
    if max_step_ms < 1:
        assert max(chunks) == 64, "so many go on whatever the limit is"
    else:
        assert max(chunks) >= 78, "two decode"
    assert sum(chunks) == sum(whole) == 300
