"""From prompts as users give them to checked token ids. Every id that reaches the model passes through here.

Long prompts come by the hundred, so their ids are packed once, here, and NumPy checks them.
"""

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, cast

import numpy as np

from octavo.config import MessageControlTokens
from octavo.errors import (
    ChatTemplateError,
    InvalidArgumentError,
    PromptError,
    RequestTooLongError,
    SamplingParamsError,
    suggest,
)
from octavo.pooling import Pooling
from octavo.sampling_params import SamplingParams
from octavo.tokenizer import ChatTemplate, ChatText, Tokenizer

POOLED = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
"""Stands for the parameters of a request that is pooled: this object, not one that is equal to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringParams(SamplingParams):
    """Parameters of a request that scores the end of its prompt.

    Attributes:
        rivals: token ids that are scored as well, each in the place of the prompt's last token.
    """

    max_tokens: int | None = 1
    prompt_logprobs: int | None = 0
    temperature: float = 0.0
    detokenize: bool = False
    rivals: tuple[int, ...] = ()


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Checked token ids in both forms that are needed, so that nobody converts them again.

    Attributes:
        listed: Python ints, for the output.
        packed: an int32 array, for the request.
    """

    listed: list[int]
    packed: "array[int]"

    @classmethod
    def of(cls, listed: list[int]) -> "TokenIds":
        """Pack token ids into an array.

        Raises:
            struct.error: one has more than 32 bits.
        """
        packed = array("i")
        # This takes half as long as array("i", listed).
        packed.frombytes(struct.pack(f"{len(listed)}i", *listed))
        return cls(listed, packed)

    def __add__(self, other: "TokenIds") -> "TokenIds":
        return TokenIds(self.listed + other.listed, self.packed + other.packed)


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list; a list of ids is one prompt.

    Raises:
        PromptError: it is neither.
    """
    # Bytes are one (wrong) prompt, not a list of integers; PromptReader refuses them.
    if isinstance(prompts, str | Mapping | bytes | bytearray | memoryview):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Sequence):
        raise PromptError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


class PromptReader:
    """Reads and checks prompts and the token ids in sampling parameters for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        max_model_len: int,
        num_kv_tokens: int,
        message_control_tokens: MessageControlTokens = "text",
        pooling: Pooling | None = None,
    ) -> None:
        self.pooling = pooling
        self.tokenizer = tokenizer
        self.message_control_tokens: MessageControlTokens = message_control_tokens
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_kv_tokens = num_kv_tokens

    def text_of(self, prompt: Prompt | TokenIds) -> str | None:
        """Return the prompt's text, None if it was given as ids."""
        content = _unwrap(prompt)
        return content if isinstance(content, str) else None

    @property
    def max_prompt_tokens(self) -> int:
        """The length of the longest prompt."""
        return min(self.max_model_len - 1, self.num_kv_tokens)

    def read(self, prompt: Prompt | TokenIds, *, keep: int | None = None) -> TokenIds:
        """Return a prompt's token ids, or the first `keep`; of one that is read only the length is checked.

        Raises:
            PromptError: empty, of the wrong type, or with ids outside the vocabulary.
            RequestTooLongError: longer than the model's context or than the whole KV cache.
        """
        token_ids = prompt if isinstance(prompt, TokenIds) else self._read(_unwrap(prompt))
        if keep is not None and len(token_ids.listed) > keep:
            token_ids = TokenIds.of(token_ids.listed[: max(0, keep)])
        if not token_ids.listed:
            text = self.text_of(prompt)
            raise PromptError(f"a prompt must hold at least one token, got {[] if text is None else text!r}")
        self.check_length(len(token_ids.listed))
        return token_ids

    def read_integers(self, token_ids: TokenIds) -> TokenIds:
        """Return a prompt's token ids, which are known to be integers and nothing more.

        Raises:
            PromptError, RequestTooLongError: as `read`.
        """
        self._check_vocabulary(token_ids)
        return self.read(token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True, pair: str | None = None) -> list[int]:
        """Tokenize a text, or a pair of texts; see Tokenizer.encode.

        Raises:
            PromptError: the model has no tokenizer.
        """
        return self._require_tokenizer().encode(text, add_special_tokens=add_special_tokens, pair=pair)

    def encode_chat(self, chat: ChatText, *, add_special_tokens: bool = False) -> list[int]:
        """Tokenize a rendered conversation. The template writes the special tokens itself.

        Raises:
            PromptError: the model has no tokenizer.
        """
        return self._require_tokenizer().encode_chat(chat, add_special_tokens=add_special_tokens)

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise PromptError(
                "this model has no tokenizer; pass the prompt as token ids, which Python, the server and "
                "run-batch take"
            )
        return self.tokenizer

    def read_continuation(self, continuation: str | Sequence[int]) -> TokenIds:
        """Return a continuation's token ids; text gets no special tokens.

        Raises:
            PromptError: empty, of the wrong type, or with ids outside the vocabulary.
        """
        token_ids = self._read(continuation, add_special_tokens=False)
        if not token_ids.listed:
            raise PromptError(f"a continuation must hold at least one token, got {continuation!r}")
        return token_ids

    def render_chat(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Render messages with the model's chat template and tokenize the text.

        Raises:
            ChatTemplateError: no template, or it refuses the messages.
        """
        return self.encode_chat(
            self.require_chat_template().prompt(
                messages,
                add_generation_prompt=add_generation_prompt,
                message_control_tokens=self.message_control_tokens,
            )
        )

    def require_chat_template(self) -> ChatTemplate:
        """Return the model's chat template.

        Raises:
            ChatTemplateError: it has none.
        """
        template = self.tokenizer.chat_template if self.tokenizer else None
        if template is None:
            raise ChatTemplateError("this model has no chat template; use generate with a prompt of your own")
        return template

    def check_params(self, params: SamplingParams) -> None:
        """Check what parameters ask of the model: ids in its vocabulary, a tokenizer for stop strings.

        Raises:
            SamplingParamsError: an id is outside the vocabulary, or stop strings lack a tokenizer.
            InvalidArgumentError: the model does not do what they ask for.
        """
        if params is POOLED:
            self.pooling_for()
        else:
            self.check_generates()
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(f"expected SamplingParams, got {type(params).__name__}")
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token_id in ids or ():
                if token_id >= self.vocab_size:
                    raise SamplingParamsError(
                        f"{name} holds id {token_id}, the vocabulary ends at {self.vocab_size - 1}"
                    )
        if params.stop and self.tokenizer is None:
            raise SamplingParamsError(
                "stop strings need a tokenizer, this model has none; use stop_token_ids"
            )

    def pooling_for(self, task: Literal["embed", "classify"] | None = None) -> Pooling:
        """Return how the model pools prompts for a task; None: for any.

        Raises:
            InvalidArgumentError: it generates text, or does something else.
        """
        if self.pooling is None:
            raise InvalidArgumentError(
                'this model generates text, and neither embeds nor classifies; load it with task="embed", '
                'with task="rerank", or load a model for that'
            )
        if task not in (None, self.pooling.task):
            raise InvalidArgumentError(f"this model {self.pooling.does} and does not {task}")
        return self.pooling

    def check_generates(self) -> None:
        """Check that the model continues prompts.

        Raises:
            InvalidArgumentError: it pools them.
        """
        if self.pooling is not None:
            raise InvalidArgumentError(f"this model {self.pooling.does} and generates none")

    def _read(self, content: object, *, add_special_tokens: bool = True) -> TokenIds:
        """Tokenize a text, or check token ids."""
        if isinstance(content, str):
            return TokenIds.of(self.encode(content, add_special_tokens=add_special_tokens))
        return self._checked_ids(content)

    def _checked_ids(self, content: object) -> TokenIds:
        # Bytes would be read as small integers, which are tokens that have nothing to do with them.
        if not isinstance(content, Iterable) or isinstance(content, bytes | bytearray | memoryview | Mapping):
            raise PromptError(
                f"a prompt must be a string or a list of token ids, got {type(content).__name__}"
                f"{'; decode it first' if isinstance(content, bytes | bytearray) else ''}"
            )
        listed = list(content)
        if not _are_ints(listed):
            listed = [_as_integer(token_id) for token_id in listed]
        try:
            token_ids = TokenIds.of(listed)
        except struct.error:
            raise self._outside(listed) from None
        for at in np.flatnonzero(self._check_vocabulary(token_ids) < 2):
            # An id 1 or 0 may be a True or False, which is refused.
            _as_integer(listed[at])
        return token_ids

    def _check_vocabulary(self, token_ids: TokenIds) -> np.ndarray:
        """Check that ids are in the vocabulary; return them as unsigned numbers."""
        # Seen as unsigned numbers, negative ones are beyond the vocabulary as well.
        unsigned = np.frombuffer(token_ids.packed, dtype=np.uint32)
        if unsigned.max(initial=0) >= self.vocab_size:
            raise self._outside(token_ids.listed)
        return unsigned

    def _outside(self, token_ids: list[int]) -> PromptError:
        token_id = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
        return PromptError(f"token ids must be in [0, {self.vocab_size - 1}], got {token_id}")

    def check_length(self, num_tokens: int) -> None:
        """Check the length of a prompt.

        Raises:
            RequestTooLongError: it is longer than the model's context or than the whole KV cache.
        """
        if num_tokens >= self.max_model_len:
            raise RequestTooLongError(
                f"prompt is too long: {num_tokens} tokens > {self.max_model_len - 1} maximum, which "
                f"leaves room for one token in max_model_len = {self.max_model_len}"
            )
        if num_tokens > self.num_kv_tokens:
            raise RequestTooLongError(
                f"prompt is too long: {num_tokens} tokens > {self.num_kv_tokens} maximum, as many as the KV "
                "cache holds in all; raise num_blocks or memory_fraction"
            )


def _are_ints(token_ids: list[object]) -> bool:
    """Return whether all are ints (or bools): anything else, NumPy's integers too, shows in their sum."""
    try:
        with np.errstate(over="ignore"):
            return type(sum(cast(list[int], token_ids))) is int
    except TypeError:
        return False


def _as_integer(token_id: object) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
        raise PromptError(f"token ids must be integers, got {token_id!r}")
    return int(token_id)


def _unwrap(prompt: object) -> object:
    """Return the text or the token ids in a prompt."""
    if not isinstance(prompt, Mapping):
        return prompt
    valid = ("prompt", "prompt_token_ids")
    for name in prompt:
        if name not in valid:
            raise PromptError(f"unknown prompt field {name!r}{suggest(str(name), valid)}")
    if len(prompt) != 1:
        raise PromptError(f"a prompt needs exactly one of {' or '.join(valid)}, got {sorted(prompt)}")
    name, content = next(iter(prompt.items()))
    if (name == "prompt") != isinstance(content, str):
        expected = "a string" if name == "prompt" else "a list of token ids"
        raise PromptError(f"{name} must be {expected}, got {type(content).__name__}")
    return content
