"""The calls of the offline API that embed, classify and rerank; LLM has them."""

from collections.abc import Sequence
from contextlib import closing
from typing import Literal

from octavo.engine.engine import Engine
from octavo.engine.pooled_prompts import read_pairs, read_pooled
from octavo.engine.prompt_reader import POOLED, Prompt, TokenIds, as_prompt_list
from octavo.engine.shared_engine import SharedEngine
from octavo.errors import EngineError
from octavo.garbage import no_full_collections
from octavo.outputs import PooledOutput, RankedDocument, RequestOutput
from octavo.pooling import Pooling


class PooledCalls:
    """What an LLM does with a model that embeds or classifies. Prompts share batches."""

    engine: Engine
    _shared: SharedEngine

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> list[PooledOutput]:
        """Embed prompts.

        Args:
            prompts: one or a list: text, or token ids, which are taken as they are.
            dimensions: cut embeddings to this size before they are normalised, if they are trained so.
            prompt_name: which of the checkpoint's prompts begins texts; None: its default, if it has one.
            truncate_prompt_tokens: keep at most this many tokens, the first ones; None: refuse long prompts.
            cache_salt: as in `generate`.

        Returns:
            One output per prompt, in order: `values` is the embedding.

        Raises:
            InvalidArgumentError: the model does not embed, or an argument does not fit it.
            PromptError: a prompt is empty, malformed or too long.
            EngineError: the engine failed on a request.
        """
        pooling = self._pooling("embed")
        pooling.check_dimensions(dimensions)
        reader, keep = self.engine.prompts, truncate_prompt_tokens
        listed = as_prompt_list(prompts)
        read = [read_pooled(reader, prompt, prompt_name=prompt_name, keep=keep) for prompt in listed]
        return [_output(pooling, output, dimensions) for output in self._pool(read, cache_salt)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> list[PooledOutput]:
        """Classify prompts; arguments and errors as of `embed`.

        Returns:
            One output per prompt, in order: `values` are the probabilities of the labels, and `label` is the
            most likely one.
        """
        pooling, reader = self._pooling("classify"), self.engine.prompts
        read = [
            read_pooled(reader, prompt, keep=truncate_prompt_tokens) for prompt in as_prompt_list(prompts)
        ]
        return [_output(pooling, output, None) for output in self._pool(read, cache_salt)]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> list[RankedDocument]:
        """Return documents by how well they answer a query, the best first; equal ones keep their order.

        A model that embeds compares embeddings by their cosine.

        Args:
            query, documents: texts.
            top_n: how many to return; None: all.
            instruction: what the query asks for, for models that read one; None: their usual one.
            truncate_prompt_tokens, cache_salt: as in `embed`.

        Raises:
            InvalidArgumentError, PromptError, EngineError: as in `embed`; there are several labels.
        """
        prompts = read_pairs(
            self.engine.prompts,
            [query],
            documents,
            are_answers=True,
            instruction=instruction,
            keep=truncate_prompt_tokens,
        )
        pooled = [output.pooled for output in self._pool(prompts, cache_salt) if output.pooled is not None]
        return ranked(self._pooling(None).relevances(pooled, 1))[:top_n]

    def _pooling(self, task: Literal["embed", "classify"] | None) -> Pooling:
        self.engine.prompts.check_task(pooled=True, task=task)
        assert self.engine.prompts.pooling is not None
        return self.engine.prompts.pooling

    def _pool(self, prompts: Sequence[TokenIds], cache_salt: str) -> list[RequestOutput]:
        with closing(self._shared.caller()) as caller, no_full_collections():
            outputs = [caller.add(ids, POOLED, cache_salt=cache_salt, read_along=False) for ids in prompts]
            self._shared.run_until(lambda: all(output.finished for output in outputs))
        for output in outputs:
            check_pooled(output)
        return outputs


def ranked(scores: Sequence[float]) -> list[RankedDocument]:
    """Return documents by their scores, the best first; equal ones keep their order."""
    return sorted(map(RankedDocument, range(len(scores)), scores), key=lambda one: -one.score)


def check_pooled(output: RequestOutput) -> None:
    """Check that a finished request was pooled.

    Raises:
        OctavoError: what ended it; EngineError if it was aborted.
    """
    if output.error is not None:
        raise output.error
    if output.pooled is None or output.outputs[0].finish_reason != "stop":
        raise EngineError("the request was aborted before its prompt was pooled")


def _output(pooling: Pooling, output: RequestOutput, dimensions: int | None) -> PooledOutput:
    assert output.pooled is not None
    values = pooling.read(output.pooled, dimensions=dimensions)
    label = pooling.labels[int(values.argmax())] if pooling.labels else None
    return PooledOutput(values.tolist(), output.prompt_token_ids, output.num_cached_tokens, label)
