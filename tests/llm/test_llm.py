"""The public API on a tiny random model: equivalences, stops, log-probabilities, forks, aborts, errors."""

import json

import pytest
from llm_cases import GREEDY, PROMPTS, MakeLLM, ids
from llm_helpers import assert_drained
from tiny_model import TINY_LLAMA

from octavo import LLM, SamplingParams


def alone(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [ids(llm.generate(prompt, params))[0] for prompt in PROMPTS]


SAMPLING = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=7, max_tokens=12, ignore_eos=True, top_p=0.9, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def tokens_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The reference's tokens of each prompt by itself, by the name of how they are sampled."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    options = {"attention_impl": "reference", "enable_prefix_caching": False}
    return {
        name: alone(LLM(str(folder), load_format="dummy", num_blocks=64, block_size=4, **options), params)
        for name, params in SAMPLING.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 1, "num_blocks": 256},
        {"block_size": 16},
        {"max_num_batched_tokens": 3},
        {"num_blocks": 16, "max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 1},
        {"attention_impl": "reference"},
        {"attention_impl": "torch"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_any_schedule_gives_the_tokens_of_each_request_alone(
    tiny: MakeLLM, tokens_alone: dict[str, list[list[int]]], options: dict[str, object], sampling: str
) -> None:
    params, expected = SAMPLING[sampling], tokens_alone[sampling]
    llm = tiny(**options)
    assert ids(llm.generate(PROMPTS, params)) == expected
    assert ids(llm.generate(PROMPTS[::-1], params)) == expected[::-1]  # warm, other order
    assert_drained(llm)


def test_preempted_equals_undisturbed(tiny: MakeLLM) -> None:
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True, presence_penalty=0.5, logprobs=2)
    expected = [tiny().generate(prompt, params)[0] for prompt in PROMPTS]
    llm = tiny(num_blocks=19)
    outputs = llm.generate(PROMPTS, params)
    assert llm.stats.num_preemptions > 0
    assert sum(output.metrics.num_preemptions for output in outputs) == llm.stats.num_preemptions
    assert ids(outputs) == ids(expected)
    for got, want in zip(outputs, expected, strict=True):
        assert got.outputs[0].cumulative_logprob == pytest.approx(
            want.outputs[0].cumulative_logprob, abs=1e-3
        )
    assert_drained(llm)


def test_forked_equals_separate(tiny: MakeLLM) -> None:
    """Completion i of n has the tokens that its seed gives, however the prompt is shared."""
    llm = tiny()
    together = llm.generate(PROMPTS[2], SamplingParams(n=5, seed=11, max_tokens=10, ignore_eos=True))[0]
    cold = tiny(enable_prefix_caching=False, max_num_seqs=1)
    separate = cold.generate(PROMPTS[2], SamplingParams(n=5, seed=11, max_tokens=10, ignore_eos=True))[0]
    assert ids([together]) == ids([separate])
    assert len({tuple(completion.token_ids) for completion in together.outputs}) > 1
    assert [completion.index for completion in together.outputs] == [0, 1, 2, 3, 4]
    assert_drained(llm)


def test_unseeded_requests_differ_but_an_engine_seed_repeats_them(tiny: MakeLLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = ids(tiny(seed=1).generate([[1, 2], [1, 2]], params))
    assert first != second
    assert ids(tiny(seed=1).generate([[1, 2], [1, 2]], params)) == [first, second]


def test_streamed_equals_whole(tiny: MakeLLM) -> None:
    llm = tiny()
    whole = llm.generate(PROMPTS[1], GREEDY)[0]
    deltas = list(llm.stream(PROMPTS[1], GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert deltas[-1].output is not None
    assert deltas[-1].finish_reason == "length"
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_interleaved_streams(tiny: MakeLLM) -> None:
    llm = tiny()
    expected = alone(llm, GREEDY)
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    got: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(12):
        for tokens, stream in zip(got, streams, strict=True):
            tokens += next(stream).token_ids
    assert got == expected
    for stream in streams:
        assert next(stream, None) is None
    assert_drained(llm)


def test_leaving_a_stream_aborts_it(tiny: MakeLLM) -> None:
    llm = tiny()
    stream = llm.stream(PROMPTS[2], SamplingParams(max_tokens=100, n=3, ignore_eos=True))
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_drained(llm)


def test_abort_ends_a_stream(tiny: MakeLLM) -> None:
    llm = tiny()
    stream = llm.stream(PROMPTS[2], SamplingParams(max_tokens=100, ignore_eos=True))
    request_id = next(stream).request_id
    llm.abort(request_id)
    last = list(stream)[-1]
    assert last.finish_reason == "abort"
    assert last.output is not None
    assert last.output.finished
    llm.abort(request_id)
    llm.abort("never existed")
    assert_drained(llm)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
def test_abort_at_any_time_leaks_nothing(tiny: MakeLLM, num_steps: int) -> None:
    llm = tiny(num_blocks=20, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=20, n=2, ignore_eos=True)
    outputs = [llm.engine.add_request(prompt, params) for prompt in PROMPTS]
    for _ in range(num_steps):
        llm.engine.step()
    for output in outputs:
        llm.engine.abort(output.request_id)
        llm.engine.manager.check_invariants()
    assert_drained(llm)
