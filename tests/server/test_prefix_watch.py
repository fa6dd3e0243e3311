"""Long conversations whose turns stop beginning alike: who is warned of, once, and what the log gets."""

import logging
import random
from collections.abc import Callable

import pytest

from octavo.engine.prompt_reader import TokenIds
from octavo.server.prefix_watch import PrefixWatch

Note = Callable[[object, list[int]], int]


@pytest.fixture
def note(caplog: pytest.LogCaptureFixture) -> Note:
    """Show a prompt to a watch; return how many warnings there are now."""
    watch = PrefixWatch(None)

    def show(client: object, token_ids: list[int]) -> int:
        with caplog.at_level(logging.WARNING, "octavo.server"):
            watch.note(client, TokenIds.of(token_ids))
        return len(caplog.messages)

    return show


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5000) for _ in range(length)]


def test_a_conversation_that_goes_on_is_fine(note: Note) -> None:
    turns = text(4000)
    for length in range(1000, 4000, 300):
        assert note("a", turns[:length]) == 0


@pytest.mark.parametrize("head", [[1], [1, 2, 3, 4, 5], []])
def test_a_changed_beginning_is_told_once_with_its_place(
    note: Note, caplog: pytest.LogCaptureFixture, head: list[int]
) -> None:
    """Whether the rest has moved or not."""
    turns = text(2000)
    assert note("a", turns[:1500]) == 0
    assert note("a", turns[:100] + head + turns[101:]) == 1
    assert "of the 1500 tokens of its turn before, 100 begin this turn" in caplog.text
    assert note("a", [9, *turns]) == 1
    assert note("b", turns[:1500]) == 1
    assert note("b", [9, *turns]) == 2


def test_other_conversations_of_a_client_are_no_changes(note: Note) -> None:
    """Also with the same tools, and in turns with each other."""
    tools = text(600)
    for length in (1000, 1500, 2000, 2500):
        for seed in range(1, 5):
            assert note("a", tools + text(3000, seed)[:length]) == 0


def test_agents_with_the_same_tools_behind_other_rules_are_no_changes(note: Note) -> None:
    tools = text(3000)
    for seed in (1, 2, 1, 3):
        assert note("a", [seed, *tools, *text(300, seed)]) == 0


def test_what_a_template_drops_at_the_end_is_no_change(note: Note) -> None:
    turns = text(3000)
    assert note("a", turns) == 0
    assert note("a", turns[:2000] + text(1500, 7)) == 0


def test_a_summary_in_place_of_a_conversation_is_no_change(note: Note) -> None:
    turns = text(6000)
    assert note("a", turns) == 0
    assert note("a", turns[:500] + text(800, 7)) == 0


def test_short_prompts_are_not_watched(note: Note) -> None:
    turns = text(500)
    assert note("a", turns[:400]) == note("a", [9, *turns[:401]]) == 0


def test_what_is_kept_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    watch = PrefixWatch(None)
    with caplog.at_level(logging.CRITICAL, "octavo.server"):
        for client in range(1500):
            turns = text(600, client)
            watch.note(client, TokenIds.of(turns))
            watch.note(client, TokenIds.of([9, *turns]))
    assert len(watch._prompts) <= 64
    assert len(watch._warned) <= 1024


def test_the_log_has_no_words_unless_it_is_asked_to(note: Note, caplog: pytest.LogCaptureFixture) -> None:
    turns = text(2000)
    note("a", turns)
    note("a", [9, *turns])
    (told,) = caplog.messages
    assert told.endswith(
        "from token 0 on (--log-prompt-excerpts shows its words); this client is not watched any more"
    )
