"""One tool call as it is written, whatever its format."""

from typing import Literal

from octavo.server.parsing.pieces import Piece


class CallBody:
    """A call between its opening marker and its closing one.

    Attributes:
        name: the function's, once it is known.
        has_arguments: they have begun.
        is_complete: it has ended, and is a call.
        is_broken: it cannot become a call any more.
    """

    def __init__(self, name: str | None = None) -> None:
        """Begin after the opening marker; `name` is the function's if it is known already."""
        self.name = name
        self.has_arguments = self.is_complete = self.is_broken = False
        self._is_announced = False
        self._raw: list[str] = []
        # What is new in the arguments. Their last brace comes when the call is complete, and not before: so
        # the arguments of a call that breaks off are never a whole object.
        self._arguments: list[str] = []

    @property
    def raw(self) -> str:
        """Everything that was read."""
        return "".join(self._raw)

    @property
    def has_begun(self) -> bool:
        """Whether anything was read."""
        return bool(self._raw)

    def feed(self, text: str, begin: int) -> int:
        """Read on from a position; return where the call ended or broke, or the text's end."""
        raise NotImplementedError

    def news(self) -> list[Piece]:
        """Return what is new in a call that is not broken."""
        if self.name is None or not self.has_arguments:
            return []
        pieces = [] if self._is_announced else [Piece("call", self.name)]
        self._is_announced = True
        if self._arguments:
            pieces.append(Piece("arguments", "".join(self._arguments)))
            self._arguments.clear()
        if self.is_complete:
            pieces.append(Piece("complete", ""))
        return pieces

    @property
    def kind_of_rest(self) -> Literal["content", "broken"]:
        """What all that was written since its marker is if it never becomes a call."""
        return "broken" if self._is_announced else "content"
