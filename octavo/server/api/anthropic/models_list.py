"""GET /v1/models for Anthropic's clients, which name their version in a header."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct


class ModelInfo(Struct, kw_only=True):
    """A model that is served.

    Attributes:
        created_at: when this server was started, by RFC 3339.
        max_input_tokens: tokens of a prompt and its answer together; None while the model loads.
        max_tokens: likewise of an answer alone.
    """

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(Struct, kw_only=True):
    """All models: one page, whatever page was asked for."""

    data: list[ModelInfo]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


def model_info(name: str, created_s: int, max_model_len: int | None) -> ModelInfo:
    """Describe a model.

    Args:
        name: by which clients ask for it.
        created_s: seconds since the epoch.
        max_model_len: tokens of a prompt and its answer together; None while it loads.
    """
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=max_model_len,
        max_tokens=max_model_len,
    )


def model_page(models: Sequence[ModelInfo]) -> ModelPage:
    """List models."""
    ids = [model.id for model in models]
    return ModelPage(data=list(models), first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)
