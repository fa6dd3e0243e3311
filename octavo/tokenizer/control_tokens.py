"""Finds the control tokens that stand in messages, and breaks them, so that they stay text.

    content    Hi<|im_end|>         what a client sends
    marked     Hi<M|im_end|>        what the template gets; M is a character that no message has
    pieces     Hi<  |im_end|>...    what is tokenized, each piece on its own

A mark within the token goes wherever the template puts the token, and no template can take it for its own.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import models

from octavo.errors import ChatTemplateError
from octavo.tokenizer.messages import encoded

# Unicode reserves these for use within a program.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_TAG = re.compile(r"</?[\w:.-]+>")
_MAX_PREFIXES = 16
_MAX_ROUNDS = 8
_ROLES_OF_TEXTS = ("system", "developer", "user")


class ControlTokens:
    """The tokens of a vocabulary that divide a prompt, and so may come from the chat template alone.

    These are the special tokens, those that the model's folder calls control tokens, and further added
    tokens that the template writes. Some of the latter look like tags, such as `<tool_call>`: they are markup
    within a turn, which system prompts explain and models write, so they are guarded in the results of tools
    alone. Reasoning's markup is not guarded in an assistant's turn, where templates look for it.

    Args:
        backend: the vocabulary; not changed.
        special_ids: its special tokens.
        sources: the chat templates.
        declared: pieces that the model's folder calls control tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_ids: Collection[int],
        sources: Collection[str],
        declared: Collection[str] = (),
    ) -> None:
        added = backend.get_added_tokens_decoder().items()
        visible = {token.content: i in special_ids for i, token in added if not token.content.isspace()}
        special = {piece for piece, is_special in visible.items() if is_special}
        written = {
            piece for piece in visible if piece in declared or any(piece in source for source in sources)
        }
        self._in_results = frozenset(special | written)
        self._in_texts = frozenset(special | {piece for piece in written if not _TAG.fullmatch(piece)})
        self._in_answers = frozenset(piece for piece in self._in_texts if "think" not in piece.lower())
        self._finder = _Finder(backend, self._in_results)

    def refuse(self, inputs: Mapping[str, Any]) -> None:
        """Refuse control tokens in what a template gets.

        Raises:
            ChatTemplateError: there is one; it is named.
        """
        for place, piece in self._found(inputs):
            raise ChatTemplateError(
                f"{place}: expected a text without control tokens, got one with {piece!r}, which "
                "message_control_tokens='refuse' does not take"
            )

    def marked(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Mark the control tokens in what a template gets.

        Args:
            inputs: its variables that come from a request; `messages` are checked ones.

        Returns:
            The inputs and the mark, which is empty if they hold no control token.

        Raises:
            ChatTemplateError: a control token cannot be marked.
        """
        text = encoded(inputs).decode()
        if not self._finder.may_be_in_json(text) or next(self._found(inputs), None) is None:
            return inputs, ""
        mark = next((mark for mark in MARKS if mark not in text), None)
        if mark is None:
            raise ChatTemplateError("expected messages without Unicode's noncharacters U+FDD0 to U+FDEF")
        marked: dict[str, Any] = {
            name: self._mark(value, self._in_texts, mark)
            for name, value in inputs.items()
            if name != "messages"
        }
        marked["messages"] = [
            self._mark(message, self._guarded(message), mark) for message in inputs["messages"]
        ]
        return marked, mark

    def _found(self, inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Return the control tokens in a template's inputs, each with the place where it stands."""
        for name, value in inputs.items():
            if name != "messages":
                yield from self._found_in(value, self._in_texts, name)
        for index, message in enumerate(inputs["messages"]):
            yield from self._found_in(message, self._guarded(message), f"messages[{index}]")

    def _guarded(self, message: Mapping[str, Any]) -> frozenset[str]:
        role = message["role"]
        if role == "assistant":
            return self._in_answers
        return self._in_texts if role in _ROLES_OF_TEXTS else self._in_results

    def _found_in(self, value: object, guarded: frozenset[str], where: str) -> Iterator[tuple[str, str]]:
        for place, text in _texts(value, where):
            for _, piece in self._finder.hits(text, guarded):
                yield place, piece

    def _mark(self, value: Any, guarded: frozenset[str], mark: str) -> Any:
        if isinstance(value, str):
            return self._broken(value, guarded, mark)
        if isinstance(value, list):
            return [self._mark(entry, guarded, mark) for entry in value]
        if isinstance(value, dict):
            return {
                self._broken(key, guarded, mark): self._mark(entry, guarded, mark)
                for key, entry in value.items()
            }
        return value

    def _broken(self, text: str, guarded: frozenset[str], mark: str) -> str:
        """Break the control tokens in a text. What is left of one may form another."""
        hits, num_rounds = self._finder.hits(text, guarded), 0
        while hits:
            if num_rounds == _MAX_ROUNDS:
                raise ChatTemplateError(
                    f"expected messages without the control token {hits[0][1]!r}, which cannot be text here"
                )
            for begin, _ in reversed(hits):
                text = f"{text[: begin + 1]}{mark}{text[begin + 1 :]}"
            hits, num_rounds = self._finder.hits(text, guarded), num_rounds + 1
        return text


class _Finder:
    """Finds added tokens in a text as the tokenizer does, without tokenizing what is between them."""

    def __init__(self, backend: tokenizers.Tokenizer, pieces: Collection[str]) -> None:
        self._matcher = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        added = list(backend.get_added_tokens_decoder().values())
        self._is_normalized = backend.normalizer is not None and any(token.normalized for token in added)
        if self._is_normalized:
            self._matcher.normalizer = backend.normalizer
        self._matcher.add_special_tokens([token for token in added if token.special])
        self._matcher.add_tokens([token for token in added if not token.special])
        self._pieces = {i: token.content for i, token in self._matcher.get_added_tokens_decoder().items()}
        self._prefixes = _prefixes(pieces)
        self._in_json = [json.dumps(prefix, ensure_ascii=False)[1:-1] for prefix in self._prefixes]

    def may_be_in_json(self, text: str) -> bool:
        """Return False if no piece is in JSON; a quick look."""
        return self._is_normalized or any(prefix in text for prefix in self._in_json)

    def hits(self, text: str, guarded: frozenset[str]) -> list[tuple[int, str]]:
        """Return where guarded tokens begin, and their pieces."""
        if not self._is_normalized and not any(prefix in text for prefix in self._prefixes):
            return []
        encoding = self._matcher.encode(text, add_special_tokens=False)
        found = [(self._pieces.get(i), span) for i, span in zip(encoding.ids, encoding.offsets, strict=True)]
        return [(_first_visible(text, *span), piece) for piece, span in found if piece in guarded]


def _first_visible(text: str, begin: int, end: int) -> int:
    """Return where a token begins. Some take the white space before them along."""
    return end - len(text[begin:end].lstrip())


def _prefixes(pieces: Collection[str]) -> frozenset[str]:
    """Return a few short texts, one of which each piece begins with."""
    tried = (frozenset(piece[:length] for piece in pieces) for length in (4, 3, 2, 1))
    return next((prefixes for prefixes in tried if len(prefixes) <= _MAX_PREFIXES), frozenset({""}))


def _texts(value: object, where: str) -> Iterable[tuple[str, str]]:
    """Return all texts in a JSON value, each with its place."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _texts(entry, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield f"{where}: a key", key
            yield from _texts(entry, f"{where}.{key}")
