"""Random operations on the manager, found by hypothesis and by seeded random walks."""

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from kv_arena import LAYERS
from kv_model import ModelledManager

# Few different prompts, so that equal prefixes are the rule rather than the exception.
LENGTHS = st.integers(1, 10)
LASTS = st.sampled_from([0, 0, 1])
SALTS = st.sampled_from([b"", b"", b"", b"tenant"])
PICK = st.integers(0, 59)


def prompt(length: int, last: int) -> list[int]:
    return [0] * (length - 1) + [last]


def num_groups(layers: str) -> int:
    return len(set(LAYERS[layers]))


class ManagerMachine(RuleBasedStateMachine):
    """Hypothesis chooses; `ModelledManager` checks. `num_steps` counts the steps of all runs."""

    num_steps = 0

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        caching=st.sampled_from([True, True, True, False]),
        colliding=st.sampled_from([False, False, True]),
        max_kept=st.integers(0, 6),
        layers=st.sampled_from(["ordinary", *LAYERS]),
    )
    def start(
        self, num_blocks: int, block_size: int, caching: bool, colliding: bool, max_kept: int, layers: str
    ) -> None:
        self.checked = ModelledManager(
            num_blocks * num_groups(layers),
            block_size,
            caching=caching,
            colliding=colliding,
            max_kept=max_kept,
            layers=layers,
        )

    @rule(length=LENGTHS, last=LASTS, salt=SALTS, serve=st.booleans(), keep=st.booleans())
    def add(self, length: int, last: int, salt: bytes, serve: bool, keep: bool) -> None:
        self.checked.add(prompt(length, last), salt, serve, keep)

    @rule(pick=PICK)
    def match(self, pick: int) -> None:
        self.checked.match(pick)

    @rule(pick=PICK, length=PICK)
    def fork(self, pick: int, length: int) -> None:
        self.checked.fork(pick, length)

    @rule(pick=PICK, length=LENGTHS, last=LASTS, serve=st.booleans())
    def append(self, pick: int, length: int, last: int, serve: bool) -> None:
        self.checked.append(pick, prompt(length, last), serve)

    @rule(pick=PICK, chunk=LENGTHS, reserve=st.integers(0, 3), commit=st.booleans())
    def compute(self, pick: int, chunk: int, reserve: int, commit: bool) -> None:
        self.checked.compute(pick, chunk, reserve, commit)

    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        self.checked.commit(pick)

    @rule(pick=PICK, chunk=LENGTHS, any_part=st.booleans())
    def prefill(self, pick: int, chunk: int, any_part: bool) -> None:
        self.checked.prefill(pick, chunk, any_part)

    @rule(pick=PICK)
    def hide(self, pick: int) -> None:
        self.checked.hide_some(pick)

    @rule(picks=st.lists(PICK, min_size=1, max_size=4), chunk=LENGTHS, ahead=st.booleans())
    def step(self, picks: list[int], chunk: int, ahead: bool) -> None:
        self.checked.step(picks, chunk, ahead)

    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def fail_step(self, picks: list[int]) -> None:
        self.checked.fail_step(picks)

    @rule(pick=PICK, length=PICK)
    def truncate(self, pick: int, length: int) -> None:
        self.checked.truncate(pick, length)

    @rule(pick=PICK)
    def preempt(self, pick: int) -> None:
        self.checked.preempt(pick)

    @rule(pick=PICK)
    def finish_or_abort(self, pick: int) -> None:
        self.checked.finish_or_abort(pick)

    @rule(share=st.sampled_from([1, 2, 4]))
    def evict(self, share: int) -> None:
        self.checked.evict(share)

    @rule()
    def reset(self) -> None:
        self.checked.reset()

    @invariant()
    def check(self) -> None:
        type(self).num_steps += 1
        self.checked.check()

    def teardown(self) -> None:
        if hasattr(self, "checked"):
            self.checked.finish_all()


def test_hypothesis_finds_no_sequence_that_reads_what_is_not_its_own() -> None:
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(
            max_examples=80, stateful_step_count=50, derandomize=True, database=None, deadline=None
        ),
    )
    assert ManagerMachine.num_steps >= 2000


def random_step(checked: ModelledManager, rng: random.Random) -> None:
    """Serving is the common case; the rest happens in between."""
    pick, tokens = rng.randrange(60), prompt(rng.randint(1, 10), rng.choice([0, 0, 1]))
    steps: list[tuple[int, Callable[[], None]]] = [
        (
            4,
            lambda: checked.add(
                tokens, rng.choice([b"", b"", b"tenant"]), rng.random() < 0.5, rng.random() < 0.6
            ),
        ),
        (4, lambda: checked.append(pick, tokens, rng.random() < 0.5)),
        (4, lambda: checked.compute(pick, rng.randint(1, 10), rng.randint(0, 3), rng.random() < 0.7)),
        (2, lambda: checked.match(pick)),
        (2, lambda: checked.commit(pick)),
        (6, lambda: checked.prefill(pick, rng.randint(1, 10), rng.random() < 0.7)),
        (2, lambda: checked.hide_some(pick)),
        (4, lambda: checked.step(rng.sample(range(60), 3), rng.randint(1, 10), rng.random() < 0.5)),
        (1, lambda: checked.fail_step([pick, pick + 1])),
        (3, lambda: checked.fork(pick, rng.randrange(60))),
        (2, lambda: checked.truncate(pick, rng.randrange(60))),
        (2, lambda: checked.preempt(pick)),
        (2, lambda: checked.finish_or_abort(pick)),
        (1, lambda: checked.evict(rng.choice([1, 2, 4]))),
        (1, checked.reset),
    ]
    rng.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()


def walk(number: int, layers: str, num_steps: int = 150) -> Counter[str]:
    rng = random.Random(number)
    checked = ModelledManager(
        rng.randint(3, 12) * num_groups(layers),
        number % 4 + 1,
        caching=number % 5 > 0,
        colliding=number % 3 == 0,
        max_kept=number % 4 * 3,
        layers=layers,
    )
    for _ in range(num_steps):
        random_step(checked, rng)
        checked.check()
    checked.finish_all()
    return checked.seen


def test_random_walks_reach_every_kind_of_event() -> None:
    seen: Counter[str] = Counter()
    for number in range(120):
        seen += walk(number, "ordinary")
    events = (
        "hit",
        "attached at once",
        "de-duplicated",
        "collided",
        "copy on write",
        "truncate refused",
        "evictions",
        "kept passed over",
    )
    assert all(seen[event] >= 50 for event in events), seen
    # There are few blocks left by then.
    assert seen["kept evicted"] >= 20, seen


def test_random_walks_over_groups_of_layers_reach_every_kind_of_event() -> None:
    seen: Counter[str] = Counter()
    names = [name for name in LAYERS if name != "ordinary"]
    for number in range(12 * len(names)):
        seen += walk(number, names[number % len(names)])
    events = (
        "hit of a window",
        "attached at once",
        "de-duplicated",
        "collided",
        "copy on write",
        "truncate refused",
        "evictions",
        "hidden",
        "part",
        "window lost",
        "fork refused",
    )
    assert all(seen[event] >= 50 for event in events), seen
    assert seen["hit before a lost window"] >= 20, seen
    assert seen["stayed its own"] >= 5, seen
