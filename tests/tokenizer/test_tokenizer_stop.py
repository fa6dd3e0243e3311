"""Stop strings on streamed text."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.tokenizer import StopChecker


def run(
    stops: list[str], pieces: list[str], include: bool = False, num_free: int = 0
) -> tuple[str, str | None]:
    checker, shown = StopChecker(stops, include_stop=include), ""
    for index, piece in enumerate(pieces):
        safe, hit = checker.feed(piece, may_stop=index >= num_free)
        shown += safe
        if hit is not None:
            return shown, hit
    return shown + checker.flush(), None


def expected(stops: list[str], text: str, include: bool, free: int = 0) -> tuple[str, str | None]:
    """Character by character: the first one behind `free` that completes a stop string ends the text."""
    for end in range(free + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


stop_strings = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3)
text_pieces = st.lists(st.text("ab.", max_size=4), max_size=12)


@given(stop_strings, text_pieces, st.booleans())
def test_result_does_not_depend_on_the_pieces(stops, pieces, include):
    assert run(stops, pieces, include) == expected(stops, "".join(pieces), include)


@given(stop_strings, text_pieces, st.booleans(), st.integers(0, 12))
def test_stop_strings_may_begin_before_they_may_end(stops, pieces, include, num_free):
    """Trap: one that began in a piece in which none may end was never found."""
    free = len("".join(pieces[:num_free]))
    assert run(stops, pieces, include, num_free) == expected(stops, "".join(pieces), include, free)


@given(stop_strings, text_pieces)
def test_shown_text_is_never_taken_back_and_holds_back_no_more_than_needed(stops, pieces):
    checker, fed, shown = StopChecker(stops), "", ""
    for piece in pieces:
        safe, hit = checker.feed(piece)
        fed, shown = fed + piece, shown + safe
        if hit is not None:
            return
        held = fed[len(shown) :]
        assert fed.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
        begins = {stop[:k] for stop in stops for k in range(1, len(stop))}
        assert len(held) == max((len(begin) for begin in begins if fed.endswith(begin)), default=0)


def test_stop_across_pieces():
    checker = StopChecker(["END"])
    assert checker.feed("the E") == ("the ", None)
    assert checker.feed("N") == ("", None)
    assert checker.feed("Dup") == ("", "END")
    assert checker.flush() == ""


def test_false_alarm_is_released():
    checker = StopChecker(["END"])
    assert checker.feed("EN") == ("", None)
    assert checker.feed("O") == ("ENO", None)


def test_earliest_stop_wins_whatever_the_order():
    assert run(["later", "soon"], ["not soon but later"]) == ("not ", "soon")
    assert run(["soon", "later"], ["not soon but later"]) == ("not ", "soon")


def test_include_stop_keeps_the_string_and_drops_the_rest():
    assert run(["\n\n"], ["a\n", "\nb"], include=True) == ("a\n\n", "\n\n")


def test_end_of_text_releases_what_was_held():
    assert run(["END"], ["the EN"]) == ("the EN", None)


def test_no_stop_strings_pass_everything():
    assert run([], ["a", "b"]) == ("ab", None)
