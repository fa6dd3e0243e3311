"""Prompts for a tiny model, and the ids of what it answers."""

from collections.abc import Callable

from octavo import LLM, RequestOutput, SamplingParams

MakeLLM = Callable[..., LLM]
PROMPTS = [
    [i % 101 for i in range(start, start + length)] for start, length in ((3, 1), (5, 4), (9, 17), (3, 40))
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]
