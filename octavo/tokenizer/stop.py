"""Finds stop strings in streamed text."""

from collections.abc import Sequence


class StopChecker:
    """Finds stop strings in text that arrives in pieces, and never releases a part of one.

    The stop string that ends first wins, and the longest of several that end at the same character. So the
    result does not depend on how the text was cut into pieces.

        stop "END", pieces "the E", "N", "Dup"
        emitted            "the ", "",  ""       and stop "END"; "up" is dropped

    Args:
        stop_strings: the stop strings, none of them empty. Without any, text passes unchanged.
        include_stop: keep the stop string at the end of the text.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stop_strings), "sampling parameters refuse empty stop strings"
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._pending = ""
        self._stopped = False

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text, possibly empty.

        Args:
            text: the piece.
            may_stop: whether a stop string may end in it, wherever it begins; else it passes like other text.

        Returns:
            The text that is safe to show, and the stop string that was found or None. After a stop string,
            the rest of the text is dropped and nothing more may be fed.
        """
        assert not self._stopped, "no text follows a stop string"
        num_pending = len(self._pending)
        text = self._pending + text
        hit = self._first_hit(text, num_pending) if may_stop else None
        if hit is None:
            safe = self._safe_length(text)
            self._pending = text[safe:]
            return text[:safe], None
        end, stop = hit
        self._stopped, self._pending = True, ""
        return text[: end if self._include_stop else end - len(stop)], stop

    def flush(self) -> str:
        """Return the text still held back; call it when no more text follows."""
        pending, self._pending = self._pending, ""
        return pending

    def _first_hit(self, text: str, begin: int) -> tuple[int, str] | None:
        """Return the end of the stop string that ends first behind `begin`, and that string."""
        found = [(text.find(stop, max(0, begin - len(stop) + 1)), stop) for stop in self._stop_strings]
        hits = [(at + len(stop), stop) for at, stop in found if at >= 0]
        return min(hits, key=lambda hit: (hit[0], -len(hit[1])), default=None)

    def _safe_length(self, text: str) -> int:
        """Return the length of the text before the longest ending that may begin a stop string."""
        return min((_begin_of_stop(text, stop) for stop in self._stop_strings), default=len(text))


def _begin_of_stop(text: str, stop: str) -> int:
    """Return the first index from which the rest of `text` is a prefix of `stop`."""
    index = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while index >= 0 and not stop.startswith(text[index:]):
        index = text.find(stop[0], index + 1)
    return index if index >= 0 else len(text)
