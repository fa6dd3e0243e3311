"""Which requests run in the next step, with how many tokens each. Pure bookkeeping: no torch.

There is no prefill phase and no decode phase. Every request has `num_computed_tokens` and wants to
catch up with its tokens; each step deals out one token budget:

    1. running requests that need one token (decoding), oldest first
    2. running requests that are still catching up (chunked prefill)
    3. waiting requests, by priority, then in order of arrival

so a long prompt never starves decoding, and decoding never blocks admission. While somebody reads tokens as
they come, prompts may get less than the budget: every token waits for them. Without such a limit, long
prompts that are read along come one after the other (step/scheduled.py).
Source: the computed-tokens view of scheduling follows vLLM v1; stall-free chunking follows Sarathi-Serve
(Agrawal et al., 2024).
"""

import time
from collections import deque
from collections.abc import Iterable

from octavo.engine.request import Request, RequestStatus
from octavo.engine.step.pace import StepTime
from octavo.engine.step.scheduled import JoinPolicy, ScheduledRequest, SchedulerOutput
from octavo.kv import KVCacheManager


class Scheduler:
    """Admits, runs, preempts and retires requests over one block pool.

        schedule ──► launch ──► (the device works) ──► commit, with the sampled tokens
                        |                          '─► or reset, when it failed

    Between launch and commit the next step may be scheduled: the token that a request is about to get then
    counts as one it has. Only a request with a grammar waits for its token, which says what may follow.

    Blocks of tokens whose ids are known are published as soon as they are scheduled, so that an equal prompt
    attaches to them in the same step: each layer stores all keys and values before it reads any.

    Progress: the oldest running request is never preempted for a younger one, and a request that holds
    the whole pool by itself is finished rather than waited for, so every step that has work computes a token.
    """

    def __init__(self, manager: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._pending_copies: list[tuple[int, int]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request (a leader brings its forks along) behind all of its priority.

        Requests that have begun, such as preempted ones, stay in front.
        """
        waiting, at = self.waiting, len(self.waiting)
        while at and waiting[at - 1].priority > request.priority and not waiting[at - 1].has_begun:
            at -= 1
        waiting.insert(at, request)

    def schedule(self, step_time: StepTime | None = None) -> SchedulerOutput:
        """Deal out one step's token budget; may preempt, admit, and finish requests for capacity.

        Args:
            step_time: estimates that keep steps short while somebody reads along; None: only numbers of
                tokens count.
        """
        output = SchedulerOutput()
        num_preemptions = self.num_preemptions
        budget = self._schedule_decodes(output, self.max_num_batched_tokens)
        output.num_decoding = len(output.scheduled)
        if (
            step_time is not None
            and step_time.has_limit
            and any(item.request.is_read_along for item in output.scheduled)
        ):
            most = step_time.max_prompt_tokens(output.work.num_decode_keys, self._num_keys_before())
            if most is not None:
                budget, output.is_limited = min(budget, most), True
        policy = JoinPolicy(output, step_time)
        budget = self._schedule_catching_up(output, budget, policy)
        if self.num_preemptions == num_preemptions and not output.finished:
            self._admit(output, budget, policy)
        output.is_read_along = any(item.request.is_read_along for item in output.scheduled)
        output.block_copies, self._pending_copies = self._pending_copies, []
        return output

    def finish(self, request: Request) -> None:
        """Retire a request in any state and free what it holds; its forks go on without it."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.waiting.extendleft(reversed(request.forks))
        request.forks = []
        request.status = RequestStatus.FINISHED

    def launch(self, output: SchedulerOutput) -> None:
        """Record that a step is in flight: the next one may be scheduled."""
        for item in output.scheduled:
            item.request.num_computed_tokens = item.end
            item.request.num_pending_tokens += item.samples

    def commit(self, item: ScheduledRequest) -> None:
        """Record that a step is done: full blocks become hit-able, forks of a prompt start.

        A request that lost its blocks in the meantime (preempted, aborted) has nothing to commit.
        """
        request = item.request
        request.num_pending_tokens -= item.samples
        if request.status is not RequestStatus.RUNNING:
            return
        self.manager.commit(request.blocks, request.token_ids, item.end)
        if request.forks and item.end >= request.num_prompt_tokens:
            self._start_forks(request)

    def reset(self, requests: Iterable[Request]) -> None:
        """Forget the steps in flight, because one failed or was interrupted: all these requests wait.

        Args:
            requests: the unfinished ones, in order of arrival. Their blocks must be new and empty,
                and the manager reset.
        """
        self.running = []
        self._free_rows = list(range(self._max_num_seqs - 1, -1, -1))
        self._pending_copies = []
        self.waiting = deque(sorted(requests, key=lambda request: (not request.has_begun, request.priority)))
        for request in self.waiting:
            request.start_over()

    def _schedule_decodes(self, output: SchedulerOutput, budget: int) -> int:
        # Prompts get all their blocks at admission, so only decoding can run out of blocks.
        for request in tuple(self.running):
            if budget == 0:
                break
            num_tokens = request.num_tokens
            start = num_tokens - 1
            if request.num_computed_tokens != start or num_tokens >= request.max_num_tokens:
                continue
            if request.waits_for_token:
                continue
            if request.status is RequestStatus.RUNNING and self._grow(request, num_tokens, output):
                output.scheduled.append(ScheduledRequest(request, start, 1, True))
                budget -= 1
        return budget

    def _num_keys_before(self) -> int:
        """Return how many tokens of the next unfinished prompt are in the cache."""
        return next((r.num_computed_tokens for r in self.running if r.num_tokens_to_compute > 1), 0)

    def _grow(self, request: Request, num_tokens: int, output: SchedulerOutput) -> bool:
        """Make room for all tokens of a request, preempting the youngest; False if it waits or ends."""
        if num_tokens <= request.blocks.reach:
            return True
        if not request.forks:
            self.manager.hide(request.blocks, request.num_computed_tokens)
        while not self.manager.allocate(request.blocks, num_tokens):
            if self.running[-1] is not request:
                self._preempt(self.running[-1])
            elif len(self.running) > 1:
                self._preempt(request)
                return False
            elif request.num_pending_tokens > 0:
                return False
            elif self.manager.can_ever_fit(num_tokens):
                # What it shares lies in more pages than it needs by itself: it starts over, and finds fewer.
                self._preempt(request)
                return False
            else:
                self._end_for_lack_of_blocks(request, output)
                return False
        return True

    def _end_for_lack_of_blocks(self, request: Request, output: SchedulerOutput) -> None:
        """End a request that needs more tokens than the whole pool holds."""
        request.finish(
            "length", message=f"the KV cache is full: it holds {self.manager.capacity} tokens in all"
        )
        self.finish(request)
        output.finished.append(request)

    def _schedule_catching_up(self, output: SchedulerOutput, budget: int, policy: JoinPolicy) -> int:
        for request in tuple(self.running):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue
            is_behind = request.num_tokens_to_compute > 1
            if is_behind and policy.allows(request, request.num_computed_tokens, budget):
                budget -= self._schedule_known(request, output, self._widen(request, output, budget))
        return budget

    def _widen(self, request: Request, output: SchedulerOutput, budget: int) -> int:
        """Make room in layers with windows for the next tokens of a prompt, preempting the youngest.

        Returns:
            How many of them fit, at most the budget; 0: it waits.
        """
        blocks, start = request.blocks, request.num_computed_tokens
        end = start + min(request.num_tokens_to_compute, budget)
        if end <= blocks.reach:
            return budget
        self.manager.hide(blocks, start)
        while (reach := self.manager.allocate_part(blocks, request.num_tokens, end, start)) < 0:
            youngest = self.running[-1]
            if youngest is request or any(item.request is youngest for item in output.scheduled):
                # The others give room in time; a request by itself always gets a block.
                return max(0, blocks.reach - start)
            self._preempt(youngest)
        return reach - start

    def _schedule_known(self, request: Request, output: SchedulerOutput, budget: int) -> int:
        """Schedule tokens whose ids are known, and publish their blocks; returns how many."""
        if budget == 0:
            return 0
        item = ScheduledRequest.next_of(request, budget)
        output.scheduled.append(item)
        self.manager.publish(request.blocks, request.token_ids, item.end)
        return item.num_new_tokens

    def _admit(self, output: SchedulerOutput, budget: int, policy: JoinPolicy) -> None:
        deferred: list[Request] = []
        while self.waiting and self._free_rows and budget > 0:
            request = self.waiting.popleft()
            if request.num_pending_tokens > 0:
                deferred.append(request)
                continue
            if not self.manager.can_ever_fit(request.num_tokens):
                # It grew so far before it was preempted, or before a step failed.
                self._end_for_lack_of_blocks(request, output)
                continue
            room = self._start(request, budget, policy)
            if room == 0:
                deferred.append(request)
                break
            budget -= self._schedule_known(request, output, room)
        self.waiting.extendleft(reversed(deferred))

    def _start(self, request: Request, budget: int, policy: JoinPolicy) -> int:
        """Attach cached blocks, allocate blocks for the other known tokens and run.

        Returns:
            How many tokens it may compute in this step, at most the budget; 0: not now.
        """
        manager = self.manager
        num_cached = manager.match_prefix(request.blocks, request.token_ids, request.max_cached_tokens)
        reach = -1
        if policy.allows(request, num_cached, budget):
            # Layers with windows make room only for the tokens of this step.
            end = min(request.num_tokens, num_cached + budget)
            reach = manager.allocate_part(request.blocks, request.num_tokens, end, num_cached)
        if reach < 0:
            manager.free(request.blocks)
            return 0
        if request.metrics.first_scheduled_s is None:
            request.metrics.first_scheduled_s = time.monotonic()
        if request.num_output_tokens == 0:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            if request.index == 0:
                request.metrics.num_cached_tokens = request.num_cached_tokens
        self._run(request, num_cached)
        return reach - num_cached

    def _run(self, request: Request, num_computed_tokens: int) -> None:
        request.num_computed_tokens = num_computed_tokens
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        self.running.append(request)

    def _start_forks(self, leader: Request) -> None:
        """Start the other completions of an n > 1 request on the leader's blocks.

        A fork recomputes only the last prompt token: so it has logits to sample from, and a copy of the
        partly filled last block to write to.
        """
        forks, leader.forks = leader.forks, []
        for position, fork in enumerate(forks):
            forked = None
            if self._free_rows:
                forked = self.manager.fork(leader.blocks, leader.num_prompt_tokens - 1)
            if forked is None:
                self.waiting.extendleft(reversed(forks[position:]))
                return
            fork.blocks, copies = forked
            self._pending_copies += copies
            fork.num_cached_tokens = leader.num_prompt_tokens - 1
            self._run(fork, leader.num_prompt_tokens - 1)

    def _preempt(self, request: Request) -> None:
        """Take row and blocks from the youngest request, which later recomputes or finds its tokens."""
        assert request is self.running[-1]
        self.running.pop()
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._free_rows.append(request.row)
        request.row = -1
        if self._pending_copies:
            # A freed page may be handed out again before the copy runs: the copy must not reach it.
            freed = set(self.manager.store.held_pages(request.blocks))
            self._pending_copies = [copy for copy in self._pending_copies if copy[1] not in freed]
        self.manager.free(request.blocks)
