"""Converts the fields of a request to token ids. This may take long, so it runs in the thread pool."""

import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from octavo.engine.prompt_reader import PromptReader, TokenIds
from octavo.errors import ChatTemplateError, PromptError, RequestTooLongError
from octavo.server.api.late_systems import folding
from octavo.server.api.structs import MAX_PROMPTS
from octavo.server.api_errors import refused
from octavo.tokenizer import ChatText, Tokenizer

# Marks the place where a message is continued; no other text looks like it. It is the same for all chats, so
# that equal ones are rendered once.
_HERE = secrets.token_hex(16)
# To count tokens, texts are tokenized in parts of this length: the count is a little too high.
_PART_CHARS = 1 << 16
_FAR_TOO_LONG = 2
# A prompt that is to be truncated may be this many times as long.
_FAR_TOO_LONG_TO_TRUNCATE = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for reading prompts.

    Attributes:
        add_special_tokens: add BOS and EOS where the model was trained with them; None: the default of this
            kind of prompt.
        truncate: keep at most this many tokens; -1: as many as the model takes; None: refuse longer prompts.
        keep_left: keep a prompt's beginning when it is truncated, not its end.
    """

    add_special_tokens: bool | None = None
    truncate: int | None = None
    keep_left: bool = False


class Prompts:
    """Reads the prompts of one model.

    Attributes:
        reader: the engine's reader of prompts.
    """

    def __init__(self, reader: PromptReader) -> None:
        self.reader = reader

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self.reader.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its continuation."""
        return self.reader.max_model_len

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows."""
        return self.reader.vocab_size

    def read_all(self, prompt: str | Sequence[str | int | list[int]], reading: Reading) -> list[TokenIds]:
        """Read the prompts of a completion: a text, token ids, or a list of either.

        Raises:
            PromptError: they are mixed, empty, too many, or with ids outside the vocabulary.
            RequestTooLongError: one is too long.
        """
        if isinstance(prompt, str):
            return [self.read_text(prompt, reading)]
        kinds = _kinds(prompt)
        if kinds == {int}:
            return [self._read_ids(cast(list[int], prompt), reading)]
        if not 0 < len(prompt) <= MAX_PROMPTS:
            raise PromptError(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompt)}")
        if kinds == {str}:
            return [self.read_text(cast(str, item), reading) for item in prompt]
        if kinds == {list}:
            return [self._read_ids(cast(list[int], item), reading) for item in prompt]
        raise PromptError("prompt must hold texts, token ids or lists of token ids, got several of these")

    def read_text(self, text: str, reading: Reading) -> TokenIds:
        """Tokenize a text.

        Raises:
            PromptError, RequestTooLongError: as `read_all`.
        """
        return self._read_ids(self.encode(text, reading), reading)

    def read_chat(self, chat: ChatText, reading: Reading) -> TokenIds:
        """Tokenize a rendered conversation.

        Raises:
            PromptError, RequestTooLongError: as `read_all`.
        """
        return self._read_ids(self.encode_chat(chat, reading), reading)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatText:
        """Render messages with the model's template.

        Raises:
            ChatTemplateError: no template, or it refuses the messages.
            ApiError: the flags contradict each other.
        """
        tokenizer = self.reader.tokenizer
        template = tokenizer.chat_template if tokenizer else None
        if template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        render = partial(
            folding,
            template.prompt,
            tools=tools,
            variables=variables,
            message_control_tokens=self.reader.message_control_tokens,
        )
        plain = list(messages)
        if not continue_final_message:
            add = True if add_generation_prompt is None else add_generation_prompt
            return render(plain, add_generation_prompt=add)
        if add_generation_prompt:
            raise refused("continue_final_message", "and add_generation_prompt contradict each other")
        last = plain[-1]
        content = last.get("content") or ""
        if last.get("role") != "assistant" or not isinstance(content, str):
            raise refused("continue_final_message", "needs a final message of the assistant, with a text")
        plain[-1] = {**last, "content": content + _HERE}
        before = render(plain, add_generation_prompt=False).before(_HERE)
        if before is None:
            raise refused("continue_final_message", "is not possible: the template leaves out the message")
        return before

    def encode(self, text: str, reading: Reading) -> list[int]:
        """Tokenize a text, but refuse one that is far too long at once: tokenizing it would take seconds.

        Raises:
            RequestTooLongError: it is certainly too long.
        """
        self.check_size(text, reading)
        special = reading.add_special_tokens
        return self.reader.encode(text, add_special_tokens=True if special is None else special)

    def encode_chat(self, chat: ChatText, reading: Reading) -> list[int]:
        """Tokenize a rendered conversation, to which nothing is added by default; as `encode`.

        Raises:
            RequestTooLongError: it is certainly too long.
        """
        self.check_size(chat.text, reading)
        return self.reader.encode_chat(chat, add_special_tokens=bool(reading.add_special_tokens))

    def check_size(self, text: str, reading: Reading) -> None:
        """Count a long text's tokens part by part until it is clear that there are too many.

        Raises:
            RequestTooLongError: there are.
        """
        factor = _FAR_TOO_LONG if reading.truncate is None else _FAR_TOO_LONG_TO_TRUNCATE
        max_model_len = self.reader.max_model_len
        if len(text) <= max(_PART_CHARS, 4 * max_model_len):
            return
        num_tokens = 0
        for begin in range(0, len(text), _PART_CHARS):
            part = text[begin : begin + _PART_CHARS]
            num_tokens += len(self.reader.encode(part, add_special_tokens=False))
            if num_tokens > factor * max_model_len:
                raise RequestTooLongError(
                    f"prompt is too long: more than {num_tokens} tokens > {max_model_len - 1} maximum"
                )

    def _read_ids(self, token_ids: list[int], reading: Reading) -> TokenIds:
        if reading.truncate is not None:
            most = self.reader.max_model_len - 1
            keep = most if reading.truncate == -1 else reading.truncate
            if not 0 < keep <= most:
                raise refused(
                    "truncate_prompt_tokens", f"must be -1 or in [1, {most}], got {reading.truncate}"
                )
            token_ids = token_ids[:keep] if reading.keep_left else token_ids[-keep:]
        try:
            packed = TokenIds.of(token_ids)
        except struct.error:
            # This says which of them is too large.
            return self.reader.read(token_ids)
        return self.reader.read_integers(packed)


def _kinds(prompt: Sequence[str | int | list[int]]) -> set[type]:
    """Return the types of a prompt's items."""
    try:
        # This takes a quarter of the time of looking at each item.
        sum(cast(Sequence[int], prompt))
    except TypeError:
        return set(map(type, prompt))
    return {int} if prompt else set()
