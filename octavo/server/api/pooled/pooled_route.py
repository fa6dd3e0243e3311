"""POST /v1/embeddings, /classify, /pooling, /score and /v1/rerank; and /api/embed in Ollama's form."""

import base64
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import RequestOutput
from octavo.pooling import Pooling, ranked
from octavo.server.api.pooled.pooled_structs import (
    ClassifyRequest,
    EmbeddingRequest,
    Entry,
    OllamaEmbed,
    OllamaEmbeddings,
    PooledFields,
    PooledList,
    PoolingRequest,
    RankedResult,
    Ranking,
    RerankRequest,
    ScoreRequest,
    listed,
)
from octavo.server.context import Context, new_id, note_left_out
from octavo.server.generation import usage_of
from octavo.server.limits import while_present


async def pooled(context: Context, request: Request) -> Response:
    """Answer by what the model pools of each prompt."""
    fields, prompts, left_out = await context.read_pooled(request)
    note_left_out(request, left_out)
    salt = context.salt(request, fields.cache_salt)
    work = context.pool(prompts, cache_salt=salt, priority=fields.priority or 0)
    outputs = await while_present(request, work)
    new, pooling = new_id("pool", request, fields.request_id), context.engine.prompts.pooling_for()
    body = await context.run(request, _answer, new, context.model, fields, pooling, outputs)
    return Response(body, media_type="application/json")


def _answer(
    new: str, model: str, fields: PooledFields, pooling: Pooling, outputs: Sequence[RequestOutput]
) -> bytes:
    vectors, usage = [output.vector for output in outputs], usage_of(outputs)
    if isinstance(fields, OllamaEmbed):
        found = [pooling.read(vector, dimensions=fields.dimensions).tolist() for vector in vectors]
        times = [output.metrics for output in outputs]
        end = max((one.finished_s or 0 for one in times), default=0)
        took = end - min((one.arrival_s for one in times), default=0)
        return msgspec.json.encode(
            {
                "model": model,
                "embeddings": found,
                "total_duration": round(took * 1e9),
                "load_duration": 0,
                "prompt_eval_count": usage.prompt_tokens,
            }
        )
    if isinstance(fields, OllamaEmbeddings):
        return msgspec.json.encode({"embedding": pooling.read(vectors[0]).tolist()})
    if isinstance(fields, ClassifyRequest):
        entries = [_entry(index, fields, pooling, vector) for index, vector in enumerate(vectors)]
    else:
        num_firsts = len(listed(fields.text_1)) if isinstance(fields, ScoreRequest) else 1
        scores = pooling.relevances(vectors, num_firsts, fields.use_activation)
        if isinstance(fields, RerankRequest):
            ranking = Ranking(id=new, model=model, results=_results(fields, scores), usage=usage)
            return msgspec.json.encode(ranking)
        entries = [Entry(index=i, object="score", score=score) for i, score in enumerate(scores)]
    answer = PooledList(id=new, created=int(time.time()), model=model, data=entries, usage=usage)
    return msgspec.json.encode(answer)


def _results(fields: RerankRequest, scores: Sequence[float]) -> list[RankedResult]:
    documents, are_shown = fields.listed(), fields.return_documents is not False
    return [
        RankedResult(
            index=one.index,
            relevance_score=one.score,
            document=documents[one.index] if are_shown else UNSET,
        )
        for one in ranked(scores)[: fields.top_n]
    ]


def _entry(index: int, fields: ClassifyRequest, pooling: Pooling, vector: np.ndarray) -> Entry:
    dimensions = fields.dimensions if isinstance(fields, EmbeddingRequest) else None
    values = pooling.read(vector, dimensions=dimensions, use_activation=fields.use_activation)
    if not isinstance(fields, EmbeddingRequest):
        label, probs = pooling.labels[int(values.argmax())], values.tolist()
        return Entry(index=index, object="classification", label=label, probs=probs, num_classes=len(probs))
    is_base64 = fields.encoding_format == "base64"
    data = base64.b64encode(values.astype("<f4").tobytes()).decode() if is_base64 else values.tolist()
    if isinstance(fields, PoolingRequest):
        return Entry(index=index, object="pooling", data=data)
    return Entry(index=index, object="embedding", embedding=data)
