"""POST /v1/embeddings, /classify, /pooling, /score and /v1/rerank."""

import base64
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.pooled_calls import ranked
from octavo.outputs import RequestOutput
from octavo.pooling import Pooling
from octavo.server.api.pooled.pooled_input import listed, text_of
from octavo.server.api.pooled.pooled_structs import (
    DocumentText,
    EmbeddingRequest,
    Entry,
    PooledFields,
    PooledList,
    PoolingRequest,
    RankedResult,
    Ranking,
    RerankRequest,
    ScoreRequest,
)
from octavo.server.context import Context, new_id, note_left_out
from octavo.server.generation import usage_of
from octavo.server.limits import while_present


async def pooled(context: Context, request: Request) -> Response:
    """Answer by what the model pools of each prompt."""
    found = await context.read_pooled(request)
    note_left_out(request, found.left_out)
    fields, salt = found.fields, context.salt(request, found.fields.cache_salt)
    work = context.pool(found.prompts, cache_salt=salt, priority=fields.priority or 0)
    outputs = await while_present(request, work)
    pooling = context.engine.model_config.pooling
    assert pooling is not None, "what reads bodies refuses models that generate"
    new = new_id("pool", request, fields.request_id)
    body = await context.run(request, _answer, new, context.model, fields, pooling, outputs)
    return Response(body, media_type="application/json")


def _answer(
    new: str, model: str, fields: PooledFields, pooling: Pooling, outputs: Sequence[RequestOutput]
) -> bytes:
    vectors = [output.pooled for output in outputs if output.pooled is not None]
    usage = usage_of(outputs, without_output=True)
    if isinstance(fields, RerankRequest):
        results = _results(fields, pooling.relevances(vectors, 1, fields.use_activation))
        return msgspec.json.encode(Ranking(id=new, model=model, results=results, usage=usage))
    if isinstance(fields, ScoreRequest):
        scores = pooling.relevances(vectors, len(listed(fields.text_1)), fields.use_activation)
        entries = [Entry(index=i, object="score", score=score) for i, score in enumerate(scores)]
    else:
        entries = [_entry(index, fields, pooling, vector) for index, vector in enumerate(vectors)]
    answer = PooledList(id=new, created=int(time.time()), model=model, data=entries, usage=usage)
    return msgspec.json.encode(answer)


def _results(fields: RerankRequest, scores: Sequence[float]) -> list[RankedResult]:
    results = [
        RankedResult(index=one.index, relevance_score=one.score) for one in ranked(scores)[: fields.top_n]
    ]
    for result in results if fields.return_documents is not False else ():
        result.document = DocumentText(text_of(fields.documents[result.index]))
    return results


def _entry(index: int, fields: PooledFields, pooling: Pooling, vector: np.ndarray) -> Entry:
    dimensions = getattr(fields, "dimensions", None)
    values = pooling.read(vector, dimensions=dimensions, use_activation=fields.use_activation)
    if not isinstance(fields, EmbeddingRequest):
        label = pooling.labels[int(values.argmax())]
        probs = values.tolist()
        return Entry(index=index, object="classification", label=label, probs=probs, num_classes=len(probs))
    is_base64 = fields.encoding_format == "base64"
    data = base64.b64encode(values.astype("<f4").tobytes()).decode() if is_base64 else values.tolist()
    if isinstance(fields, PoolingRequest):
        return Entry(index=index, object="pooling", data=data)
    return Entry(index=index, object="embedding", embedding=data)
