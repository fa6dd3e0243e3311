"""What the pieces of an answer amount to."""

from collections.abc import Iterable

from octavo.server.parsing.piece import Piece


def outcome(pieces: Iterable[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the complete calls. A stream cannot take back a call that breaks off."""
    content, calls, parts = "", [], []
    for piece in pieces:
        if piece.kind in ("content", "broken"):
            content += piece.text
        elif piece.kind == "complete":
            calls.append((parts[0], "".join(parts[1:])))
        else:
            parts = [piece.text] if piece.kind == "call" else [*parts, piece.text]
    return content, calls
