"""Requests with grammars, and what their masks allow."""

from array import array

import numpy as np
import torch

from octavo.engine.request import Request
from octavo.engine.structured import Grammar, Matcher
from octavo.engine.structured.token_masks import TokenMasks
from octavo.kv import KVCacheManager
from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams, StructuredOutput

VOCAB = 49152 + 70
"""The tokenizer's 49,152 ids, and padding that ends within a word of 32 bits."""


EOS = frozenset({0, 2})
CPU = torch.device("cpu")


def a_request(grammar: Grammar | None, output: list[int], **fields: object) -> Request:
    """A request with a prompt of one token that has generated `output`."""
    structured = None if grammar is None else StructuredOutput(json_object=True)
    params = SamplingParams.from_dict(fields | {"structured": structured})
    stop_token_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else EOS)
    made = Request(
        request_id="r",
        index=0,
        token_ids=array("i", [1]),
        num_prompt_tokens=1,
        params=params,
        max_num_tokens=100,
        seed=0,
        stop_token_ids=stop_token_ids,
        blocks=KVCacheManager(1, 1).new_sequence(),
        metrics=RequestMetrics(),
        grammar=grammar,
    )
    for token_id in output:
        made.append_output(token_id)
    return made


def allowed(*requests: Request) -> list[list[int]]:
    """What a mask allows each request next."""
    masks = TokenMasks(VOCAB, CPU).fill(requests, [request.num_output_tokens for request in requests])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, 49152:].any(), "padding"
    return [np.flatnonzero(row).tolist() for row in bits]


def takes(matcher: Matcher, token_ids: list[int]) -> bool:
    """Feed a whole output; True if the grammar takes it and may stop there."""
    return all(matcher.accept(i) is None for i in token_ids) and bool(matcher.raw.is_accepting())
