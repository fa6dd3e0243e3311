"""Turns steps into records and records into steps. Other ranks see what steps read of rank 0's requests.

Only what is new is sent: a request once, then the tokens and blocks that it got since its last step. Tokens
come from rank 0, although every rank samples the same ones: so a follower's request is rank 0's, whatever was
aborted, preempted or started over. Rank 0 sends the masks of grammars, too: a grammar may be costly, and
whether it can go on depends on limits that others share, so only one rank follows it.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from octavo.engine.ranks.records import Item, Masks, NewRequest, Step
from octavo.engine.request import Request
from octavo.engine.step.result import StepResult
from octavo.engine.step.scheduled import ScheduledRequest, SchedulerOutput
from octavo.engine.structured.token_masks import TokenMasks
from octavo.errors import EngineError
from octavo.kv import CacheLayout, SequenceBlocks, WindowBlocks
from octavo.outputs import RequestMetrics


class Checksum:
    """Sums up the tokens that a rank samples, so that ranks can compare them.

    Attributes:
        num_steps: steps summed up.
        value: 64 bits.
    """

    def __init__(self) -> None:
        self.num_steps = self.value = 0

    def add(self, result: StepResult) -> None:
        """Add a step's tokens."""
        token_ids = array("q", [sampled.token_id for sampled in result.sampled.values()])
        summed = self.value.to_bytes(8, "little") + token_ids.tobytes()
        self.value = int.from_bytes(blake2b(summed, digest_size=8).digest(), "little")
        self.num_steps += 1


@dataclass(slots=True)
class _Sent:
    """What of a request was sent to followers.

    Attributes:
        number: its name in records.
        num_tokens: tokens sent.
        lists: the lists of blocks that were sent, one for each group of layers.
        num_blocks: how many of each.
    """

    number: int
    num_tokens: int
    lists: tuple[list[int], ...]
    num_blocks: list[int]


class StepWriter:
    """Turns steps into records, on rank 0."""

    def __init__(self) -> None:
        self._sent: dict[Request, _Sent] = {}
        self._released: list[int] = []
        self._next_number = 0

    def write(self, step: SchedulerOutput, checksum: Checksum) -> Step:
        """Return a step's record, given the sum of all tokens that are known."""
        new: list[NewRequest] = []
        items = [self._item(item, new) for item in step.scheduled]
        released, self._released = self._released, []
        return Step(released, new, items, step.block_copies, checksum.num_steps, checksum.value)

    def release(self, request: Request) -> None:
        """Forget a request; followers will with the next step."""
        sent = self._sent.pop(request, None)
        if sent is not None:
            self._released.append(sent.number)

    def reset(self) -> None:
        """Forget every request; followers must, too."""
        self._sent.clear()
        self._released.clear()

    def _item(self, item: ScheduledRequest, new: list[NewRequest]) -> Item:
        request = item.request
        sent = self._sent.get(request)
        if sent is None:
            lists = tuple([] for _ in request.blocks.lists)
            sent = self._sent[request] = _Sent(self._next_number, 0, lists, [0] * len(lists))
            self._next_number += 1
            new.append(_describe(request, sent.number))
        token_ids, lists = request.token_ids[sent.num_tokens :], request.blocks.lists
        are_all = [new is not old for new, old in zip(lists, sent.lists, strict=True)]
        firsts = [0 if is_all else num for is_all, num in zip(are_all, sent.num_blocks, strict=True)]
        sent.num_tokens += len(token_ids)
        sent.lists, sent.num_blocks = lists, list(map(len, lists))
        return Item(
            number=sent.number,
            start=item.start,
            num_new_tokens=item.num_new_tokens,
            samples=item.samples,
            row=request.row,
            token_ids=token_ids.tobytes(),
            block_ids=[
                array("i", block_ids[first:]).tobytes()
                for block_ids, first in zip(lists, firsts, strict=True)
            ],
            are_all=are_all,
        )


