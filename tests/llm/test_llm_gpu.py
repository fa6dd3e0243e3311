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


def launch_without_graphs(llm: object) -> None:
    for graphs in llm.engine.runner.graphs:  # type: ignore[attr-defined]
        graphs.replay = lambda variant, graphs=graphs: graphs.launch(variant, graphs.network)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_graph_equals_eager(tiny: object, kv_cache_dtype: str) -> None:
    options = {"device": "cuda", "dtype": "bfloat16", "num_blocks": 256, "kv_cache_dtype": kv_cache_dtype}
    llm = tiny(**options)  # type: ignore[operator]
    params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True, temperature=0.8, top_p=0.9)
    with_graphs = tokens(llm), tokens(llm, params)
    launch_without_graphs(llm)
    assert (tokens(llm), tokens(llm, params)) == with_graphs


@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"kv_cache_dtype": "fp8"}, {"share_prefixes": False}]
)
def test_prompts_give_the_same_tokens_in_and_out_of_graphs(tiny: object, options: dict[str, object]) -> None:
    """In chunks of 32 tokens, with graphs that are new and with graphs that ran other prompts before."""
    llm = tiny(device="cuda", dtype="bfloat16", num_blocks=256, max_num_batched_tokens=32, **options)  # type: ignore[operator]
    rounds = []
    for _ in range(2):
        rounds.append(tokens(llm))
        llm.reset_prefix_cache()
    launch_without_graphs(llm)
    rounds.append(tokens(llm))
    assert rounds[1:] == rounds[:1] * 2


def test_chunks_that_sample_nothing_are_waited_for(tiny: object) -> None:
    """Trap: all chunks of a long prompt were launched at once, and their time was taken for the last's."""
    llm = tiny(device="cuda", dtype="bfloat16", num_blocks=256, max_num_batched_tokens=32)  # type: ignore[operator]
    runner, waits = llm.engine.runner, []
    launch = runner.launch

    def watched(step: object) -> object:
        # The one before the newest has been waited for.
        assert all(wait.done for wait in waits[:-1])
        waits.append(Waited(launch(step)))
        return waits[-1]

    runner.launch = watched
    llm.generate([[i % 101 for i in range(400)]], GREEDY)
    assert len(waits) >= 400 // 32 + GREEDY.max_tokens
    assert runner.has_finished()


class Waited:
    """A step's outcome, and whether it was waited for until its event had come."""

    def __init__(self, wait: object) -> None:
        self.wait, self.done = wait, False

    def __call__(self) -> object:
        outcome = self.wait.__self__  # type: ignore[attr-defined]
        result = self.wait()  # type: ignore[operator]
        self.done = outcome.is_copied()
        return result


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_p": 0.9, "logprobs": 3},
        {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}, "min_tokens": 50},
    ],
    ids=["plain", "log-probabilities", "changed logits"],
)
def test_a_decode_step_never_synchronises(tiny: object, asked: dict[str, object]) -> None:
    llm = tiny(device="cuda", dtype="bfloat16", num_blocks=256)  # type: ignore[operator]
    tokens(llm)
    engine = llm.engine
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(max_tokens=60, ignore_eos=True, **asked))
    for _ in range(10):
        engine.step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(30):
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    calls = [event.name for event in profile.events()]
    # The profiler itself synchronises the device once when it stops.
    assert calls.count("cudaStreamSynchronize") == 0
    assert calls.count("cudaDeviceSynchronize") <= 1
    assert calls.count("cudaGraphLaunch") == 2 * 30
    while engine.has_unfinished_requests:
        engine.step()


def test_a_seed_gives_the_same_tokens_beside_any_neighbour(tiny: object) -> None:
    """Neighbours that want log-probabilities or penalties make the engine wait for every step."""
    llm = tiny(device="cuda", dtype="float32", num_blocks=256)  # type: ignore[operator]
    seeded = SamplingParams(seed=7, max_tokens=30, ignore_eos=True, temperature=0.9, top_k=20)
    alone = [llm.generate([prompt], seeded)[0].outputs[0].token_ids for prompt in PROMPTS]
    neighbour = SamplingParams(
        max_tokens=17, ignore_eos=True, logprobs=2, presence_penalty=1.0, min_tokens=3, seed=1
    )
    outputs = llm.generate([*PROMPTS, [1, 2, 3]], [seeded] * len(PROMPTS) + [neighbour])
    assert [output.outputs[0].token_ids for output in outputs[:-1]] == alone
    assert len(outputs[-1].outputs[0].logprobs) == 17
    again = llm.generate([[1, 2, 3]], neighbour)[0].outputs[0]
    assert again.token_ids == outputs[-1].outputs[0].token_ids


