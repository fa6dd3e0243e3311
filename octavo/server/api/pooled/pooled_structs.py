"""Requests and answers of /v1/embeddings, /classify, /pooling, /score and /v1/rerank."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.server.api.structs import Priority, RequestBody, RequestId, Salt, Usage

MAX_INPUTS = 2048
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class PooledFields(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Fields common to all; `subject` is the one that holds texts.

    With `use_activation` false, embeddings are not normalised, and logits stay logits.
    """

    api: ClassVar[str] = "pooled"
    subject: ClassVar[str] = "input"

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    use_activation: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None


class ClassifyRequest(PooledFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /classify. An input is a text or token ids, alone or in a list."""

    input: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]


class EmbeddingRequest(ClassifyRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/embeddings. A prompt of the checkpoint, given by its name, begins each text."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class PoolingRequest(EmbeddingRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /pooling."""

    task: Literal["embed", "classify"] | None = None


class OllamaEmbed(PooledFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /api/embed of Ollama's API. Longer texts are cut off unless `truncate` is false."""

    api: ClassVar[str] = "ollama_embed"

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddings(PooledFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /api/embeddings, its old form."""

    api: ClassVar[str] = "ollama_embed"
    subject: ClassVar[str] = "prompt"

    prompt: str = ""


class ScoreRequest(PooledFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /score: one text to compare with others, or pairs of texts."""

    subject: ClassVar[str] = "text_2"

    text_1: Texts
    text_2: Texts


class DocumentText(Struct, forbid_unknown_fields=True):
    """A document."""

    text: str


class RerankRequest(PooledFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/rerank, as Cohere, Jina and vLLM have it."""

    subject: ClassVar[str] = "documents"

    query: str
    documents: Annotated[list[str | DocumentText], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    def listed(self) -> list[DocumentText]:
        """Return the documents in one form."""
        return [DocumentText(one) if isinstance(one, str) else one for one in self.documents]


def listed(texts: str | Sequence[str]) -> list[str]:
    """Return one text or several as a list."""
    return [texts] if isinstance(texts, str) else list(texts)


class Entry(Struct, kw_only=True):
    """What was made of one input. An embedding is a list of numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["embedding", "pooling", "score", "classification"]
    embedding: list[float] | str | UnsetType = UNSET
    data: list[float] | str | UnsetType = UNSET
    score: float | UnsetType = UNSET
    label: str | UnsetType = UNSET
    probs: list[float] | UnsetType = UNSET
    num_classes: int | UnsetType = UNSET


class PooledList(Struct, kw_only=True):
    """Answer of all but /v1/rerank: an entry for each input, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Entry]
    usage: Usage


class RankedResult(Struct, kw_only=True):
    """A document's place: which of those given it is, and how well it answers the query."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Ranking(Struct, kw_only=True):
    """Answer of POST /v1/rerank: the best document first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: Usage
