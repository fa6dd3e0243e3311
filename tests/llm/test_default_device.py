"""An engine on a CPU works whatever default device of PyTorch other code in the process has set."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from llm_cases import GREEDY, OPTIONS, PROMPTS, MakeLLM, answers, ids
from structured_cases import KINDS

from octavo import CompletionDelta, SamplingParams


@contextmanager
def set_default_device() -> Iterator[None]:
    # What is made without a device has no memory there.
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


Surrounding = Callable[[], AbstractContextManager[object]]
SURROUNDINGS: dict[str, Surrounding] = {
    "set_default_device": set_default_device,
    "context": lambda: torch.device("meta"),
}


@pytest.fixture(params=SURROUNDINGS)
def surrounding(request: pytest.FixtureRequest) -> Surrounding:
    return SURROUNDINGS[request.param]


def streamed(stream: Iterable[CompletionDelta]) -> list[int]:
    return [token for delta in stream for token in delta.token_ids]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_the_same(tiny: MakeLLM, surrounding: Surrounding, options: dict[str, object]) -> None:
    usual = tiny(device="cpu", **options)
    expected = answers(usual)
    with surrounding():
        loaded = tiny(device="cpu", **options)
        assert answers(loaded) == expected
        assert answers(usual) == expected
        assert torch.empty(1).device.type == "meta", "the program's own default device is gone"
    assert answers(loaded) == expected


def test_scores_and_streams_are_the_same(tiny: MakeLLM, surrounding: Surrounding) -> None:
    llm = tiny(device="cpu")
    scores, tokens = llm.score([1, 2, 3], [[4, 5], [6]]), streamed(llm.stream([1], GREEDY))
    assert len(tokens) == 12
    with surrounding():
        assert llm.score([1, 2, 3], [[4, 5], [6]]) == scores
        assert streamed(llm.stream([1], GREEDY)) == tokens


def test_structured_outputs_are_the_same(make: MakeLLM, surrounding: Surrounding) -> None:
    params = SamplingParams(max_tokens=30, seed=3, n=2, structured=KINDS["regex"])
    expected = ids(make(device="cpu").generate(PROMPTS, params))
    with surrounding():
        assert ids(make(device="cpu").generate(PROMPTS, params)) == expected


def test_a_request_starts_over_after_a_broken_step(
    tiny: MakeLLM, surrounding: Surrounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny(device="cpu")
    expected = ids(llm.generate(PROMPTS, GREEDY))
    launch, num_steps = llm.engine.runner.launch, 0

    def interrupted(step):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        return launch(step)

    monkeypatch.setattr(llm.engine.runner, "launch", interrupted)
    with surrounding():
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([7, 8, 9], GREEDY)
        tokens = [streamed(stream) for stream in streams]
    assert tokens == expected
    assert num_steps > 3
