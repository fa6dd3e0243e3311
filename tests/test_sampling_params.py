"""Sampling parameters are checked once, at construction, with the range and the value in the message."""

import pytest

from octavo import SamplingParams
from octavo.errors import SamplingParamsError
from octavo.sampling_params import MIN_TEMPERATURE


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"n": 0},
        {"n": 129},
        {"n": 10**9},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 2**31},
        {"min_tokens": -1},
        {"max_tokens": 3, "min_tokens": 4},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [7]},
        {"stop": "a\udcff"},
        {"stop": ["x"] * 17},
        {"stop": "x", "detokenize": False},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [2**63]},
        {"stop_token_ids": ["a"]},
        {"logprobs": -1},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"stop": 5},
        {"stop": b"ab"},
        {"stop": {"a": 1}},
        {"stop_token_ids": 5},
        {"stop_token_ids": "5"},
        {"stop_token_ids": b"hi"},
        {"stop_token_ids": bytearray(b"hi")},
        {"stop_token_ids": {5: True}},
        {"logit_bias": [1]},
        {"logit_bias": "5=1"},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {"a": 1.0}},
        {"repetition_penalty": 0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"seed": -2},
        {"seed": -1.0},
        {"seed": 2**63},
        {"seed": 1.0},
        {"ignore_eos": "yes"},
        {"skip_special_tokens": 1},
    ],
)
def test_bad_values_are_refused(fields: dict[str, object]) -> None:
    name = next(iter(fields))
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams.from_dict(fields)
    assert name.split("[")[0] in str(caught.value)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(SamplingParamsError, match="did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1.0})


def test_one_stop_string_and_a_list_are_the_same() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_none_is_no_stop_string_and_no_stop_id() -> None:
    params = SamplingParams.from_dict({"stop": None, "stop_token_ids": None})
    assert params == SamplingParams()
    assert (params.stop, params.stop_token_ids) == ((), ())


@pytest.mark.parametrize("temperature", [0, 0.0, 5e-324, 1e-38, 9.9e-6])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy


def test_a_low_temperature_is_not_greedy() -> None:
    assert not SamplingParams(temperature=MIN_TEMPERATURE).greedy


def test_edges_are_accepted() -> None:
    params = SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, n=128, logprobs=0, seed=2**63 - 1)
    assert params.greedy


def test_a_seed_of_minus_one_is_none_as_in_vllm() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
