"""Prompts for a tiny model, and the ids of what it answers."""

from collections.abc import Callable

from octavo import LLM, RequestOutput, SamplingParams

MakeLLM = Callable[..., LLM]
PROMPTS = [
    [i % 101 for i in range(start, start + length)] for start, length in ((3, 1), (5, 4), (9, 17), (3, 40))
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Log-probabilities, penalties and draws need tensors of their own.
DRAWN = SamplingParams(seed=7, max_tokens=6, ignore_eos=True, repetition_penalty=1.2, logprobs=2, top_p=0.9)
# Options of engines that multiply and attend in different ways on a CPU.
OPTIONS = [{}, {"quantization": "int8"}, {"quantization": "bf16"}, {"attention_impl": "torch"}]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def answers(llm: LLM) -> list[list[list[int]]]:
    return [ids(llm.generate(PROMPTS, params)) for params in (GREEDY, DRAWN)]
