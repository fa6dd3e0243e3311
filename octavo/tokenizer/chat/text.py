"""A rendered conversation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatText:
    """The text of a prompt, which a chat template wrote.

    Attributes:
        marked: the text, with `mark` within each control token that stood in a message.
        mark: a character that is nowhere else in the text; empty: no message has a control token.
    """

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        """What the model is to read."""
        return "".join(self.pieces)

    @property
    def pieces(self) -> list[str]:
        """The text, cut so that the control tokens that are left in the pieces are the template's own.

        A filter may have written the mark as an escape of JSON.
        """
        if not self.mark:
            return [self.marked]
        return self.marked.replace(f"\\u{ord(self.mark):04x}", self.mark).split(self.mark)

    def before(self, place: str) -> "ChatText | None":
        """Return what comes before the last occurrence of a text; None: there is none."""
        before, found, _ = self.marked.rpartition(place)
        return ChatText(before, self.mark) if found else None
