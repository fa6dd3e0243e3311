"""Rebuilds a tokenizer from the metadata of a GGUF file."""

from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.tokenizer.byte_level import BOS_BY_DEFAULT, build_byte_level
from octavo.tokenizer.gguf_fields import GGUFFields, TokenType
from octavo.tokenizer.sentencepiece import build_sentencepiece
from octavo.tokenizer.vocabulary import Vocabulary, end_of_turn_ids, special_token_ids

TEMPLATE_KEY = "tokenizer.chat_template"
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_vocabulary(metadata: Mapping[str, object], name: str) -> Vocabulary:
    """Rebuild the vocabulary that a GGUF file's metadata describes.

    Args:
        metadata: the file's key-value pairs; numeric arrays are lists or NumPy arrays.
        name: file name, for error messages.

    Raises:
        FileFormatError: a key is missing or its value is of the wrong type or length.
        UnsupportedModelError: the tokenizer or pre-tokenizer is not one that Octavo has.
    """
    fields = GGUFFields(metadata, name)
    pieces = fields.strings("tokenizer.ggml.tokens")
    types = fields.token_types(len(pieces))
    backend, bos_by_default = _build(fields, pieces, types)
    _add_tokens(backend, pieces, types)
    templates = _chat_templates(fields, metadata)
    special_ids = special_token_ids(backend)
    bos_token_id = fields.token_id("bos_token_id", len(pieces))
    ends = [fields.token_id(key, len(pieces)) for key in END_KEYS]
    declared = {token_id for token_id in ends if token_id is not None}
    return Vocabulary(
        name=name,
        backend=backend,
        bos_token_id=bos_token_id,
        eos_token_id=ends[0],
        eos_token_ids=frozenset(declared | end_of_turn_ids(backend, templates.values(), special_ids)),
        special_ids=special_ids,
        prefix_ids=_affix(fields, "add_bos_token", bos_by_default, bos_token_id),
        suffix_ids=_affix(fields, "add_eos_token", False, ends[0]),
        chat_templates=templates,
    )


def _build(fields: GGUFFields, pieces: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """The compiled vocabulary, and whether its kind begins a text with BOS unless told otherwise."""
    kind = fields.string("tokenizer.ggml.model")
    if kind == "gpt2":
        pre_tokenizer = fields.string("tokenizer.ggml.pre", "default")
        backend = build_byte_level(fields, pieces, pre_tokenizer)
        return backend, pre_tokenizer in BOS_BY_DEFAULT
    if kind == "llama":
        return build_sentencepiece(fields, pieces, types), True
    raise UnsupportedModelError(
        f"{fields.name}: expected tokenizer.ggml.model to be 'gpt2' or 'llama', got {kind!r}"
    )


def _add_tokens(backend: tokenizers.Tokenizer, pieces: list[str], types: list[int]) -> None:
    """Have control and user-defined tokens matched in the text as a whole, before anything else."""
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token_id, token_type in enumerate(types):
        special = token_type in (TokenType.CONTROL, TokenType.UNKNOWN)
        if special or token_type == TokenType.USER_DEFINED:
            piece = backend.id_to_token(token_id)
            assert piece is not None, pieces[token_id]
            added[special].append(AddedToken(piece, normalized=False, special=special))
    backend.add_special_tokens(added[True])
    backend.add_tokens(added[False])


def _affix(fields: GGUFFields, key: str, default: bool, token_id: int | None) -> tuple[int, ...]:
    wanted = fields.boolean(f"tokenizer.ggml.{key}", default)
    return (token_id,) if wanted and token_id is not None else ()


def _chat_templates(fields: GGUFFields, metadata: Mapping[str, object]) -> dict[str, str]:
    """Template sources by name; other than the default one, "tool_use" is the one in use."""
    templates = {
        key.removeprefix(TEMPLATE_KEY + "."): fields.string(key)
        for key in metadata
        if key.startswith(TEMPLATE_KEY + ".")
    }
    if TEMPLATE_KEY in metadata:
        return templates | {"default": fields.string(TEMPLATE_KEY)}
    if templates and "default" not in templates:
        raise FileFormatError(
            f"{fields.name}: expected {TEMPLATE_KEY} beside the named chat templates {sorted(templates)}"
        )
    return templates
