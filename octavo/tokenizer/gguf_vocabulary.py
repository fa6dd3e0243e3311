"""Rebuilds a tokenizer from the metadata of a GGUF file."""

from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.tokenizer.gguf_bpe import (
    BOS_NAMES,
    GGUFFields,
    TokenType,
    build_byte_level,
    build_sentencepiece,
    read_gguf_fields,
)
from octavo.tokenizer.vocabularies import Vocabulary, end_of_answer_ids, special_token_ids

TEMPLATE_KEY = "tokenizer.chat_template"

# Other special tokens of Phi-3 take the white space after them along; these do not.
_PHI3_KEEPING = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def read_gguf_vocabulary(metadata: Mapping[str, object], name: str) -> Vocabulary:
    """Rebuild the vocabulary that a GGUF file's metadata describes; see Tokenizer.from_gguf."""
    fields = read_gguf_fields(metadata, name)
    types = fields.token_type or [int(TokenType.NORMAL)] * len(fields.tokens)
    backend = _build(fields, types)
    # Files do not say so: the first vocabulary of the family does this, those of Phi-4 do not.
    is_phi3 = fields.model == "llama" and metadata.get("general.architecture") == "phi3"
    _add_tokens(backend, fields.tokens, types, is_phi3=is_phi3)
    templates = _chat_templates(metadata, name)
    special_ids = special_token_ids(backend)
    eos_token_ids = end_of_answer_ids(backend, templates.values(), fields.end_ids)
    add_bos = fields.add_bos_token
    if add_bos is None:
        add_bos = fields.model in ("llama", "gemma4") or fields.pre in BOS_NAMES
    return Vocabulary(
        name=name,
        backend=backend,
        bos_token_id=fields.bos_token_id,
        eos_token_id=fields.eos_token_id,
        eos_token_ids=frozenset(eos_token_ids),
        special_ids=special_ids,
        prefix_ids=_affix(add_bos, fields.bos_token_id),
        suffix_ids=_affix(fields.add_eos_token, fields.eos_token_id),
        special_tokens=_special_tokens(fields, backend),
        chat_templates=templates,
    )


def _special_tokens(fields: GGUFFields, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Return the tokens that transformers names for chat templates beside BOS and EOS."""
    ids = {"unk_token": fields.unknown_token_id, "pad_token": fields.padding_token_id}
    pieces = {name: backend.id_to_token(i) for name, i in ids.items() if i is not None and i >= 0}
    return {name: piece for name, piece in pieces.items() if piece is not None}


def _build(fields: GGUFFields, types: list[int]) -> tokenizers.Tokenizer:
    if fields.model == "gpt2":
        return build_byte_level(fields)
    if fields.model in ("llama", "gemma4"):
        return build_sentencepiece(fields, types)
    raise UnsupportedModelError(
        f"{fields.name}: expected tokenizer.ggml.model to be 'gpt2', 'llama' or 'gemma4', "
        f"got {fields.model!r}"
    )


def _add_tokens(backend: tokenizers.Tokenizer, pieces: list[str], types: list[int], *, is_phi3: bool) -> None:
    """Match control and user-defined tokens in the text as a whole, before anything else."""
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    # Plain numbers: comparing 50,000 of them with those of an enumeration takes 20 ms.
    is_special = {
        int(TokenType.CONTROL): True,
        int(TokenType.UNKNOWN): True,
        int(TokenType.USER_DEFINED): False,
    }
    for token_id, token_type in enumerate(types):
        if token_type in is_special:
            special, piece = is_special[token_type], backend.id_to_token(token_id)
            assert piece is not None, pieces[token_id]
            strips = is_phi3 and (special or piece == "</s>") and piece not in _PHI3_KEEPING
            added[special].append(AddedToken(piece, normalized=False, special=special, rstrip=strips))
    backend.add_special_tokens(added[True])
    backend.add_tokens(added[False])


def _affix(wanted: bool, token_id: int | None) -> tuple[int, ...]:
    return (token_id,) if wanted and token_id is not None else ()


def _chat_templates(metadata: Mapping[str, object], name: str) -> dict[str, str]:
    """Return template sources by name; "default" and "tool_use" are used."""
    templates: dict[str, str] = {}
    for key, source in metadata.items():
        if key == TEMPLATE_KEY or key.startswith(TEMPLATE_KEY + "."):
            if not isinstance(source, str):
                raise FileFormatError(f"{name}: expected {key} to be a string, got {source!r}")
            templates[key[len(TEMPLATE_KEY) + 1 :] or "default"] = source
    if templates and "default" not in templates:
        raise FileFormatError(
            f"{name}: expected {TEMPLATE_KEY} beside the named chat templates {sorted(templates)}"
        )
    return templates
