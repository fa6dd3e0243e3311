"""A scheduler over a real block pool with a fake model whose next token is a hash of its whole past.

The fake model reads the past back through the block table, cell by cell, so a wrong block, a lost copy or
a reused block shows as a wrong token. No torch: thousands of schedules a second.
"""

import zlib
from array import array
from collections import deque
from collections.abc import Sequence

from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.engine.step.pace import StepTime
from octavo.engine.step.scheduled import ScheduledRequest, SchedulerOutput
from octavo.kv import KVCacheManager
from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams


def next_token(token_ids: Sequence[int]) -> int:
    return zlib.crc32(repr(list(token_ids)).encode()) % 50


def expected_tokens(prompt: list[int], num_new: int) -> "array[int]":
    token_ids = array("i", prompt)
    for _ in range(num_new):
        token_ids.append(next_token(token_ids))
    return token_ids


class FixedTime(StepTime):
    """Says that as many prompt tokens fit into any step."""

    def __init__(self, most: int) -> None:
        super().__init__(1.0)
        self.most = most

    def max_prompt_tokens(self, num_decode_keys: int, num_keys_before: int) -> int:
        return self.most


class FakeEngine:
    """Runs the scheduler; cells[slot] holds the token stored there.

    With `ahead` steps are scheduled before the last one's tokens are known: only the device knows them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool = True,
        ahead: int = 0,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.ahead = ahead
        self.step_time = None if max_prompt_tokens is None else FixedTime(max_prompt_tokens)
        self.in_flight: deque[tuple[SchedulerOutput, dict[Request, int]]] = deque()
        self.device_tokens: dict[Request, array[int]] = {}
        self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.cells: dict[int, int] = {}
        self.num_computed = 0
        self.requests: list[Request] = []
        self.steps: list[SchedulerOutput] = []

    def add(self, name: str, prompt: list[int], max_tokens: int, n: int = 1) -> list[Request]:
        params = SamplingParams(n=n, max_tokens=max_tokens)
        requests = [
            Request(
                request_id=name,
                index=index,
                token_ids=array("i", prompt),
                num_prompt_tokens=len(prompt),
                params=params,
                max_num_tokens=len(prompt) + max_tokens,
                seed=0,
                stop_token_ids=frozenset(),
                blocks=self.manager.new_sequence(),
                metrics=RequestMetrics(),
            )
            for index in range(n)
        ]
        requests[0].forks = requests[1:]
        self.requests += requests
        self.scheduler.add(requests[0])
        return requests

    def step(self, *, fails: str = "") -> SchedulerOutput:
        """Schedule and launch a step, process what is due; the step due may fail at "launch" or "wait"."""
        output = self.scheduler.schedule(self.step_time)
        self.steps.append(output)
        self._copy(output)
        if fails == "launch":
            self._process_all_but(0)
            self._fail(output)
            return output
        for item in output.scheduled:
            self._store(item)
        self.in_flight.append((output, {i.request: self._sample(i) for i in output.scheduled}))
        self.scheduler.launch(output)
        if fails == "wait" and len(self.in_flight) > self.ahead:
            self._fail(self.in_flight.popleft()[0])
        self._process_all_but(self.ahead if output.scheduled else 0)
        self.manager.check_invariants()
        return output

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                return
            waits = len(self.in_flight) > 0
            output = self.step()
            assert output.scheduled or output.finished or waits, "a step with work did nothing"
        raise AssertionError("the scheduler makes no progress")

    def _copy(self, output: SchedulerOutput) -> None:
        size = self.manager.block_size
        for source, destination in output.block_copies:
            for offset in range(size):
                self.cells[destination * size + offset] = self.cells.get(source * size + offset, -1)

    def _slot(self, request: Request, position: int) -> int:
        index, offset = divmod(position, self.manager.block_size)
        return request.blocks.block_ids[index] * self.manager.block_size + offset

    def _store(self, item: ScheduledRequest) -> None:
        """The device's part, for all requests of a step before any is sampled from."""
        request = item.request
        token_ids = self.device_tokens.setdefault(request, request.token_ids[:])
        self.num_computed += item.num_new_tokens
        for position in range(item.start, item.end):
            self.cells[self._slot(request, position)] = token_ids[position]

    def _sample(self, item: ScheduledRequest) -> int:
        request, token_ids = item.request, self.device_tokens[item.request]
        if not item.samples:
            return -1
        past = array("i", [self._read(request, position) for position in range(item.end)])
        assert past == token_ids, "the cache does not hold the request's own tokens"
        token_ids.append(next_token(past))
        return token_ids[-1]

    def _process_all_but(self, num_kept: int) -> None:
        while len(self.in_flight) > num_kept:
            self._process(*self.in_flight.popleft())

    def _fail(self, output: SchedulerOutput) -> None:
        """What the step should have written is garbage."""
        for item in output.scheduled:
            if not item.request.is_finished:
                item.request.finish("error")
                self.scheduler.finish(item.request)
        self.in_flight.clear()
        self.manager.reset()
        unfinished = [request for request in self.requests if not request.is_finished]
        for request in unfinished:
            request.blocks = self.manager.new_sequence()
        self.scheduler.reset(unfinished)
        self.cells.clear()
        self.device_tokens.clear()
        self.manager.check_invariants()
        assert self.manager.stats().num_free == self.manager.num_blocks

    def _process(self, output: SchedulerOutput, sampled: dict[Request, int]) -> None:
        for item in output.scheduled:
            self.scheduler.commit(item)
        for item in output.scheduled:
            request = item.request
            if item.samples and not request.is_finished:
                request.append_output(sampled[request])
                assert request.token_ids == self.device_tokens[request][: len(request.token_ids)]
                if request.finish_reason:
                    self.scheduler.finish(request)

    def _read(self, request: Request, position: int) -> int:
        return self.cells[self._slot(request, position)]
