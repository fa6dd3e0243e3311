"""Reads bodies of /api/embed, and of /api/embeddings, its old form. Nothing here needs the engine."""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from octavo.engine.pooled_prompts import read_pooled
from octavo.engine.prompt_reader import PromptReader
from octavo.errors import PromptError
from octavo.server.api.body import decode
from octavo.server.api.pooled.pooled_structs import MAX_INPUTS
from octavo.server.api.structs import RequestBody
from octavo.server.api_errors import refused
from octavo.server.reading.forms import packed
from octavo.server.reading.requests import Answered, Materials, check_model


class OllamaEmbed(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /api/embed. Longer texts are cut off unless `truncate` is false."""

    api: ClassVar[str] = "ollama_embed"

    model: str
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddings(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /api/embeddings."""

    api: ClassVar[str] = "ollama_embed"

    model: str
    prompt: str = ""


class EmbedInput(Struct):
    """A body that was read: packed ids."""

    prompts: list[bytes]
    dimensions: int | None
    is_old: bool


def read_embed(materials: Materials, body: bytes) -> Answered:
    """Read a body of /api/embed into an EmbedInput, as msgpack. This may take long.

    Raises:
        ApiError, PromptError, InvalidArgumentError: it is malformed, or the model does not embed.
    """
    fields, left_out = decode(body, OllamaEmbed)
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    return _read(materials, fields.model, texts, fields.truncate is not False, fields.dimensions), left_out


def read_embeddings(materials: Materials, body: bytes) -> Answered:
    """Read a body of /api/embeddings in the same way."""
    fields, left_out = decode(body, OllamaEmbeddings)
    return _read(materials, fields.model, [fields.prompt], True, None, is_old=True), left_out


def _read(
    materials: Materials,
    model: str,
    texts: list[str],
    truncates: bool,
    dimensions: int | None,
    *,
    is_old: bool = False,
) -> bytes:
    check_model(model, materials.model)
    reader: PromptReader = materials.prompts.reader
    reader.pooling_for("embed").check_dimensions(dimensions)
    keep = reader.max_prompt_tokens if truncates else None
    try:
        prompts = [packed(read_pooled(reader, text, keep=keep)) for text in texts]
    except PromptError as error:
        raise refused("prompt" if is_old else "input", f"cannot be embedded: {error}") from error
    return msgspec.msgpack.encode(EmbedInput(prompts, dimensions, is_old))
