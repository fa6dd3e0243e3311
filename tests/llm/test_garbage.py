"""Full garbage collections wait; thresholds come back, whatever happens."""

import gc
import weakref

import pytest

from octavo.garbage import StepGarbage, all_lives_on, no_full_collections, paused


def fail() -> None:
    assert gc.get_threshold()[2] > 1000
    raise KeyError


def test_full_collections_wait_and_thresholds_come_back() -> None:
    before = gc.get_threshold()
    assert before[2] < 1000
    with pytest.raises(KeyError), no_full_collections():
        fail()
    assert gc.get_threshold() == before


def test_a_run_leaves_no_cycles(tiny: object) -> None:
    """What a run makes is freed as it ends: nothing waits for a full collection."""
    llm = tiny(num_blocks=64)  # type: ignore[operator]
    prompts = [[1, 2, 3, 4 + i] for i in range(8)]
    llm.generate(prompts)
    gc.collect()
    gc.disable()
    try:
        outputs = llm.generate(prompts)
        del outputs
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_steps_collect_when_they_choose_to() -> None:
    """A cycle stays while collections are paused, and goes when enough young objects are there."""

    class Node:
        pass

    def make_cycle() -> "weakref.ref[Node]":
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        return weakref.ref(node)

    garbage = StepGarbage()
    assert gc.isenabled()
    with paused():
        cycle = make_cycle()
        kept: list[list[int]] = [[] for _ in range(9_000)]
        garbage.collect()
        assert cycle() is not None, "too few objects to look through"
        kept += [[] for _ in range(9_000)]
        assert cycle() is not None, "Python would have collected long ago"
        garbage.collect()
        assert cycle() is None
    assert gc.isenabled()


def test_what_lives_on_is_not_looked_through() -> None:
    before = gc.get_freeze_count()
    try:
        with all_lives_on():
            assert not gc.isenabled()
            made = [[] for _ in range(10)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()
