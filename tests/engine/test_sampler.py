"""Sampling: filters, penalties, log-probabilities, and random numbers that ignore the neighbours."""

import math
from array import array

import pytest
import torch

from octavo.engine.request import Request
from octavo.engine.sampling.draw import counter_uniform, mix_seed
from octavo.engine.sampling.sampler import SampledToken, Sampler
from octavo.engine.sampling.tops import Tops, pack_tops
from octavo.kv import KVCacheManager
from octavo.outputs import Logprob, RequestMetrics
from octavo.sampling_params import SamplingParams

VOCAB = 50


def request(prompt: list[int] = [1], output: list[int] = [], seed: int = 0, **fields: object) -> Request:  # noqa: B006
    params = SamplingParams.from_dict(fields)
    return Request(
        request_id="r",
        index=0,
        token_ids=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        params=params,
        max_num_tokens=100,
        seed=seed,
        stop_token_ids=frozenset(params.stop_token_ids),
        blocks=KVCacheManager(1, 1).new_sequence(),
        metrics=RequestMetrics(),
    )


def draw(sampler: Sampler, logits: torch.Tensor, *requests: Request) -> list[SampledToken]:
    return sampler.sample(logits.clone(), requests, [len(request.token_ids) for request in requests])


def sample(logits: torch.Tensor, *requests: Request) -> list[int]:
    sampled = draw(Sampler(logits.shape[-1], torch.device("cpu")), logits, *requests)
    return [token.token_id for token in sampled]


def counts(logits: torch.Tensor, num: int = 2000, **fields: object) -> torch.Tensor:
    """How often each token is drawn over many seeds."""
    requests = [request(seed=seed, **fields) for seed in range(num)]
    return torch.bincount(torch.tensor(sample(logits.expand(num, -1), *requests)), minlength=logits.shape[-1])


