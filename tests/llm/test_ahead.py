"""The engine one step ahead of its device, played by a runner that keeps the newest token to itself."""

import time
from collections.abc import Callable

import pytest
from llm_helpers import assert_drained

from octavo import LLM, SamplingParams
from octavo.attention.plan.prefix_forest import Sharing
from octavo.engine.model_runner import ModelRunner
from octavo.engine.prompt_reader import Prompt, TokenIds
from octavo.engine.request import Request
from octavo.engine.step.pace import StepTime
from octavo.engine.step.result import LateWork, PrepareProgress, StepResult
from octavo.engine.step.scheduled import SchedulerOutput
from octavo.errors import EngineError, PromptError

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5, 8], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]]
MakeLLM = Callable[..., LLM]


class AheadRunner:
    """Computes a step when it is launched; the host gets to know the outcome when it waits."""

    runs_ahead = True

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.decoder, self.kv_cache = inner.decoder, inner.kv_cache
        self.newest: dict[Request, int] = {}
        self.num_launched = self.num_waited = self.most_in_flight = 0
        self.fails_at = -1
        self.fails_in_launch = self.is_fast = False

    def prepare(self, progress: PrepareProgress) -> None:
        self.inner.prepare(progress)

    def note_ready(self) -> None:
        self.inner.note_ready()

    def close(self) -> None:
        self.inner.close()

    def sharing(self) -> Sharing:
        return self.inner.sharing()

    def late_work(self) -> LateWork:
        return self.inner.late_work()

    def launch(self, step: SchedulerOutput) -> Callable[[], StepResult]:
        ahead = [item.request for item in step.scheduled if item.end > len(item.request.token_ids)]
        for request in ahead:
            request.token_ids.append(self.newest[request])
        result = self.inner.launch(step)()
        for request in ahead:
            request.token_ids.pop()
        self.newest.update({request: token.token_id for request, token in result.sampled.items()})
        self.num_launched += 1
        self.most_in_flight = max(self.most_in_flight, self.num_launched - self.num_waited)
        fails = self.num_launched == self.fails_at
        if fails:
            self.kv_cache.data.normal_()
            if self.fails_in_launch:
                raise RuntimeError("device fell off")

        def wait() -> StepResult:
            self.num_waited += 1
            if fails:
                raise RuntimeError("device fell off")
            return result

        return wait

    def has_finished(self) -> bool:
        return self.is_fast or self.num_waited == self.num_launched

    def release(self, request: Request) -> None:
        self.inner.release(request)

    def reset(self) -> None:
        self.newest.clear()
        self.inner.reset()


def ahead(llm: LLM) -> tuple[LLM, AheadRunner]:
    assert isinstance(llm.engine.runner, ModelRunner)
    runner = llm.engine.runner = AheadRunner(llm.engine.runner)
    llm.engine._reset_state()
    return llm, runner


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=25, ignore_eos=True),
        SamplingParams(seed=3, max_tokens=25, top_k=20, n=3),
        SamplingParams(seed=3, max_tokens=9, stop_token_ids=list(range(0, 100, 7))),
        SamplingParams(seed=3, max_tokens=9, logprobs=2, presence_penalty=0.5, min_tokens=4),
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1),
    ],
    ids=["greedy", "forks", "stop tokens", "penalties", "prompt logprobs"],
)
@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 11}, {"max_num_batched_tokens": 5}, {"max_num_seqs": 2}], ids=str
)
def test_outputs_are_those_of_an_engine_that_waits(
    tiny: MakeLLM, params: SamplingParams, options: dict[str, int]
) -> None:
    expected = tiny(**options).generate(PROMPTS, params)
    llm, runner = ahead(tiny(**options))
    outputs = llm.generate(PROMPTS, params)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [
        [c.token_ids for c in o.outputs] for o in expected
    ]
    assert [[c.logprobs for c in o.outputs] for o in outputs] == [
        [c.logprobs for c in o.outputs] for o in expected
    ]
    assert [o.prompt_logprobs for o in outputs] == [o.prompt_logprobs for o in expected]
    if params.max_tokens != 1:
        assert runner.most_in_flight == 2, "the engine never ran ahead"
    assert_drained(llm)


