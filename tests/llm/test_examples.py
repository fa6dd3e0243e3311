"""The examples that compute something: their tokens against the engine's and against full recomputation."""

import copy
import heapq
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.attention import KVCache
from octavo.errors import InvalidArgumentError, OutOfBlocksError
from octavo.kv import PagedSequences

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER))

import beam_search  # noqa: E402
import ops_generate  # noqa: E402
import own_scheduler  # noqa: E402
from paged_decoder import PagedDecoder  # noqa: E402
from paged_module import PagedAttention  # noqa: E402

PROMPT = "Long ago, in a small town by the sea,"


@pytest.fixture(scope="module")
def network() -> PagedDecoder:
    return PagedDecoder(num_blocks=1, block_size=1)


@pytest.fixture
def model(network: PagedDecoder) -> Iterator[PagedDecoder]:
    model = with_blocks(network, 96, 3)
    yield model
    model.sequences.manager.check_invariants()


def with_blocks(network: PagedDecoder, num_blocks: int, block_size: int, **options: bool) -> PagedDecoder:
    """Return the same network with a cache of its own."""
    model, config = copy.copy(network), network.network.config
    model.cache = KVCache.allocate(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    # What was never stored must never be read.
    model.cache.data.fill_(float("nan"))
    model.sequences = PagedSequences(num_blocks, block_size, bytes_per_block=8, **options)
    return model


class Recomputing:
    """The same calls as a PagedDecoder, but sequences are lists and every step computes them from token 0."""

    def __init__(self, network: PagedDecoder) -> None:
        self.network = network
        self.lists: dict[object, list[int]] = {}
        self.sequences = self.cache = self

    def alloc(self, name: object, tokens: list[int]) -> None:
        self.lists[name] = list(tokens)

    def update(self, name: object, tokens: list[int]) -> None:
        self.lists[name] += tokens

    def fork(self, parent: object, child: object) -> None:
        self.lists[child] = list(self.lists[parent])

    def truncate(self, name: object, num_tokens: int) -> None:
        del self.lists[name][num_tokens:]

    def free(self, name: object) -> None:
        del self.lists[name]

    def copy_blocks(self, copies: None) -> None:
        pass

    def stats(self) -> object:
        return PagedSequences(1, 1).stats()

    def run(self, names: dict[object, None]) -> Tensor:
        model = with_blocks(self.network, 16, 16, enable_prefix_caching=False)
        return model.run({name: model.sequences.alloc(name, self.lists[name]) for name in names})


def recomputed_beams(
    network: PagedDecoder, prompt: list[int], width: int, num_tokens: int
) -> list[list[int]]:
    """Beam search over lists: the best of all candidates of all beams."""
    beams = [(0.0, list[int]())]
    for _ in range(num_tokens):
        model = with_blocks(network, 16, 16, enable_prefix_caching=False)
        batch = {i: model.sequences.alloc(i, prompt + tokens) for i, (_, tokens) in enumerate(beams)}
        candidates = []
        for (score, tokens), row in zip(beams, model.run(batch).log_softmax(-1), strict=True):
            logprobs, ids = row.topk(width)
            pairs = zip(logprobs.tolist(), ids.tolist(), strict=True)
            candidates += [(score + logprob, [*tokens, token]) for logprob, token in pairs]
        beams = heapq.nlargest(width, candidates)
    return [tokens for _, tokens in beams]


def test_beams_are_those_of_a_search_without_a_cache(model: PagedDecoder) -> None:
    prompt = model.tokenizer.encode(PROMPT)
    beams = beam_search.beam_search(model, prompt, width=3, num_tokens=5)
    assert [list(beam.tokens) for beam in beams] == recomputed_beams(model, prompt, 3, 5)
    stats = model.sequences.stats()
    assert stats.num_shared >= len(prompt) // 3
    assert stats.num_referenced < stats.num_table_entries
    for beam in beams:
        model.sequences.free(beam.name)
    assert model.sequences.stats().num_referenced == 0


@pytest.mark.parametrize("length", [pytest.param(4, marks=pytest.mark.slow), 5])
def test_a_tree_takes_the_branches_of_one_without_a_cache(model: PagedDecoder, length: int) -> None:
    prompt = model.tokenizer.encode(PROMPT)
    found = beam_search.best_of_n_tree(model, prompt, n=2, rounds=2, length=length)
    assert len(found) == length // 2 + length
    recomputing = Recomputing(model)
    assert beam_search.best_of_n_tree(recomputing, prompt, n=2, rounds=2, length=length) == found  # pyright: ignore
    assert model.sequences.stats().num_referenced == 0


def test_preempted_jobs_generate_what_the_engine_does(network: PagedDecoder, exact: LLM) -> None:
    model = with_blocks(network, 11, 4)
    prompts = [model.tokenizer.encode(text) for text in ("The sun is", PROMPT, "Water boils at", "One, two,")]
    jobs = [own_scheduler.Job(str(i), prompt, max_tokens=14) for i, prompt in enumerate(prompts)]
    scheduler = own_scheduler.Scheduler(model, jobs, max_running=3)
    scheduler.run()
    assert scheduler.num_preemptions > 0
    outputs = exact.generate(prompts, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    assert [job.output for job in jobs] == [list(output.outputs[0].token_ids) for output in outputs]
    assert model.sequences.stats().num_referenced == 0
    model.sequences.manager.check_invariants()


def test_a_loop_over_the_operators_generates_what_the_engine_does(
    exact: LLM, golden: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths; one of them ends early, when a token that it generates ends texts."""
    prompts = [row["prompt_ids"] for row in golden if len(row["prompt_ids"]) < 16][:3]
    model = ops_generate.TinyLlama(batch_size=3, capacity=32)
    outputs = exact.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    expected = [list(output.outputs[0].token_ids) for output in outputs]
    assert len({len(prompt) for prompt in prompts}) > 1
    assert model.generate(prompts, max_tokens=8) == expected
    last = next(token for token in expected[1][2:] if token not in expected[0] + expected[2])
    model.config = replace(model.config, eos_token_ids=frozenset([last]))
    expected[1] = expected[1][: expected[1].index(last) + 1]
    assert model.generate(prompts, max_tokens=8) == expected


@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_the_module_attends_over_many_blocks(block_size: int) -> None:
    torch.manual_seed(0)
    attention = PagedAttention(block_size, 24 // block_size, num_heads=4, num_kv_heads=2, head_dim=8)
    attention.k_cache.fill_(float("nan"))
    attention.v_cache.fill_(float("nan"))
    q, k, v = torch.randn(2, 10, 4, 8), torch.randn(2, 10, 2, 8), torch.randn(2, 10, 2, 8)
    outs = [list[Tensor](), list[Tensor]()]
    for start, stop in ((0, 4), (4, 5), (5, 10)):
        for i in range(2):
            if start:
                attention.update(i, stop - start)
            else:
                attention.alloc(i, stop)
            outs[i].append(attention(*(x[i, start:stop] for x in (q, k, v)), i))
    heads = (x.transpose(1, 2) for x in (q, k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    found = torch.stack([torch.cat(parts) for parts in outs])
    torch.testing.assert_close(found, dense.transpose(1, 2), atol=2e-6, rtol=1e-5)
    attention.free(0)
    attention.free(1)
    assert attention.sequences.manager.num_free_blocks == 24 // block_size


def test_the_module_refuses_what_does_not_fit() -> None:
    attention = PagedAttention(2, 2, num_heads=1, num_kv_heads=1, head_dim=8)
    x = torch.randn(3, 1, 8)
    with pytest.raises(InvalidArgumentError, match="call alloc or update"):
        attention(x, x, x, "a")
    with pytest.raises(OutOfBlocksError):
        attention.alloc("a", 5)
    attention.alloc("a", 3)
    with pytest.raises(InvalidArgumentError, match=r"waits for query \[3, 1, D\], got \[2, 1, 8\]"):
        attention(x[:2], x[:2], x[:2], "a")
    with pytest.raises(InvalidArgumentError, match="before more are added"):
        attention.update("a")
    attention(x, x, x, "a")
    with pytest.raises(OutOfBlocksError):
        attention.update("a", 2)
    attention.update("a", 1)
    attention.free("a")
    attention.alloc("a", 4)
