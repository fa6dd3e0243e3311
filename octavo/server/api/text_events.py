"""Events that carry only new text, as most do: everything around the text is encoded once."""

from collections.abc import Callable

from octavo.outputs import CompletionDelta
from octavo.server.api.sse import encode

_ANY_TEXT = "text"


class TextEvents:
    """Writes the events of one answer that differ in their text alone."""

    def __init__(self, write: Callable[[int, str], bytes]) -> None:
        """Begin with nothing encoded.

        Args:
            write: encodes an event of a choice's index and its new text, the slow way. Nothing that a client
                chose may come after the text.
        """
        self._write = write
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def write(self, index: int, text: str) -> bytes:
        """Return the event of new text, byte for byte as the slow way writes it."""
        around = self._around.get(index)
        if around is None:
            before, _, after = self._write(index, _ANY_TEXT).rpartition(encode(_ANY_TEXT))
            around = self._around[index] = before, after
        return around[0] + encode(text) + around[1]


def is_text_alone(delta: CompletionDelta) -> bool:
    """Return whether a client sees nothing of a delta but its text."""
    return delta.finish_reason is None and delta.logprobs is None and delta.text != ""
