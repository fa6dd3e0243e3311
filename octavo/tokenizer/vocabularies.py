"""Vocabularies of tokenizers, and how they are read from a folder in Hugging Face's layout."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from octavo.errors import FileFormatError, ModelNotFoundError
from octavo.json_file import is_present, read_file, read_json_fields, read_json_object

_ENDS = "<|im_end|> <|eot_id|> <|end|> <end_of_turn> <turn|> <|tool_response> <|return|> <|call|>"
END_OF_TURN_PIECES = tuple(_ENDS.split())

# A vocabulary of 260,000 tokens takes 35 MiB of JSON, its configuration 1 MiB.
_MAX_TOKENIZER_BYTES = 256 * 2**20
_MAX_CONFIG_BYTES = 32 * 2**20
_MAX_TEMPLATE_BYTES = 2**20
_MAX_TEMPLATES = 64
_MORE_TEMPLATES = "additional_chat_templates"


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
    declared: Iterable[int],
) -> set[int]:
    """Return the ids that end answers: declared ones, and well-known ones that a chat template writes.

    Some instruct models declare only an end-of-document token as EOS, although their turns end with another
    one. If the template writes that token, the model was trained to end its turns with it. In harmony, which
    has <|return|>, an answer is several messages, and <|end|> ends only one of them. Gemma 4 waits for a
    tool's result after <|tool_response>, which is no special token in files of llama.cpp.
    """
    added = backend.get_added_tokens_decoder()
    written = {piece for piece in END_OF_TURN_PIECES if any(piece in source for source in templates)}
    ids = {i for piece in written if (i := backend.token_to_id(piece)) in added}.union(declared)
    end = backend.token_to_id("<|end|>")
    return ids - {end} if "<|return|>" in written and end is not None else ids


class _TokenEntry(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


_Templates = str | dict[str, str] | list[_NamedTemplate]


class _TokenizerConfig(msgspec.Struct):
    """Fields of tokenizer_config.json and special_tokens_map.json that matter here."""

    bos_token: str | _TokenEntry | None = None
    eos_token: str | _TokenEntry | None = None
    additional_special_tokens: list[str | _TokenEntry] | None = None
    chat_control_tokens: list[str] | None = None
    chat_template: _Templates | None = None
    response_template: dict[str, Any] | None = None


class _TemplateFile(msgspec.Struct):
    """The field of chat_template.json and processor_config.json that matters here."""

    chat_template: _Templates | None = None


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
    eos_token_ids = end_of_answer_ids(backend, templates.values(), _generation_eos_ids(folder))
    if eos_token_id is not None:
        eos_token_ids.add(eos_token_id)
    return Vocabulary(
        name=str(folder),
        backend=backend,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        eos_token_ids=frozenset(eos_token_ids),
        special_ids=special_ids,
        special_tokens=_special_tokens(folder),
        control_tokens=tuple(config.chat_control_tokens or ()),
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


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return all named special tokens that templates see, as transformers finds them."""
    fields: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if "added_tokens_decoder" not in fields and is_present(folder / name):
            fields |= read_json_object(folder / name, _MAX_CONFIG_BYTES)
    named = {name: token for name, token in fields.items() if name.endswith("_token")}
    extra = fields.get("extra_special_tokens")
    entries = (named | extra if isinstance(extra, dict) else named).items()
    pieces = {name: token.get("content") if isinstance(token, dict) else token for name, token in entries}
    return {name: piece for name, piece in pieces.items() if isinstance(piece, str)}


def _chat_templates(folder: Path, config: _TokenizerConfig) -> dict[str, str]:
    """Return template sources by name; "default" and "tool_use" are used.

    The order is transformers': files of their own, tokenizer_config.json, and then what its processors read.
    """
    templates = _template_files(folder)
    if "default" not in templates:
        templates = _declared_templates(folder, config) | templates
    if templates and not templates.keys() & {"default", "tool_use"}:
        raise FileFormatError(
            f"{folder / 'tokenizer_config.json'}: expected one chat template named 'default', "
            f"got {sorted(templates)}"
        )
    return templates


def _template_files(folder: Path) -> dict[str, str]:
    named = {path.name.removesuffix(".jinja"): path for path in (folder / _MORE_TEMPLATES).glob("*.jinja")}
    if len(named) > _MAX_TEMPLATES:
        raise FileFormatError(
            f"{folder / _MORE_TEMPLATES}: expected at most {_MAX_TEMPLATES} templates, got {len(named)}"
        )
    path = folder / "chat_template.jinja"
    paths = {"default": path} | named if is_present(path) else named
    return {name: _template(path) for name, path in paths.items()}


def _template(path: Path) -> str:
    try:
        return read_file(path, _MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: expected UTF-8 text: {error}") from error


def _declared_templates(folder: Path, config: _TokenizerConfig) -> dict[str, str]:
    declared = config.chat_template
    for name in ("processor_config.json", "chat_template.json"):
        if declared is None:
            declared = read_json_fields(folder / name, _TemplateFile, _MAX_CONFIG_BYTES).chat_template
    if isinstance(declared, list):
        return {entry.name: entry.template for entry in declared}
    return {"default": declared} if isinstance(declared, str) else declared or {}
