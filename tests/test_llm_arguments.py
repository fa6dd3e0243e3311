"""One of something or many: prompts, parameters, conversations, continuations."""

from collections.abc import Callable

import pytest

from octavo import SamplingParams
from octavo.engine.prompt_reader import as_prompt_list
from octavo.errors import InvalidArgumentError, PromptError
from octavo.llm_arguments import as_continuation_list, as_conversations, as_params_list

BYTES = [b"hi", b"", bytearray(b"hi"), memoryview(b"hi")]


@pytest.mark.parametrize(
    "content", BYTES, ids=lambda value: f"{type(value).__name__} {value!r}".split(" at 0x")[0]
)
def test_bytes_are_one_prompt_which_is_refused_where_it_is_read(content: bytes) -> None:
    assert as_prompt_list(content) == [content]


def test_ids_are_one_prompt_and_a_list_is_many() -> None:
    assert as_prompt_list([1, 2]) == [[1, 2]]
    assert as_prompt_list("ab") == ["ab"]
    assert as_prompt_list({"prompt": "ab"}) == [{"prompt": "ab"}]
    assert as_prompt_list(["ab", [1, 2]]) == ["ab", [1, 2]]
    assert as_prompt_list([]) == []


@pytest.mark.parametrize("read", [as_prompt_list, as_conversations, as_continuation_list])
@pytest.mark.parametrize("value", [None, 5, {1, 2}, iter("ab")])
def test_what_is_no_list_is_refused(read: Callable[[object], object], value: object) -> None:
    with pytest.raises(PromptError, match=f"got {type(value).__name__}"):
        read(value)


@pytest.mark.parametrize("read", [as_conversations, as_continuation_list])
@pytest.mark.parametrize(
    "value", ["ab", *BYTES], ids=lambda value: f"{type(value).__name__} {value!r}".split(" at 0x")[0]
)
def test_one_text_is_no_list(read: Callable[[object], object], value: object) -> None:
    with pytest.raises(PromptError):
        read(value)


def test_parameters_are_one_for_all_or_one_for_each() -> None:
    params = SamplingParams(n=2)
    assert as_params_list(params, 2) == [params, params]
    assert as_params_list((params, SamplingParams()), 2) == [params, SamplingParams()]
    with pytest.raises(InvalidArgumentError, match="got 1 for 2 prompts"):
        as_params_list([params], 2)
    for wrong in (5, {"n": 2}):
        with pytest.raises(InvalidArgumentError, match=f"got {type(wrong).__name__}.*from_dict"):
            as_params_list(wrong, 1)  # type: ignore[arg-type]
