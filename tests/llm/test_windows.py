"""Layers with windows through the engine: whatever is dropped, hit, forked or lost, no answer changes.

Everything is compared with an engine that runs one request at a time without prefix caching.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from interrupt_helpers import SEED, octavo_lines
from test_ahead import ahead
from test_ranks import two_ranks
from window_helpers import (
    CUT,
    GREEDY,
    LOGGED,
    LONG,
    OPTIONS,
    PARAMS,
    PENALISED,
    PROMPTS,
    MakeLLM,
    assert_clean,
    assert_same,
    logprobs,
    model_maker,
    one_by_one,
    scarce,
)
from window_models import OWN, WINDOW, WINDOWED, write_model

from octavo import LLM, EngineConfig, RequestOutput, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.model_runner import ModelRunner
from octavo.parallel import TensorParallel

pytestmark = pytest.mark.usefixtures("loads_once")
SOME = ["gemma3", "gemma4-shared", "gpt-oss", "mistral"]
Expected = Callable[..., list[RequestOutput]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeLLM:
    root = tmp_path_factory.mktemp("windows")
    return model_maker(cache(lambda name: write_model(root / name, name)), device="cpu")


@pytest.fixture(scope="module")
def expected(make: MakeLLM) -> Expected:
    """What a model gives by itself for PROMPTS and PARAMS."""
    return cache(lambda name: one_by_one(make(name, enable_prefix_caching=False), PROMPTS, PARAMS))


SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks of 2": {"block_size": 2, "max_num_batched_tokens": 7},
    "blocks of 3": {"block_size": 3, "max_num_batched_tokens": 64},
    "blocks of 5": {"block_size": 5, "max_num_batched_tokens": 16, "max_num_seqs": 3},
    "blocks as long as the window": {"block_size": WINDOW, "max_num_batched_tokens": 13},
    "blocks longer than the window": {"block_size": 7, "max_num_batched_tokens": 5},
    "long blocks": {"block_size": 16, "max_num_batched_tokens": 20},
    "nothing shared": {"share_prefixes": False, "max_num_batched_tokens": 40},
    "nothing cached": {"enable_prefix_caching": False, "max_num_batched_tokens": 9},
    "torch": {"attention_impl": "torch", "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SOME)
def test_any_schedule_gives_what_one_request_at_a_time_does(
    make: MakeLLM, expected: Expected, name: str, schedule: str
) -> None:
    """Cold, then warm."""
    llm = make(name, **SCHEDULES[schedule])
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, PARAMS), expected(name))
    assert (llm.stats.kv.prefix_hit_tokens > 0) == (schedule != "nothing cached")
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("num_spare", [0, 2], ids=["one alone", "a few together"])
@pytest.mark.parametrize("block_size", [2, 8])
@pytest.mark.parametrize("name", OWN)
def test_preemption_changes_nothing(
    make: MakeLLM, expected: Expected, name: str, block_size: int, num_spare: int
) -> None:
    """Trap: a request by itself that shared blocks in many pages ended early, as if they were needed."""
    num_blocks = scarce(make(name, block_size=block_size)) + num_spare
    llm = make(name, block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=16)
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, PARAMS), expected(name))
    assert llm.stats.num_preemptions > 0 or num_spare == 0
    assert_clean(llm)


@pytest.mark.parametrize(("name", "block_size"), [*((name, 4) for name in OWN), ("gemma3", 2), ("gemma3", 7)])
def test_a_hit_at_every_cut_of_three_windows(make: MakeLLM, name: str, block_size: int) -> None:
    """A second request shares exactly so many tokens of a prompt, or of a prompt and its answer."""
    llm, cold = make(name, block_size=block_size), make(name, enable_prefix_caching=False)
    answered = [*CUT, *cold.generate([CUT], GREEDY)[0].outputs[0].token_ids]
    num_hits = 0
    for num_shared in range(1, len(answered)):
        head = answered[:num_shared]
        prompt = [*head, *(token % 90 + 4 for token in answered[num_shared : num_shared + 1]), 4, 5]
        llm.reset_prefix_cache()
        llm.generate([CUT], GREEDY)
        found = llm.generate([prompt], GREEDY)
        num_hits += found[0].num_cached_tokens
        assert found[0].num_cached_tokens <= num_shared
        assert_same(found, cold.generate([prompt], GREEDY))
    assert num_hits > 0
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block_size"), [*((name, 2) for name in WINDOWED), ("gemma3", 4)])
def test_a_hit_whose_window_was_evicted_is_shortened_and_counted(
    make: MakeLLM, name: str, block_size: int
) -> None:
    """Other requests take what windows gave back; keys of full layers are still there."""
    cold = make(name, enable_prefix_caching=False)
    num_blocks = 2 * scarce(make(name, block_size=block_size), 130)
    llm = make(name, block_size=block_size, num_blocks=num_blocks)
    rng, num_lost = random.Random(1), 0
    for num_others in range(1, 9):
        llm.reset_prefix_cache()
        llm.generate([LONG], GREEDY)
        for _ in range(num_others):
            llm.generate([[rng.randrange(3, 97) for _ in range(2 * WINDOW)]], PENALISED)
        before = llm.stats.kv
        prompt = [*LONG[: 5 * WINDOW], 4, 4]
        found = llm.generate([prompt], GREEDY)
        after = llm.stats.kv
        assert_same(found, cold.generate([prompt], GREEDY))
        num_lost += after.prefix_lost_tokens - before.prefix_lost_tokens
    assert num_lost > 0
    assert_clean(llm)


@pytest.mark.parametrize("name", WINDOWED)
def test_prompt_log_probabilities_and_scores_with_hits_are_exact(make: MakeLLM, name: str) -> None:
    llm, cold = make(name), make(name, enable_prefix_caching=False)
    llm.generate([LONG], GREEDY)
    for num in (1, WINDOW, 3 * WINDOW + 1, len(LONG)):
        assert_same(llm.generate([LONG[:num]], LOGGED), cold.generate([LONG[:num]], LOGGED))
        choices = [[4], [5, 6, 7], LONG[num : num + WINDOW] or [8], [9] * 2 * WINDOW]
        for found, other in zip(llm.score(LONG[:num], choices), cold.score(LONG[:num], choices), strict=True):
            assert found.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 3, 9, 20])
@pytest.mark.parametrize("name", SOME)
def test_an_abort_in_the_middle_leaves_the_others_exact(
    make: MakeLLM, expected: Expected, name: str, num_steps: int
) -> None:
    llm = make(name, max_num_batched_tokens=24)
    outputs = [llm.engine.add_request(*both) for both in zip(PROMPTS, PARAMS, strict=True)]
    for _ in range(num_steps):
        llm.engine.step()
    for output in outputs[::2]:
        llm.engine.abort(output.request_id)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert_same(outputs[1::2], expected(name)[1::2])
    for output, other in zip(outputs[::2], expected(name)[::2], strict=True):
        for mine, its in zip(output.outputs, other.outputs, strict=True):
            assert list(its.token_ids)[: len(mine.token_ids)] == list(mine.token_ids)
    assert_same(llm.generate(PROMPTS, PARAMS), expected(name))
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fails_at", [1, 3, 8, 15])
@pytest.mark.parametrize("name", SOME)
def test_nothing_of_a_step_that_failed_is_hit(
    make: MakeLLM,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fails_at: int,
    error: type[BaseException],
) -> None:
    llm, num_steps, forward = make(name, max_num_batched_tokens=24), 0, ModelRunner._forward

    def broken(self: ModelRunner, *arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == fails_at:
            self.kv_cache.data.fill_(float("nan"))
            raise error("device fell off")
        return forward(self, *arguments)

    with monkeypatch.context() as patch, suppress(error):
        patch.setattr(ModelRunner, "_forward", broken)
        llm.generate(PROMPTS, PARAMS, on_error="return")
    assert num_steps >= fails_at
    assert_same(llm.generate(PROMPTS, PARAMS), expected(name))
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
def test_an_interrupt_at_any_line_changes_nothing(
    make: MakeLLM, expected: Expected, runs_ahead: bool
) -> None:
    name, stride = "gemma3", 16001
    llm = make(name, num_blocks=scarce(make(name)), max_num_batched_tokens=24)
    if runs_ahead:
        llm, _ = ahead(llm)
    total = octavo_lines(lambda: llm.generate(PROMPTS, PARAMS), -1)
    for stop_at in range(1 + SEED % stride, total, stride):
        with suppress(KeyboardInterrupt):
            octavo_lines(lambda: llm.generate(PROMPTS, PARAMS), stop_at)
        llm.engine.manager.check_invariants()
    assert_same(llm.generate(PROMPTS, PARAMS), expected(name))
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["plain", "blocks of 5", "long blocks", "scarce"])
@pytest.mark.parametrize("name", SOME)
def test_one_step_ahead_changes_nothing(make: MakeLLM, expected: Expected, name: str, schedule: str) -> None:
    options = SCHEDULES.get(schedule) or {}
    if schedule == "scarce":
        options = {"num_blocks": scarce(make(name)), "max_num_batched_tokens": 16}
    llm, runner = ahead(make(name, **options))
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, PARAMS), expected(name))
    assert runner.most_in_flight == 2, "the engine never ran ahead"
    assert (llm.stats.num_preemptions > 0) or schedule != "scarce"
    assert_clean(llm)


@pytest.mark.parametrize("name", ["gemma3", "gemma4-inputs", "gemma4-shared", "olmo3", "gpt-oss", "mistral"])
def test_two_ranks_change_nothing(make: MakeLLM, expected: Expected, name: str) -> None:
    model = make(name, enable_prefix_caching=False).engine.config.model
    fields = {
        **OPTIONS,
        "model": model,
        "device": "cpu",
        "max_num_batched_tokens": 24,
        "attention_impl": "torch",
    }

    def run(parallel: TensorParallel) -> list[RequestOutput]:
        llm = LLM.from_engine(Engine(EngineConfig.from_dict(fields), parallel=parallel))
        found = llm.generate(PROMPTS, PARAMS) + llm.generate(PROMPTS, PARAMS)
        assert_clean(llm)
        return found

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(run, two_ranks()):
            assert_same(found, expected(name) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("name", SOME)
def test_narrow_caches_of_windows_do_not_depend_on_the_schedule(make: MakeLLM, name: str, dtype: str) -> None:
    """What a block holds is the same, however it came there."""
    cold = make(name, kv_cache_dtype=dtype, enable_prefix_caching=False)
    found = one_by_one(cold, PROMPTS, [GREEDY] * len(PROMPTS))
    for options in ({"block_size": 3}, {"num_blocks": scarce(cold), "max_num_batched_tokens": 24}):
        llm = make(name, kv_cache_dtype=dtype, **options)
        for _ in range(2):
            assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == [
                o.outputs[0].token_ids for o in found
            ]
        assert_clean(llm)


@pytest.mark.parametrize("name", SOME)
def test_salts_share_no_window(make: MakeLLM, expected: Expected, name: str) -> None:
    llm = make(name)
    for salt in ("", "a", "b"):
        first, second = (llm.generate(PROMPTS[:1], PARAMS[:1], cache_salt=salt) for _ in range(2))
        assert first[0].num_cached_tokens == 0
        assert second[0].num_cached_tokens > 0
        assert_same([*first, *second], expected(name)[:1] * 2)
    assert_clean(llm)


@pytest.mark.parametrize("name", SOME)
def test_forks_of_a_prompt_keep_their_own_windows(make: MakeLLM, name: str) -> None:
    """Long answers of one prompt: each drops what it no longer sees, and nothing of the others."""
    params = SamplingParams(n=5, seed=9, max_tokens=5 * WINDOW, ignore_eos=True, logprobs=0)
    cold = make(name, enable_prefix_caching=False, max_num_seqs=1).generate([CUT, LONG], params)
    for options in ({}, {"block_size": 3, "max_num_seqs": 4}, {"num_blocks": 2 * scarce(make(name))}):
        llm = make(name, **options)
        assert_same(llm.generate([CUT, LONG], params), cold)
        assert_clean(llm)
    assert len({tuple(completion.token_ids) for completion in cold[0].outputs}) > 1
    assert logprobs(cold[0].outputs[0].logprobs)
