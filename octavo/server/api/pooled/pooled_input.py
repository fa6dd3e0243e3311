"""Reads the bodies of requests to embed, classify and rerank. Needs neither the engine nor PyTorch."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

from octavo.engine.pooled_prompts import read_pairs, read_pooled
from octavo.engine.prompt_reader import Prompt, PromptReader, TokenIds, as_prompt_list
from octavo.errors import PromptError
from octavo.server.api.body import decode
from octavo.server.api.pooled.pooled_structs import (
    MAX_INPUTS,
    ClassifyRequest,
    EmbeddingRequest,
    OllamaEmbed,
    OllamaEmbeddings,
    PooledFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    listed,
)
from octavo.server.api_errors import as_api_error, refused
from octavo.server.reading.requests import Materials, check_model

SCORES, RANKS = ("/score", "/v1/score"), ("/v1/rerank", "/v2/rerank", "/rerank")
POOLED: Mapping[str, type[PooledFields]] = MappingProxyType(
    {
        "/v1/embeddings": EmbeddingRequest,
        "/classify": ClassifyRequest,
        "/pooling": PoolingRequest,
        **dict.fromkeys(SCORES, ScoreRequest),
        **dict.fromkeys(RANKS, RerankRequest),
        "/api/embed": OllamaEmbed,
        "/api/embeddings": OllamaEmbeddings,
    }
)
"""The type of a body, by path."""
PooledInput = tuple[PooledFields, Sequence[TokenIds], tuple[str, ...]]
"""A body that was read: its fields, its prompts, and the names of what was left out."""


def read_body(materials: Materials, path: str, body: bytes) -> PooledInput:
    """Decode a body and read its prompts, which may take long.

    Raises:
        ApiError: it is malformed, a prompt is empty or too long, or the model does something else.
    """
    fields, left_out = decode(body, POOLED[path])
    check_model(fields.model, materials.model)
    try:
        return fields, _read(materials.prompts.reader, fields), left_out
    except PromptError as error:
        found = as_api_error(error)
        found.detail.param = fields.subject
        raise found from None


def _read(reader: PromptReader, fields: PooledFields) -> list[TokenIds]:
    if isinstance(fields, OllamaEmbed):
        keep = None if fields.truncate is False else -1
        fields = EmbeddingRequest(
            input=[*listed(fields.input)], dimensions=fields.dimensions, truncate_prompt_tokens=keep
        )
    elif isinstance(fields, OllamaEmbeddings):
        fields = EmbeddingRequest(input=fields.prompt, truncate_prompt_tokens=-1)
    keep, most = fields.truncate_prompt_tokens, reader.max_prompt_tokens
    if keep is not None and keep != -1 and not 1 <= keep <= most:
        raise refused("truncate_prompt_tokens", f"must be -1 or in [1, {most}], got {keep}")
    keep = most if keep == -1 else keep
    if isinstance(fields, RerankRequest):
        texts, wish = [document.text for document in fields.listed()], fields.instruction
        return read_pairs(reader, [fields.query], texts, are_answers=True, instruction=wish, keep=keep)
    if isinstance(fields, ScoreRequest):
        return read_pairs(reader, listed(fields.text_1), listed(fields.text_2), keep=keep)
    assert isinstance(fields, ClassifyRequest)
    task, name = "classify", None
    if isinstance(fields, EmbeddingRequest):
        task, name = fields.task if isinstance(fields, PoolingRequest) else "embed", fields.prompt_name
        reader.pooling_for(task).check_dimensions(fields.dimensions)
    reader.pooling_for(task)
    prompts = as_prompt_list(cast(list[Prompt], fields.input))
    if len(prompts) > MAX_INPUTS:
        raise refused("input", f"must hold at most {MAX_INPUTS} texts, got {len(prompts)}")
    return [read_pooled(reader, prompt, prompt_name=name, keep=keep) for prompt in prompts]
