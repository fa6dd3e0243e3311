"""What a model folder or a GGUF file says about a tokenizer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers

END_OF_TURN_PIECES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|call|>",
)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer's vocabulary, special tokens and chat templates.

    Attributes:
        name: file or folder, for error messages.
        backend: the compiled vocabulary of the tokenizers package.
        bos_token_id: the token that begins a text, or None.
        eos_token_id: the token that ends a text, or None; chat templates see its piece.
        eos_token_ids: all tokens that end an answer.
        special_ids: tokens that are markup rather than text.
        prefix_ids: what `encode` puts before a text, beyond the backend's own post-processor.
        suffix_ids: what `encode` puts after a text, beyond the backend's own post-processor.
        special_tokens: pieces by name, such as "pad_token", which chat templates see beside BOS and EOS.
        control_tokens: pieces that the folder says only a chat template may write, beside special tokens.
        chat_templates: template sources by name; "default" is the usual one.
        response_template: how answers are divided, as transformers writes it in tokenizer_config.json.
    """

    name: str
    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token_ids: frozenset[int]
    special_ids: frozenset[int]
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    control_tokens: tuple[str, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    response_template: Mapping[str, Any] | None = None


def special_token_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Return the ids of the tokens that the backend marks as special."""
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def end_of_answer_ids(
    backend: tokenizers.Tokenizer,
    templates: Iterable[str],
    special_ids: frozenset[int],
    declared: Iterable[int],
) -> set[int]:
    """Return the ids that end answers: declared ones, and well-known ones that a chat template writes.

    Some instruct models declare only an end-of-document token as EOS, although their turns end with another
    one. If the template writes that token, the model was trained to end its turns with it. In harmony, which
    has <|return|>, an answer is several messages, and <|end|> ends only one of them.
    """
    written = {piece for piece in END_OF_TURN_PIECES if any(piece in source for source in templates)}
    ids = {i for piece in written if (i := backend.token_to_id(piece)) in special_ids}.union(declared)
    end = backend.token_to_id("<|end|>")
    return ids - {end} if "<|return|>" in written and end is not None else ids