def test_greedy_takes_the_most_likely() -> None:
    """Trap: greedy forbidden."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0))
    requests = [request(temperature=0) for _ in range(8)]
    assert sample(logits, *requests) == logits.argmax(-1).tolist()


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    drawn = counts(logits, 4000) / 4000
    assert torch.allclose(drawn, logits.softmax(-1), atol=0.03)


def test_temperature_sharpens() -> None:
    logits = torch.tensor([0.0, 1.0])
    assert counts(logits, temperature=0.25)[1] / 2000 == pytest.approx(1 / (1 + math.exp(-4)), abs=0.02)


def test_top_k_keeps_exactly_k() -> None:
    logits = torch.arange(10.0) / 10
    assert (counts(logits, top_k=3) > 0).tolist() == [False] * 7 + [True] * 3


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (counts(logits, top_p=0.6) > 0).tolist() == [True, True, False, False]
    assert (counts(logits, top_p=0.5) > 0).tolist() == [True, False, False, False]


def test_top_p_on_top_k_uses_the_mass_of_the_kept_tokens() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two kept, the first alone has 4/7 of the mass.
    assert (counts(logits, top_k=2, top_p=0.55) > 0).tolist() == [True, False, False, False]


def test_top_p_beyond_the_first_candidates_is_exact() -> None:
    """A flat distribution over a vocabulary larger than the candidates looked at first."""
    logits = torch.zeros(5000)
    drawn = torch.tensor(sample(logits.expand(3000, -1), *[request(seed=s, top_p=0.9) for s in range(3000)]))
    assert drawn.unique().numel() > 1500


def test_min_p_drops_relative_to_the_best() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (counts(logits, min_p=0.5) > 0).tolist() == [True, True, False, False]


def test_penalties() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 4, 5]] = torch.tensor([3.0, 2.9, 2.8])
    assert sample(logits, request([3], temperature=0)) == [3]
    assert sample(logits, request([3], temperature=0, repetition_penalty=1.5)) == [4]
    assert sample(logits, request([1], [3], temperature=0, presence_penalty=0.5)) == [4]
    assert sample(logits, request([3], [1], temperature=0, presence_penalty=0.5)) == [3]  # output only
    assert sample(logits, request([1], [3, 4, 4], temperature=0, frequency_penalty=0.15)) == [3]


def test_penalty_counts_follow_the_output_token_by_token() -> None:
    sampler = Sampler(VOCAB, torch.device("cpu"))
    grown = request(
        [1, 2], temperature=0, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.3
    )
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(1))
    for row in logits:
        token = draw(sampler, row[None], grown)[0].token_id
        fresh = request(
            [1, 2],
            grown.token_ids[2:].tolist(),
            temperature=0,
            frequency_penalty=0.7,
            presence_penalty=0.3,
            repetition_penalty=1.3,
        )
        assert sample(row[None], fresh) == [token]
        grown.token_ids.append(token)


def test_counts_start_again_where_they_lost_track() -> None:
    """After a preemption, say: the host knows all tokens then."""
    sampler, fields = Sampler(VOCAB, torch.device("cpu")), {"temperature": 0, "frequency_penalty": 0.7}
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    grown = request([1, 2], [3, 3, 4], **fields)
    draw(sampler, logits, grown)
    grown.token_ids.extend([5, 6, 5])
    assert (
        draw(sampler, logits, grown)[0].token_id
        == sample(logits, request([1, 2], [3, 3, 4, 5, 6, 5], **fields))[0]
    )


def test_repetition_penalty_pushes_negative_logits_down() -> None:
    logits = torch.tensor([[-1.0, -1.1]])
    assert sample(logits, request([0], temperature=0, repetition_penalty=1.2)) == [1]


def test_logit_bias_and_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5
    assert sample(logits, request(temperature=0, logit_bias={9: 50})) == [9]
    assert sample(logits, request(temperature=0, stop_token_ids=[7], min_tokens=2)) != [7]
    assert sample(logits, request([1], [2, 2], temperature=0, stop_token_ids=[7], min_tokens=2)) == [7]


def test_a_seeded_row_ignores_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(16, VOCAB, generator=generator)
    requests = [request(seed=i, temperature=0.8 + i / 10, top_p=0.9 if i % 2 else 1.0) for i in range(16)]
    together = sample(logits, *requests)
    alone = [sample(logits[i : i + 1], requests[i])[0] for i in range(16)]
    assert together == alone


def test_random_numbers_depend_on_seed_and_position_only() -> None:
    values = [counter_uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(values)) == 10_000
    assert min(values) >= 0
    assert max(values) < 1
    assert sum(values) / 10_000 == pytest.approx(0.5, abs=0.01)
    assert mix_seed(1, 0) != mix_seed(0, 1)


def test_logprobs_are_those_of_the_model_with_ranks() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    sampler = Sampler(4, torch.device("cpu"))
    asked = request(temperature=0, logprobs=2, logit_bias={3: 100})
    token = draw(sampler, logits, asked)[0]
    assert token.token_id == 3
    expected = logits[0].log_softmax(-1).tolist()
    assert token.top is not None
    assert [(id_, rank) for id_, _, rank in token.top] == [(1, 1), (2, 2), (3, 4)]
    for id_, value, _ in token.top:
        assert value == pytest.approx(expected[id_])


def test_very_unlikely_tokens_have_finite_logprobs() -> None:
    """Trap: log(softmax + 1e-6) instead of log_softmax."""
    logits = torch.tensor([[0.0, -80.0]])
    asked = request(temperature=0, logprobs=2)
    token = draw(Sampler(2, torch.device("cpu")), logits, asked)[0]
    assert token.top is not None
    assert token.top[1][1] == pytest.approx(-80.0)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 1
    logits[1, 9] = float("nan")
    requests = [request(seed=i, temperature=0) for i in range(3)]
    sampled = draw(Sampler(VOCAB, torch.device("cpu")), logits, *requests)
    assert [token.token_id for token in sampled] == [4, -1, 4]
    assert sampled[1].error is not None
    assert sampled[0].error is None


def test_equal_log_probabilities_are_listed_by_id() -> None:
    """Whatever order topk finds them in: it may differ with the number of rows."""
    logits = torch.zeros(3, 5000)
    logits[:, ::7] = 1.0
    logits[1, 4000] = 2.0
    logits[2, :10] = -torch.inf
    logprobs = logits.log_softmax(-1)
    tops = Tops([4, 2, 2], pack_tops(logprobs, torch.tensor([0, 3, 21]), 4)).read()
    assert [[(id_, rank) for id_, _, rank in top] for top in tops] == [
        [(0, 1), (7, 2), (14, 3), (21, 4)],
        [(4000, 1), (0, 2), (3, 717)],
        [(14, 1), (21, 2)],
    ]
    for row, top in enumerate(tops):
        assert all(value == logprobs[row, id_].item() for id_, value, _ in top)


def test_prompt_logprobs_that_are_complete_outlast_a_start_over() -> None:
    """Those before prompt_logprobs_start are never there."""
    one = {5: Logprob(-0.5, 1, None)}
    asked = request([1, 2, 3, 4])
    asked.prompt_logprobs_start, asked.prompt_logprobs = 2, [None, None, one, one]
    asked.rewind()
    assert asked.prompt_logprobs == [None, None, one, one]
    asked.prompt_logprobs[3] = None
    asked.rewind()
    assert asked.prompt_logprobs == [None] * 4
