"""Reads the bodies of requests to embed, classify and rerank. Needs neither the engine nor PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from octavo.engine.pooled_prompts import read_pairs, read_pooled
from octavo.engine.prompt_reader import PromptReader, TokenIds, as_prompt_list
from octavo.errors import PromptError
from octavo.server.api.body import decode
from octavo.server.api.pooled.pooled_structs import (
    MAX_INPUTS,
    ClassifyRequest,
    DocumentText,
    EmbeddingRequest,
    PooledFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from octavo.server.api_errors import as_api_error, refused
from octavo.server.reading.requests import Materials, check_model

RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")
POOLED: Mapping[str, type[PooledFields]] = MappingProxyType(
    {
        "/v1/embeddings": EmbeddingRequest,
        "/classify": ClassifyRequest,
        "/pooling": PoolingRequest,
        **dict.fromkeys(("/score", "/v1/score"), ScoreRequest),
        **dict.fromkeys(RERANK, RerankRequest),
    }
)
"""The type of a body, by path."""


@dataclass(frozen=True, slots=True)
class PooledInput:
    """A body that was read: itself, its prompts, and the fields that were left out."""

    fields: PooledFields
    prompts: Sequence[TokenIds]
    left_out: tuple[str, ...]


def read_body(materials: Materials, path: str, body: bytes) -> PooledInput:
    """Decode a body and read its prompts, which may take long.

    Raises:
        ApiError: it is malformed, a prompt is empty or too long, or the model does something else.
    """
    fields, left_out = decode(body, POOLED[path])
    check_model(fields.model, materials.model)
    reader = materials.prompts.reader
    if isinstance(fields, ClassifyRequest):
        return PooledInput(fields, _read_inputs(reader, fields), left_out)
    try:
        return PooledInput(fields, _read_pairs(reader, fields), left_out)
    except PromptError as error:
        found = as_api_error(error)
        found.detail.param = "documents" if isinstance(fields, RerankRequest) else "text_2"
        raise found from None


def _read_inputs(reader: PromptReader, fields: ClassifyRequest) -> list[TokenIds]:
    task, name = "classify", None
    if isinstance(fields, EmbeddingRequest):
        task, name = "embed", fields.prompt_name
    if isinstance(fields, PoolingRequest):
        task = fields.task
    reader.check_task(pooled=True, task=task)
    assert reader.pooling is not None
    reader.pooling.check_dimensions(getattr(fields, "dimensions", None))
    prompts, keep = as_prompt_list(fields.input), _keep(reader, fields)
    if not 0 < len(prompts) <= MAX_INPUTS:
        raise refused("input", f"must hold 1 to {MAX_INPUTS} texts, got {len(prompts)}")
    try:
        return [read_pooled(reader, prompt, prompt_name=name, keep=keep) for prompt in prompts]
    except PromptError as error:
        found = as_api_error(error)
        found.detail.param = "input"
        raise found from None


def _read_pairs(reader: PromptReader, fields: PooledFields) -> list[TokenIds]:
    keep = _keep(reader, fields)
    if isinstance(fields, ScoreRequest):
        return read_pairs(reader, listed(fields.text_1), listed(fields.text_2), keep=keep)
    assert isinstance(fields, RerankRequest)
    texts, instruction = [text_of(document) for document in fields.documents], fields.instruction
    return read_pairs(reader, [fields.query], texts, are_answers=True, instruction=instruction, keep=keep)


def listed(texts: str | Sequence[str]) -> list[str]:
    """Return one text or several as a list."""
    return [texts] if isinstance(texts, str) else list(texts)


def text_of(document: str | DocumentText) -> str:
    """Return a document's text."""
    return document if isinstance(document, str) else document.text


def _keep(reader: PromptReader, fields: PooledFields) -> int | None:
    keep, most = fields.truncate_prompt_tokens, reader.max_model_len - 1
    if keep is not None and keep != -1 and not 1 <= keep <= most:
        raise refused("truncate_prompt_tokens", f"must be -1 or in [1, {most}], got {keep}")
    return most if keep == -1 else keep
