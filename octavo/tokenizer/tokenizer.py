"""Turns text into token ids and back."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.errors import PromptError
from octavo.tokenizer.chat_template import ChatTemplate, ChatText
from octavo.tokenizer.control_tokens import ControlTokens
from octavo.tokenizer.decoding import IncrementalDecoder, TokenBytes, piece_style
from octavo.tokenizer.gguf_vocabulary import read_gguf_vocabulary
from octavo.tokenizer.vocabularies import Vocabulary, read_folder_vocabulary

_NEEDS_TOOLS = "{{ raise_exception('expected tools, since this model has a template for tools alone') }}"


class Tokenizer:
    """The tokenizer of one model. Safe to share between threads.

    Attributes:
        vocabulary: what it was made from.
        vocab_size: number of tokens; the model's own vocabulary may be padded to more.
        bos_token_id: the token that begins a text, or None.
        eos_token_ids: every token that ends an answer: EOS, end of turn, end of message.
        special_ids: tokens that are markup rather than text.
        chat_template: turns messages into a prompt, or None for a model without one.
        response_template: how the model's answers are divided, unchecked, or None.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Wrap a vocabulary; `from_folder` and `from_gguf` read one.

        Raises:
            UnsupportedModelError: Octavo does not have this kind of decoder.
        """
        self.vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._prefix_ids = list(vocabulary.prefix_ids)
        self._suffix_ids = list(vocabulary.suffix_ids)
        style = piece_style(vocabulary.backend, vocabulary.name)
        self._token_bytes = TokenBytes(vocabulary.backend, style, vocabulary.special_ids)
        self.vocab_size: int = vocabulary.backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        self.special_ids = vocabulary.special_ids
        self.chat_template = self._chat_template(vocabulary)
        self.response_template = vocabulary.response_template

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json and the configuration files beside it.

        Args:
            folder: a model folder in Hugging Face's layout.

        Raises:
            ModelNotFoundError: the folder or its tokenizer.json does not exist.
            FileFormatError: a file is damaged or contradicts another.
            UnsupportedModelError: the tokenizer is of a kind that Octavo does not have.
        """
        return cls(read_folder_vocabulary(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], name: str) -> "Tokenizer":
        """Rebuild the tokenizer from a GGUF file's metadata.

        Args:
            metadata: the file's key-value pairs; numeric arrays are lists or NumPy arrays.
            name: file name, for error messages.

        Raises:
            FileFormatError: a key is missing or its value is of the wrong type or length.
            UnsupportedModelError: the tokenizer is of a kind that Octavo does not have.
        """
        return cls(read_gguf_vocabulary(metadata, name))

    def encode(self, text: str, *, add_special_tokens: bool = True, pair: str | None = None) -> list[int]:
        """Return the token ids of a text; special tokens written in the text become those tokens.

        Args:
            text: any string, possibly empty.
            add_special_tokens: add BOS and EOS where the model was trained with them. Pass False for a
                rendered chat template, which writes its own.
            pair: a second text behind it, with the special tokens that models of pairs were trained with.

        Raises:
            PromptError: `text` is not a string, or holds a lone surrogate.
        """
        try:
            encoded = self._backend.encode(text, pair, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            is_text = isinstance(text, str) and isinstance(pair, str | None)
            got = "a string with a lone surrogate" if is_text else type(text).__name__
            raise PromptError(f"expected text as valid Unicode, got {got}") from error
        return self._prefix_ids + encoded.ids + self._suffix_ids if add_special_tokens else encoded.ids

    def encode_chat(self, chat: ChatText, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a conversation; control tokens that stood in messages stay text.

        Args:
            chat: what `ChatTemplate.prompt` returned.
            add_special_tokens: as in `encode`; templates write BOS themselves.
        """
        first, *others = chat.pieces
        token_ids = self.encode(first, add_special_tokens=add_special_tokens)
        if not others:
            return token_ids
        end = self._num_at_end(first, token_ids) if add_special_tokens else 0
        end_ids = token_ids[len(token_ids) - end :]
        token_ids = token_ids[: len(token_ids) - end]
        for piece in others:
            token_ids += self._encode_inner(piece)
        return token_ids + end_ids

    def _num_at_end(self, text: str, token_ids: list[int]) -> int:
        """Return how many of a text's ids are special tokens behind it."""
        inner = self.encode(text, add_special_tokens=False)
        begin = next(i for i in range(len(token_ids)) if token_ids[i : i + len(inner)] == inner)
        return len(token_ids) - begin - len(inner)

    def _encode_inner(self, text: str) -> list[int]:
        """Tokenize a text that continues another; some vocabularies begin a text with a space."""
        begin = self.encode("\n", add_special_tokens=False)
        token_ids = self.encode("\n" + text, add_special_tokens=False)
        if token_ids[: len(begin)] == begin:
            return token_ids[len(begin) :]
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Invalid UTF-8 becomes U+FFFD; padding ids are skipped.

        Raises:
            InvalidArgumentError: an id is not an integer in [0, 2**32).
        """
        decoder = self.incremental_decoder(skip_special_tokens=skip_special_tokens)
        return decoder.push(token_ids) + decoder.finish()

    def incremental_decoder(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """Return a decoder for an answer that is generated token by token."""
        return IncrementalDecoder(self._token_bytes, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return one token's text, special or not, with its leading space; for showing logprobs.

        Part of a character shows as U+FFFD; `token_bytes` returns the exact bytes.

        Raises:
            InvalidArgumentError: the id is not an integer in [0, 2**32).
        """
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's bytes, as OpenAI's API reports them beside logprobs.

        Raises:
            InvalidArgumentError: the id is not an integer in [0, 2**32).
        """
        return self._token_bytes.of(token_id)

    def _chat_template(self, vocabulary: Vocabulary) -> ChatTemplate | None:
        templates = vocabulary.chat_templates
        if not templates:
            return None
        default, with_tools = templates.get("default", _NEEDS_TOOLS), templates.get("tool_use")
        return ChatTemplate(
            default,
            tool_use_source=with_tools,
            bos_token=self._piece(vocabulary.bos_token_id),
            eos_token=self._piece(vocabulary.eos_token_id),
            special_tokens=vocabulary.special_tokens,
            control_tokens=ControlTokens(
                vocabulary.backend,
                vocabulary.special_ids,
                [default, with_tools or ""],
                vocabulary.control_tokens,
            ),
        )

    def _piece(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.token_text(token_id)
