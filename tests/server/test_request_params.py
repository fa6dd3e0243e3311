"""Parameters of requests: those of equal requests are checked once, and equal only with their types."""

from typing import Any

import pytest

from octavo import SamplingParams
from octavo.errors import SamplingParamsError
from octavo.server.api.sampling import chat_params, completion_params
from octavo.server.api.structs import ChatRequest, CompletionRequest


def params(**fields: Any) -> SamplingParams:
    return completion_params(CompletionRequest(prompt="", **fields))


def test_equal_requests_have_the_same_parameters() -> None:
    given: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "max_tokens": 7, "ignore_eos": True}
    assert params(**given) is params(**given)
    chats = [chat_params(ChatRequest(messages=[{}], **given)) for _ in range(2)]
    assert chats[0] is chats[1] == params(**given)
    assert params(**given) == SamplingParams(**given)
    assert params(**given, seed=1) != params(**given, seed=2)
    several: tuple[dict[str, Any], ...] = ({"stop": ["a"]}, {"stop_token_ids": [1]}, {"logit_bias": {1: 1.0}})
    for more in several:
        assert params(**given, **more) == SamplingParams(**given, **more)
        assert params(**given, **more) is not params(**given, **more)


def test_values_of_other_types_are_not_equal() -> None:
    assert params(top_k=1, n=1).top_k == 1
    assert params(temperature=1.0) == params(temperature=1)
    for wrong in ({"top_k": 1.0}, {"top_k": True}, {"n": True}, {"temperature": True}):
        # Each time.
        for _ in range(2):
            with pytest.raises(SamplingParamsError):
                params(**{"top_k": 1, "n": 1, **wrong})
