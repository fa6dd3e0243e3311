"""PagedSequences in random order: found by hypothesis and by seeded random walks."""

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from kv_paged_model import ModelledSequences

NAMES = st.integers(0, 4)
# Few different tokens, so that equal prefixes and equal continuations are the rule.
TOKENS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=9)
PERCENT = st.integers(0, 100)


class PagedMachine(RuleBasedStateMachine):
    """Hypothesis chooses; `ModelledSequences` checks."""

    @initialize(
        num_blocks=st.integers(2, 14), size=st.integers(1, 5), caching=st.sampled_from([True, True, False])
    )
    def start(self, num_blocks: int, size: int, caching: bool) -> None:
        self.modelled = ModelledSequences(num_blocks, size, caching=caching)

    @rule(name=NAMES, tokens=TOKENS)
    def alloc(self, name: int, tokens: list[int]) -> None:
        self.modelled.alloc(name, tokens)

    @rule(name=NAMES, tokens=TOKENS)
    def update(self, name: int, tokens: list[int]) -> None:
        self.modelled.update(name, tokens)

    @rule(parent=NAMES, child=NAMES, percent=PERCENT)
    def fork(self, parent: int, child: int, percent: int) -> None:
        self.modelled.fork(parent, child, percent)

    @rule(name=NAMES, percent=PERCENT)
    def truncate(self, name: int, percent: int) -> None:
        self.modelled.truncate(name, percent)

    @rule(name=NAMES)
    def commit(self, name: int) -> None:
        self.modelled.commit(name)

    @rule(name=NAMES)
    def free(self, name: int) -> None:
        self.modelled.free(name)

    @invariant()
    def check(self) -> None:
        self.modelled.check()

    def teardown(self) -> None:
        if hasattr(self, "modelled"):
            self.modelled.free_all()


def test_sequences_read_their_own_tokens_in_any_order_of_calls() -> None:
    run_state_machine_as_test(
        PagedMachine,
        settings=settings(
            max_examples=60, stateful_step_count=40, derandomize=True, database=None, deadline=None
        ),
    )


def random_step(modelled: ModelledSequences, rng: random.Random) -> None:
    name, other, percent = rng.randrange(5), rng.randrange(5), rng.randrange(101)
    tokens = rng.choices([0, 0, 0, 1], k=rng.randint(1, 9))
    steps: list[tuple[int, Callable[[], None]]] = [
        (3, lambda: modelled.alloc(name, tokens)),
        (4, lambda: modelled.update(name, tokens[:4])),
        (3, lambda: modelled.fork(name, other, percent)),
        (3, lambda: modelled.truncate(name, percent)),
        (2, lambda: modelled.commit(name)),
        (1, lambda: modelled.free(name)),
    ]
    rng.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()


def test_random_walks_reach_every_kind_of_event() -> None:
    rng = random.Random(0)
    seen: Counter[str] = Counter()
    for walk in range(150):
        modelled = ModelledSequences(rng.randint(2, 14), walk % 5 + 1, caching=walk % 4 > 0)
        for _ in range(80):
            random_step(modelled, rng)
            modelled.check()
        modelled.free_all()
        seen += modelled.seen
    events = ("prefix attached", "joined", "shared", "truncate copied", "truncate in place")
    refused = ("alloc refused", "update refused", "fork refused", "truncate refused")
    assert all(seen[event] >= 10 for event in events + refused), seen