def test_requests_of_both_kinds_together(tiny: MakeLLM) -> None:
    params = [
        SamplingParams(seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(seed=2, max_tokens=5, logprobs=1, ignore_eos=True),
    ] * 2
    expected = tiny().generate(PROMPTS, params)
    llm, _ = ahead(tiny())
    outputs = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


def test_a_guess_that_is_wrong_by_far_delays_nobody_for_long(
    tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine looks now and then whether the device is done, and does not sleep on when it is."""
    llm, runner = ahead(tiny())
    llm.engine.add_request(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True))
    llm.engine.step()
    monkeypatch.setattr(StepTime, "seconds", lambda self, work: 100.0)
    assert 0 < llm.engine.spare_s <= 0.01
    runner.is_fast = True
    assert llm.engine.spare_s == 0.0
    begun_at = time.perf_counter()
    llm.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))
    assert time.perf_counter() - begun_at < 10


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_an_abort_while_steps_are_under_way(tiny: MakeLLM, num_steps: int) -> None:
    llm, _ = ahead(tiny())
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = [llm.engine.add_request(prompt, params) for prompt in PROMPTS]
    for _ in range(num_steps):
        llm.engine.step()
    for output in outputs[1:]:
        llm.engine.abort(output.request_id)
    aborted = [output.outputs[0].token_ids.copy() for output in outputs[1:]]
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert [output.outputs[0].token_ids for output in outputs[1:]] == aborted
    assert len(outputs[0].outputs[0].token_ids) == 20
    assert_drained(llm)


def test_a_step_that_fails_late_ends_only_its_requests(tiny: MakeLLM) -> None:
    llm, runner = ahead(tiny())
    runner.fails_at = 3
    with pytest.raises(EngineError, match="device fell off"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    assert_drained(llm)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    assert all(len(output.outputs[0].token_ids) == 20 for output in outputs)


@pytest.mark.parametrize("in_launch", [True, False], ids=["launch", "wait"])
@pytest.mark.parametrize(("budget", "num_failed"), [(64, 3), (44, 2), (40, 1)])
def test_no_token_comes_from_blocks_that_a_failed_step_shared(
    tiny: MakeLLM, budget: int, num_failed: int, in_launch: bool
) -> None:
    """Equal prompts attach to the first one's blocks in its own step, or in the one launched after it."""
    prompt, params = list(range(3, 43)), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = tiny().generate(prompt, params)[0].outputs[0].token_ids
    llm, runner = ahead(tiny(max_num_batched_tokens=budget))
    runner.fails_at, runner.fails_in_launch = 1, in_launch
    outputs = llm.generate([prompt] * 3, params, on_error="return")
    assert [output.error is None for output in outputs] == [False] * num_failed + [True] * (3 - num_failed)
    assert_drained(llm)
    for output in outputs[num_failed:] + llm.generate([prompt] * 2, params):
        assert output.outputs[0].token_ids == expected
    assert_drained(llm)


def test_a_step_that_cannot_be_launched_keeps_the_tokens_of_the_one_before(tiny: MakeLLM) -> None:
    llm, runner = ahead(tiny())
    runner.fails_at, runner.fails_in_launch = 3, True
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    output = llm.generate(PROMPTS[0], params, on_error="return")[0]
    assert isinstance(output.error, EngineError)
    assert output.outputs[0].token_ids == tiny().generate(PROMPTS[0], params)[0].outputs[0].token_ids[:2]
    assert_drained(llm)


def test_a_device_gets_steps_while_prompts_are_read(tiny: MakeLLM) -> None:
    """The first when 64 are read, the next one when there are twice as many."""
    prompts = [[1 + i % 50, 2 + i % 7, 3] for i in range(150)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in tiny().generate(prompts, params)]
    llm, runner = ahead(tiny())
    read, begun = llm.engine.prompts.read, []

    def watched_read(prompt: Prompt | TokenIds) -> TokenIds:
        begun.append(runner.num_launched)
        return read(prompt)

    llm.engine.prompts.read = watched_read  # type: ignore[method-assign]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert [number for number in range(1, 150) if begun[number] > begun[number - 1]] == [64, 128]
    assert_drained(llm)
    with pytest.raises(PromptError):
        llm.generate([*prompts, [-1]], params)
    assert_drained(llm)
