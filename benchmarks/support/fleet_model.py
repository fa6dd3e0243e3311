"""A fleet of replicas as a model in virtual time: caches, queues and conversations, without an engine.

A replica prefills one prompt after the other at a fixed rate and writes answers beside that, each token in a
fixed time. Its cache forgets the messages used longest ago, the last ones of a conversation first.
"""

import heapq
import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from octavo.router import Marks, Report
from octavo.router.ledger import MAX_REPORTED_MARKS
from octavo.router.marks import DIGEST_BYTES

BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Load:
    """What users do, and what replicas can."""

    num_replicas: int = 64
    num_users: int = 10_000
    num_systems: int = 100
    arrival_s: float = 60.0
    think_s: float = 8.0
    max_turns: int = 8
    prefill_per_s: float = 8_000.0
    decode_s: float = 0.015
    cache_tokens: int = 200_000
    report_s: float = 1.0
    seed: int = 0


@dataclass
class Prompt:
    """A prompt: [messages] digests of it up to each message, and tokens of each message."""

    user: int
    digests: list[bytes]
    tokens: list[int]

    def marks(self) -> Marks:
        """Return it as a router sees it."""
        ends = tuple(itertools.accumulate(BYTES_PER_TOKEN * tokens for tokens in self.tokens))
        return Marks(tuple(self.digests), ends, ends[-1])


class Conversation:
    """A user's messages so far, behind a system prompt that others have, too."""

    def __init__(self, user: int, load: Load, dice: random.Random) -> None:
        # The first system prompts are the most popular ones.
        system = min(int(dice.paretovariate(0.7)) - 1, load.num_systems - 1)
        self.num_turns = dice.randint(1, load.max_turns)
        self._user = user
        self._dice = dice
        self._digests: list[bytes] = []
        self._tokens: list[int] = []
        self._add(f"system {system}", 500 + 97 * (system * 37 % 31))

    def ask(self) -> Prompt:
        """Return the next prompt."""
        self._add(f"user {self._user} {len(self._tokens)}", self._dice.randint(20, 400))
        return Prompt(self._user, list(self._digests), list(self._tokens))

    def note_report(self, num_tokens: int) -> None:
        """Take the reply to it."""
        self._add(f"reply {self._user} {len(self._tokens)}", num_tokens)

    def _add(self, text: str, num_tokens: int) -> None:
        before = self._digests[-1] if self._digests else b""
        self._digests.append(blake2b(before + text.encode(), digest_size=DIGEST_BYTES).digest())
        self._tokens.append(num_tokens)


@dataclass
class ModelReplica:
    """One replica."""

    load: Load
    free_at: float = 0.0
    busy_s: float = 0.0
    num_open: int = 0
    held: "OrderedDict[bytes, tuple[int, int]]" = field(default_factory=OrderedDict)
    num_tokens: int = 0

    def take(self, prompt: Prompt, now: float) -> tuple[int, float]:
        """Return how many tokens of a prompt are cached, and when its first token comes."""
        cached = 0
        for digest, tokens in zip(prompt.digests, prompt.tokens, strict=True):
            if digest not in self.held:
                break
            cached += tokens
        self._hold(prompt)
        seconds = (sum(prompt.tokens) - cached) / self.load.prefill_per_s
        self.busy_s += seconds
        self.free_at = max(now, self.free_at) + seconds
        return cached, self.free_at

    def _hold(self, prompt: Prompt) -> None:
        whole = sum(prompt.tokens)
        for digest, tokens in zip(reversed(prompt.digests), reversed(prompt.tokens), strict=True):
            if digest not in self.held:
                self.num_tokens += tokens
            self.held[digest] = (tokens, whole)
            self.held.move_to_end(digest)
            whole -= tokens
        while self.num_tokens > self.load.cache_tokens:
            self.num_tokens -= self.held.popitem(last=False)[1][0]

    def report(self) -> Report:
        """Return what it tells a router."""
        newest = list(itertools.islice(reversed(self.held.items()), MAX_REPORTED_MARKS))
        return Report(
            "ready",
            b"".join(digest for digest, _ in newest),
            tuple(whole for _, (_, whole) in newest),
            free_tokens=self.load.cache_tokens,
            num_running=self.num_open,
            bytes_per_token=BYTES_PER_TOKEN,
        )


class Policy:
    """Chooses a replica; the base class also says what it may be told."""

    name = ""

    def choose(self, prompt: Prompt, replicas: list[ModelReplica], now: float) -> int:
        """Return the index of a replica."""
        raise NotImplementedError

    def note_first_token(self, user: int) -> None:
        """Take note that a user's prompt is computed."""

    def note_end(self, user: int) -> None:
        """Take note that a user's answer has ended."""

    def note_report(self, replicas: list[ModelReplica], now: float) -> None:
        """Take what the replicas report."""


@dataclass
class Outcome:
    """What a policy came to.

    Attributes:
        first_token_s: of each request, in virtual time.
        busy_s: of each replica.
        router_s: CPU time of all choices.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    router_s: float = 0.0


class Simulation:
    """Runs one policy to the end of all conversations."""

    def __init__(self, load: Load, policy: Policy) -> None:
        self._load = load
        self._policy = policy
        self._dice = random.Random(load.seed)
        self._replicas = [ModelReplica(load) for _ in range(load.num_replicas)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()
        self._num_talking = load.num_users
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Return what came of it."""
        for user in range(self._load.num_users):
            # Each has dice of its own: what users do is the same under every policy.
            dice = random.Random(self._load.seed * 1_000_003 + user)
            talk = Conversation(user, self._load, dice)
            self._at(dice.uniform(0, self._load.arrival_s), lambda now, t=talk, d=dice: self._ask(t, d, now))
        self._at(0.0, self._hear)
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        self._outcome.busy_s = [replica.busy_s for replica in self._replicas]
        return self._outcome

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), act))

    def _ask(self, talk: Conversation, dice: random.Random, now: float) -> None:
        prompt, outcome = talk.ask(), self._outcome
        begun = time.thread_time()
        index = self._policy.choose(prompt, self._replicas, now)
        outcome.router_s += time.thread_time() - begun
        replica = self._replicas[index]
        cached, first_s = replica.take(prompt, now)
        replica.num_open += 1
        outcome.num_requests += 1
        outcome.prompt_tokens += sum(prompt.tokens)
        outcome.cached_tokens += cached
        outcome.first_token_s.append(first_s - now)
        num_tokens = dice.randint(50, 400)
        self._at(first_s, lambda now: self._policy.note_first_token(prompt.user))
        end_s = first_s + num_tokens * self._load.decode_s
        self._at(end_s, lambda now: self._end(talk, dice, replica, num_tokens, prompt.user, now))

    def _end(
        self,
        talk: Conversation,
        dice: random.Random,
        replica: ModelReplica,
        num_tokens: int,
        user: int,
        now: float,
    ) -> None:
        replica.num_open -= 1
        self._policy.note_end(user)
        talk.note_report(num_tokens)
        talk.num_turns -= 1
        if talk.num_turns:
            pause_s = dice.expovariate(1 / self._load.think_s)
            self._at(now + pause_s, lambda now: self._ask(talk, dice, now))
        else:
            self._num_talking -= 1

    def _hear(self, now: float) -> None:
        self._policy.note_report(self._replicas, now)
        if self._num_talking:
            self._at(now + self._load.report_s, self._hear)