def test_log_probabilities_are_the_cpus(tiny: object) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    options = {"dtype": "float32", "num_blocks": 64}
    on_cpu = tiny(device="cpu", **options).generate(PROMPTS, params)  # type: ignore[operator]
    on_gpu = tiny(device="cuda", **options).generate(PROMPTS, params)  # type: ignore[operator]
    for expected, output in zip(on_cpu, on_gpu, strict=True):
        for a, b in zip(expected.outputs[0].logprobs, output.outputs[0].logprobs, strict=True):
            assert a.keys() == b.keys()
            assert all(abs(a[token].logprob - b[token].logprob) < 1e-3 for token in a)
        assert len(output.prompt_logprobs) == len(expected.prompt_logprobs)


def test_a_stop_token_found_one_step_late_leaves_nothing_behind(tiny: object) -> None:
    llm = tiny(device="cuda", dtype="float32", num_blocks=64)  # type: ignore[operator]
    free = tokens(llm)
    stops = [output[9] for output in free]
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop]) for stop in stops
    ]
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    for output, expected, stop in zip(outputs, free, stops, strict=True):
        assert output.token_ids == expected[: expected.index(stop) + 1]
        assert output.finish_reason == "stop"
    assert_drained(llm)


def test_completions_of_one_prompt_and_an_abort_while_a_step_is_under_way(tiny: object) -> None:
    llm = tiny(device="cuda", dtype="float32", num_blocks=64)  # type: ignore[operator]
    params = SamplingParams(n=4, seed=3, max_tokens=20, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate([PROMPTS[3]], params)[0].outputs]
    assert len({tuple(token_ids) for token_ids in expected}) == 4
    victim = llm.engine.add_request([4, 5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(5):
        llm.engine.step()
    llm.engine.abort(victim.request_id)
    again = [output.token_ids for output in llm.generate([PROMPTS[3]], params)[0].outputs]
    assert again == expected
    assert_drained(llm)


def shared_prompts() -> list[list[int]]:
    """Three documents behind one preface, four questions on each; one prompt of its own."""
    preface = [i % 89 for i in range(50)]
    prompts = [[7, 8, 9]]
    for document in range(3):
        text = preface + [(i * (document + 2)) % 97 for i in range(40)]
        prompts += [[*text, question, 3, question] for question in range(4)]
    return prompts


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(n=3, seed=1, max_tokens=20, ignore_eos=True)])
def test_shared_prefixes_give_the_same_tokens(tiny: object, params: SamplingParams) -> None:
    outputs = []
    for share in (False, True):
        options = {"dtype": "float32", "num_blocks": 200, "block_size": 16, "share_prefixes": share}
        llm = tiny(device="cuda", **options)  # type: ignore[operator]
        runner, shared = llm.engine.runner, []
        if share:
            plan = runner._forest.plan
            runner._forest.plan = lambda *step, plan=plan: plan(*step, always=True)
            upload = runner._forest.upload
            runner._forest.upload = lambda plan, upload=upload, shared=shared: (
                shared.append(plan),
                upload(plan),
            )
        for _ in range(2):  # the second time prompts come from the prefix cache
            results = llm.generate(shared_prompts(), params)
        outputs.append([[c.token_ids for c in result.outputs] for result in results])
        assert bool(shared) == share
        assert_drained(llm)
    assert outputs[0] == outputs[1]


def test_prompts_that_begin_alike_read_what_their_step_stores(tiny: object) -> None:
    """Kernels that start early must not be too early: what the cache held before is not a number."""
    config = {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 4}
    llm = tiny({**config, "max_position_embeddings": 2048}, device="cuda", dtype="bfloat16", num_blocks=400)  # type: ignore[operator]
    preface = [i % 89 for i in range(1024)]
    prompts = [[*preface, *(i * j % 97 for j in range(20))] for i in range(150)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for _ in range(5):
        llm.reset_prefix_cache()
        llm.engine.runner.kv_cache.data.fill_(torch.nan)
        outputs = llm.generate(prompts, params)
        assert sum(output.num_cached_tokens == 1024 for output in outputs) == len(prompts) - 1
        assert_drained(llm)


def test_preempted_equals_undisturbed(tiny: object) -> None:
    expected = tokens(tiny(device="cuda", dtype="float32"))  # type: ignore[operator]
    llm = tiny(device="cuda", dtype="float32", num_blocks=19)  # type: ignore[operator]
    assert tokens(llm) == expected
