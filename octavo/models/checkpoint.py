"""Checks a checkpoint against the network, and reads its tensors, whole or a rank's part."""

import re
from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import Tensor

from octavo.errors import WeightsError, suggest
from octavo.forms.base import QuantisedWeight, Storage
from octavo.forms.float8 import quantise
from octavo.models.weights import Part, QuantisedSource, WeightSource, listed

# Tensors that checkpoints may have and nothing needs: rotary tables, which follow from the config, and scales
# of queries, which are never float8.
_HARMLESS = re.compile(
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|model\.layers\.\d+\.self_attn\.q_scale"
)


def check_tensors(
    weights: WeightSource, shapes: Mapping[str, tuple[int, ...]], optional: Iterable[str] = ()
) -> None:
    """Check that a checkpoint has exactly the network's tensors, and perhaps some of the optional ones.

    Rotary tables, scales of queries and an LM head beside tied embeddings are ignored.

    Raises:
        WeightsError: tensors are missing, unexpected or of the wrong shape; the first few are named.
    """
    names = weights.names()
    missing = [name for name in shapes if name not in names]
    unknown = names - shapes.keys() - set(optional)
    extra = sorted(name for name in unknown - {"lm_head.weight"} if not _HARMLESS.fullmatch(name))
    if missing:
        nearest = suggest(missing[0], extra)
        raise WeightsError(f"the checkpoint lacks {listed(missing)}, which config.json calls for{nearest}")
    if extra:
        nearest = suggest(extra[0], shapes)
        raise WeightsError(f"the checkpoint has {listed(extra)}, which config.json has no use for{nearest}")
    wrong = [
        f"{name} is {list(weights.shape(name))}, expected {list(shape)}"
        for name, shape in shapes.items()
        if tuple(weights.shape(name)) != shape
    ]
    if wrong:
        raise WeightsError(f"the checkpoint does not fit config.json: {listed(wrong)}")


class Checkpoint:
    """Reads tensors to a device and counts them.

    Attributes:
        dtype: of tensors read, and of activations.
        device: where they go.
    """

    def __init__(
        self,
        weights: WeightSource,
        stored: Container[str],
        quantised: Mapping[str, Storage],
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_tensors: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Wrap a source.

        Args:
            weights: the source; closed by its owner.
            stored: the matrices that it stores quantised, by name.
            quantised: the matrices that stay quantised, by name; see storage.kept_storage.
            dtype: type of tensors read.
            device: where they go.
            num_tensors: how many will be read in all.
            progress: called with (tensors read, num_tensors) after each.
        """
        self._weights = weights
        self._quantised = quantised
        self._stored = stored
        self.dtype = dtype
        self.device = device
        self._num_tensors = num_tensors
        self._num_read = 0
        self._progress = progress

    def read(
        self,
        name: str,
        *,
        rows: Part = None,
        columns: Part = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return a tensor, or only its rows (dimension 0) or columns (dimension 1)."""
        tensor = self._weights.read(name, rows=rows, columns=columns, dtype=dtype or self.dtype)
        self._count()
        return tensor.to(self.device)

    def stays_quantised(self, name: str) -> bool:
        """Return whether a matrix is to be read by read_quantised."""
        return name in self._quantised

    def kept_kind(self, name: str) -> str | None:
        """Return the kind of a matrix that stays quantised; None: it does not."""
        storage = self._quantised.get(name)
        return None if storage is None else storage.kind

    def read_quantised(self, name: str, *, rows: Part = None, columns: Part = None) -> QuantisedWeight:
        """Return a matrix, or a part of it, that stays quantised; others become float8."""
        weights = self._weights
        if not isinstance(weights, QuantisedSource) or name not in self._stored:
            return quantise(self.read(name, rows=rows, columns=columns))
        weight = weights.read_quantised(name, rows=rows, columns=columns, device=self.device)
        self._count()
        return weight

    def _count(self) -> None:
        self._num_read += 1
        if self._progress:
            self._progress(self._num_read, self._num_tensors)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor on the device, of the dtype if none is given."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