def _describe(request: Request, number: int) -> NewRequest:
    return NewRequest(
        number=number,
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        seed=request.seed,
        stop_token_ids=sorted(request.stop_token_ids),
        prompt_logprobs_start=request.prompt_logprobs_start,
    )


class StepReader:
    """Turns records into steps, on a follower."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._requests: dict[int, Request] = {}

    def release(self, number: int) -> Request:
        """Forget a request, and return it."""
        return self._requests.pop(number)

    def read(self, record: Step) -> SchedulerOutput:
        """Return a record's step."""
        for new in record.requests:
            self._requests[new.number] = self._request(new)
        return SchedulerOutput(
            scheduled=[_scheduled(item, self._requests) for item in record.items],
            block_copies=record.block_copies,
        )

    def reset(self) -> None:
        """Forget every request."""
        self._requests.clear()

    def _request(self, new: NewRequest) -> Request:
        """Make a request without tokens or blocks. Steps do not read the fields that are made up here."""
        return Request(
            request_id=str(new.number),
            index=0,
            token_ids=array("i"),
            num_prompt_tokens=new.num_prompt_tokens,
            params=new.params,
            max_num_tokens=2**31,
            seed=new.seed,
            stop_token_ids=frozenset(new.stop_token_ids),
            blocks=SequenceBlocks(
                self._layout.block_size, windows=tuple(map(WindowBlocks, self._layout.windows))
            ),
            metrics=RequestMetrics(arrival_s=0.0, num_prompt_tokens=new.num_prompt_tokens),
            prompt_logprobs_start=new.prompt_logprobs_start,
        )


def _scheduled(item: Item, requests: Mapping[int, Request]) -> ScheduledRequest:
    request = requests[item.number]
    request.row = item.row
    request.token_ids.frombytes(item.token_ids)
    for own, sent, is_all in zip(
        (request.blocks, *request.blocks.windows), item.block_ids, item.are_all, strict=True
    ):
        block_ids = array("i")
        block_ids.frombytes(sent)
        if is_all:
            # A new list object, by which block tables notice that the row must be written anew.
            own.block_ids = block_ids.tolist()
        else:
            own.block_ids.extend(block_ids)
    return ScheduledRequest(request, item.start, item.num_new_tokens, item.samples)


def require_equal(own: Checksum, record: Step) -> None:
    """Check that this rank sampled what rank 0 did.

    Raises:
        EngineError: it did not.
    """
    if (own.num_steps, own.value) != (record.num_steps, record.checksum):
        raise EngineError(
            f"this rank sampled other tokens than rank 0 within {record.num_steps} steps: "
            f"checksum {own.value:016x} after {own.num_steps}, expected {record.checksum:016x}"
        )


class SentMasks(TokenMasks):
    """TokenMasks of rank 0, which sends them to the others."""

    def __init__(self, vocab_size: int, device: torch.device, send: Callable[[Masks], None]) -> None:
        """Keep shapes.

        Args:
            vocab_size: V, width of the logits.
            device: where they are.
            send: sends a record to the other ranks.
        """
        super().__init__(vocab_size, device)
        self._send = send

    def fill(self, requests: Sequence[Request], num_output_tokens: Sequence[int]) -> np.ndarray:
        """See TokenMasks."""
        masks = super().fill(requests, num_output_tokens)
        self._send(Masks(len(masks), masks.tobytes()))
        return masks


class ReceivedMasks(TokenMasks):
    """TokenMasks of another rank, whose requests have no matchers."""

    def __init__(self, vocab_size: int, device: torch.device, receive: Callable[[], Masks]) -> None:
        """Keep shapes.

        Args:
            vocab_size: V, width of the logits.
            device: where they are.
            receive: waits for the next record, which must be Masks.
        """
        super().__init__(vocab_size, device)
        self._receive = receive

    def fill(self, requests: Sequence[Request], num_output_tokens: Sequence[int]) -> np.ndarray:
        """See TokenMasks."""
        record = self._receive()
        return np.frombuffer(record.words, dtype=np.int32).reshape(record.num_rows, -1).copy()
