"""How a model reads a prompt as a whole: an embedding, or the probabilities of labels. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.errors import InvalidArgumentError
from octavo.outputs import RankedDocument

Activation = Literal["none", "sigmoid", "softmax"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling:
    """What a checkpoint says about that. Embeddings and labels come from states behind the last norm.

    Attributes:
        task: "embed"; "classify", which scores pairs of texts if there is one label.
        tokens: whose states are read: of the last token, or the mean of all.
        size: numbers of an embedding; labels of a classifier.
        normalises: embeddings are divided by their length.
        is_matryoshka: embeddings are trained to be cut.
        dimensions: the sizes to which they may be; empty: any.
        activation: turns the logits of labels into probabilities.
        labels: their names.
        token_ids: the tokens whose logits are those of the labels, the last two of no and yes; empty: the
            checkpoint has a matrix of its own.
        is_qwen3_pair: a pair is read as Qwen3-Reranker publishes it, else one text after the other.
        prompts: pairs of a name and the text that begins a text to be embedded.
        default_prompt: the name of the one that is used if a request names none; None: none is.
    """

    task: Literal["embed", "classify"]
    size: int
    tokens: Literal["last", "mean"] = "last"
    normalises: bool = True
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    activation: Activation = "none"
    labels: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    is_qwen3_pair: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None

    @property
    def does(self) -> str:
        """What the model does, in words."""
        return "embeds texts" if self.task == "embed" else "classifies texts"

    def prompt(self, name: str | None) -> str:
        """Return the text that begins texts to be embedded.

        Raises:
            InvalidArgumentError: the checkpoint has none of that name.
        """
        texts = dict(self.prompts)
        name = self.default_prompt if name is None else name
        if name is not None and name not in texts:
            known = ", ".join(texts) or "none"
            raise InvalidArgumentError(f"prompt_name must be one of the checkpoint's: {known}; got {name!r}")
        return "" if name is None else texts[name]

    def check_dimensions(self, dimensions: int | None) -> None:
        """Check that embeddings may be cut to a size.

        Raises:
            InvalidArgumentError: they are not trained so, or not to this size.
        """
        if dimensions in (None, self.size):
            return
        if not self.is_matryoshka:
            raise InvalidArgumentError(
                f"dimensions must be {self.size} or left out, got {dimensions}: the checkpoint does not say "
                "that its embeddings may be cut; if they may, set is_matryoshka in its config.json to true"
            )
        allowed = f"one of {[*self.dimensions]}" if self.dimensions else f"from 1 to {self.size}"
        if dimensions not in (self.dimensions or range(1, self.size + 1)):
            raise InvalidArgumentError(f"dimensions must be {allowed}, got {dimensions}")

    def read(
        self, values: np.ndarray, *, dimensions: int | None = None, use_activation: bool | None = None
    ) -> np.ndarray:
        """Turn what the model gives into what the user gets.

        Args:
            values: [size] float32, a pooled state or logits.
            dimensions: cut an embedding to that size, before it is normalised.
            use_activation: normalise, or turn logits into probabilities; None: as the checkpoint says.
        """
        if self.task == "embed":
            values = values[:dimensions]
            normalises = self.normalises if use_activation is None else use_activation
            return values / max(float(np.linalg.norm(values)), 1e-12) if normalises else values
        if use_activation is False or self.activation == "none":
            return values
        # Documents that do not fit differ in probabilities that are almost 0, and are ranked by them.
        exact = values.astype(np.float64)
        total = np.logaddexp(0, exact) if self.activation == "sigmoid" else np.logaddexp.reduce(exact)
        return np.exp(exact - total)

    def relevances(
        self, pooled: Sequence[np.ndarray], num_firsts: int, use_activation: bool | None = None
    ) -> list[float]:
        """Return how well pairs fit together: probabilities, or for a model that embeds cosines.

        Args:
            pooled: of the prompts that read_pairs has made.
            num_firsts: how many first texts it was given.
            use_activation: False: logits in place of probabilities.
        """
        if self.task != "embed":
            return [float(self.read(values, use_activation=use_activation)[0]) for values in pooled]
        units = np.stack([self.read(values, use_activation=True) for values in pooled])
        return (units[:num_firsts] * units[num_firsts:]).sum(-1).tolist()


def ranked(scores: Sequence[float]) -> list[RankedDocument]:
    """Return documents by their scores, the best first; equal ones keep their order."""
    return sorted(map(RankedDocument, range(len(scores)), scores), key=lambda one: -one.score)
