"""The calls of the offline API that embed, classify and rerank; LLM has them."""

from collections.abc import Sequence
from contextlib import closing
from typing import Literal

from octavo.engine.engine import Engine
from octavo.engine.pooled_prompts import read_pairs, read_pooled
from octavo.engine.prompt_reader import POOLED, Prompt, TokenIds, as_prompt_list
from octavo.engine.shared_engine import SharedEngine
from octavo.errors import InvalidArgumentError
from octavo.garbage import no_full_collections
from octavo.outputs import PooledOutput, RankedDocument, RequestOutput
from octavo.pooling import Pooling, ranked


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
        """Embed prompts, one or a list; return an output for each, in order.

        Args:
            prompts: text, or token ids, which are taken as they are.
            dimensions: cut embeddings to this size before they are normalised, if they are trained so.
            prompt_name: which of the checkpoint's prompts begins texts; None: its default, if it has one.
            truncate_prompt_tokens: keep at most this many tokens, the first ones; None: refuse long prompts.
            cache_salt: as in `generate`.

        Raises:
            InvalidArgumentError: the model does not embed, or an argument does not fit it.
            PromptError: a prompt is empty, malformed or too long.
            EngineError: the engine failed on a request.
        """
        pooling = self._pooling("embed")
        pooling.check_dimensions(dimensions)
        outputs = self._pool(self._read(prompts, truncate_prompt_tokens, prompt_name), cache_salt)
        return [_output(pooling, output, dimensions) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> list[PooledOutput]:
        """Return the probabilities of labels; arguments and errors as of `embed`."""
        pooling = self._pooling("classify")
        outputs = self._pool(self._read(prompts, truncate_prompt_tokens), cache_salt)
        return [_output(pooling, output) for output in outputs]

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

        A model that embeds compares embeddings by their cosine. Errors as of `embed`.

        Args:
            query, documents: texts.
            top_n: how many to return; None: all.
            instruction: what the query asks for, for models that read one; None: their usual one.
            truncate_prompt_tokens, cache_salt: as in `embed`.
        """
        _check_number("top_n", top_n)
        keep = _check_number("truncate_prompt_tokens", truncate_prompt_tokens)
        reader = self.engine.prompts
        prompts = read_pairs(reader, [query], documents, are_answers=True, instruction=instruction, keep=keep)
        pooled = [output.vector for output in self._pool(prompts, cache_salt)]
        return ranked(self._pooling(None).relevances(pooled, 1))[:top_n]

    def _pooling(self, task: Literal["embed", "classify"] | None) -> Pooling:
        return self.engine.prompts.pooling_for(task)

    def _read(
        self, prompts: Prompt | Sequence[Prompt], keep: int | None, name: str | None = None
    ) -> list[TokenIds]:
        reader, listed = self.engine.prompts, as_prompt_list(prompts)
        _check_number("truncate_prompt_tokens", keep)
        return [read_pooled(reader, prompt, prompt_name=name, keep=keep) for prompt in listed]

    def _pool(self, prompts: Sequence[TokenIds], cache_salt: str) -> list[RequestOutput]:
        """Pool prompts; equal ones once, so that rounding does not tell them apart."""
        keys = [prompt.packed.tobytes() for prompt in prompts]
        with closing(self._shared.caller()) as caller, no_full_collections():
            outputs = {
                key: caller.add(ids, POOLED, cache_salt=cache_salt, read_along=False)
                for key, ids in dict(zip(keys, prompts, strict=True)).items()
            }
            self._shared.run_until(lambda: all(output.finished for output in outputs.values()))
        return [outputs[key] for key in keys]


def _check_number(name: str, value: int | None) -> int | None:
    """Return a value, which None leaves open.

    Raises:
        InvalidArgumentError: it is no integer above 0.
    """
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidArgumentError(f"{name} must be an integer above 0 or None, got {value!r}")
    return value


def _output(pooling: Pooling, output: RequestOutput, dimensions: int | None = None) -> PooledOutput:
    values = pooling.read(output.vector, dimensions=dimensions)
    label = pooling.labels[int(values.argmax())] if pooling.labels else None
    return PooledOutput(values.tolist(), output.prompt_token_ids, output.num_cached_tokens, label)
