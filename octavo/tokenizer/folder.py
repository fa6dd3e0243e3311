"""Reads a tokenizer from a model folder in Hugging Face's layout."""

from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from octavo.errors import FileFormatError, ModelNotFoundError
from octavo.json_file import is_present, read_file, read_json_fields
from octavo.tokenizer.vocabulary import Vocabulary, end_of_answer_ids, special_token_ids

# A vocabulary of 260,000 tokens takes 35 MiB of JSON, its configuration 1 MiB.
_MAX_TOKENIZER_BYTES = 256 * 2**20
_MAX_CONFIG_BYTES = 32 * 2**20
_MAX_TEMPLATE_BYTES = 2**20


class _TokenEntry(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """Fields of tokenizer_config.json and special_tokens_map.json that matter here."""

    bos_token: str | _TokenEntry | None = None
    eos_token: str | _TokenEntry | None = None
    additional_special_tokens: list[str | _TokenEntry] | None = None
    chat_template: str | list[_NamedTemplate] | None = None
    response_template: dict[str, Any] | None = None


class _GenerationConfig(msgspec.Struct):
    """The field of generation_config.json that matters here."""

    eos_token_id: int | list[int] | None = None


def read_folder_vocabulary(folder: Path) -> Vocabulary:
    """Read the tokenizer's files in a folder; see Tokenizer.from_folder."""
    backend = _read_backend(folder)
    config = read_json_fields(folder / "tokenizer_config.json", _TokenizerConfig, _MAX_CONFIG_BYTES)
    fallback = read_json_fields(folder / "special_tokens_map.json", _TokenizerConfig, _MAX_CONFIG_BYTES)
    bos_token_id = _token_id(backend, config.bos_token or fallback.bos_token, folder)
    eos_token_id = _token_id(backend, config.eos_token or fallback.eos_token, folder)
    templates = _chat_templates(folder, config)
    special_ids = _mark_special(backend, config, fallback)
    eos_token_ids = end_of_answer_ids(backend, templates.values(), special_ids, _generation_eos_ids(folder))
    if eos_token_id is not None:
        eos_token_ids.add(eos_token_id)
    return Vocabulary(
        name=str(folder),
        backend=backend,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        eos_token_ids=frozenset(eos_token_ids),
        special_ids=special_ids,
        chat_templates=templates,
        response_template=config.response_template,
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not is_present(path):
        raise ModelNotFoundError(
            f"expected a tokenizer.json in {folder}, got none; save the tokenizer there in the fast format, "
            "for instance with AutoTokenizer.from_pretrained(model).save_pretrained(folder)"
        )
    content = read_file(path, _MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the tokenizers package raises plain Exception
        raise FileFormatError(f"{path}: expected a tokenizer in JSON: {error}") from error
    # never cut or pad a prompt silently, even if training did
    backend.no_truncation()
    backend.no_padding()
    return backend


def _token_id(backend: tokenizers.Tokenizer, token: str | _TokenEntry | None, folder: Path) -> int | None:
    if token is None:
        return None
    piece = _piece(token)
    token_id = backend.token_to_id(piece)
    if token_id is None:
        raise FileFormatError(
            f"{folder}: the special token {piece!r} of tokenizer_config.json or special_tokens_map.json "
            "is not in tokenizer.json"
        )
    return token_id


def _piece(token: str | _TokenEntry) -> str:
    return token if isinstance(token, str) else token.content


def _mark_special(backend: tokenizers.Tokenizer, *configs: _TokenizerConfig) -> frozenset[int]:
    """Mark the tokens that the configuration files call special; return all special ids."""
    declared: set[int] = set()
    for config in configs:
        for token in [config.bos_token, config.eos_token, *(config.additional_special_tokens or ())]:
            token_id = None if token is None else backend.token_to_id(_piece(token))
            if token_id is not None:
                declared.add(token_id)
    unknown = sorted(declared - backend.get_added_tokens_decoder().keys())
    backend.add_special_tokens([piece for i in unknown if (piece := backend.id_to_token(i)) is not None])
    return special_token_ids(backend) | declared


def _generation_eos_ids(folder: Path) -> set[int]:
    """Return the EOS ids of generation_config.json, or of config.json if there is none."""
    path = folder / "generation_config.json"
    if not is_present(path):
        path = folder / "config.json"
    ids = read_json_fields(path, _GenerationConfig, _MAX_CONFIG_BYTES).eos_token_id
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)


def _chat_templates(folder: Path, config: _TokenizerConfig) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if is_present(path):
        content = read_file(path, _MAX_TEMPLATE_BYTES)
        try:
            return {"default": content.decode()}
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{path}: expected UTF-8 text: {error}") from error
    if config.chat_template is None:
        return {}
    if isinstance(config.chat_template, str):
        return {"default": config.chat_template}
    templates = {entry.name: entry.template for entry in config.chat_template}
    if "default" not in templates:
        raise FileFormatError(
            f"{folder / 'tokenizer_config.json'}: expected one chat template named 'default', "
            f"got {sorted(templates)}"
        )
    return templates
