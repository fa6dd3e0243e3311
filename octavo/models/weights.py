"""The protocols of sources of tensors: safetensors, GGUF and dummy weights."""

from collections.abc import Collection, Iterable, Mapping, Set
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.errors import WeightsError, suggest
from octavo.forms.base import QuantisedWeight, Storage

CPU = torch.device("cpu")
# Rows or columns of a tensor, without a step; None: all of them.
Part = slice | None


class WeightSource(Protocol):
    """Hands out a checkpoint's tensors, whole or in part, under their Hugging Face names."""

    def names(self) -> Set[str]:
        """Return all names, such as "model.layers.0.self_attn.q_proj.weight"."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor.

        Raises:
            WeightsError: there is no such tensor.
        """
        ...

    def read(self, name: str, *, rows: Part = None, columns: Part = None, dtype: torch.dtype) -> Tensor:
        """Read a tensor, or only its rows (dimension 0) and columns (dimension 1).

        Args:
            name: one of `names()`.
            rows: part of dimension 0, without a step; None: all of it.
            columns: part of dimension 1, like rows.
            dtype: floating type of the result.

        Returns:
            The part, of `dtype`, contiguous, on the CPU; never a view of the file.

        Raises:
            WeightsError: there is no such tensor.
            FileFormatError: the file is damaged.
        """
        ...

    def close(self) -> None:
        """Close the files; tensors already read stay valid."""
        ...


class StoredTensors(WeightSource, Protocol):
    """A WeightSource whose tensors may be of any type."""

    def type_name(self, name: str) -> str:
        """Return a tensor's type as safetensors calls it: "F8_E4M3", "BF16", "I32"."""
        ...

    def read_stored(self, name: str, *, rows: Part = None, columns: Part = None) -> Tensor:
        """Read a tensor, or a part of it, in its own type; see WeightSource.read. A single number is [1]."""
        ...


@runtime_checkable
class QuantisedSource(Protocol):
    """A WeightSource that also hands out matrices as they are stored, quantised; `read` dequantises them."""

    def storage(self) -> Mapping[str, Storage]:
        """Return the matrices that are stored so, by name."""
        ...

    def read_quantised(
        self, name: str, *, rows: Part = None, columns: Part = None, device: torch.device = CPU
    ) -> QuantisedWeight:
        """Read one of these matrices, or a part of it; arguments and errors as of `read`.

        Args:
            name: of the matrix.
            rows: part of its rows.
            columns: part of its columns.
            device: where the weight goes. Packed integers are copied there as they are, and unpacked there.

        Raises:
            ConfigError: rows or columns cut what shares a scale, and the format cannot do that.
        """
        ...


def missing_tensor(where: str, name: str, names: Collection[str]) -> WeightsError:
    """Return the error for a tensor that a source does not have, with the nearest name that it has."""
    return WeightsError(f"{where}: no tensor {name!r} among {len(names)}{suggest(name, names)}")


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def slice_bounds(part: Part, size: int) -> tuple[int, int]:
    """Return (start, stop) of a slice of a dimension of `size`, which must lie within it."""
    if part is None:
        return 0, size
    start = 0 if part.start is None else part.start
    stop = size if part.stop is None else part.stop
    assert part.step in (None, 1), f"a part of a tensor is contiguous, got {part}"
    assert 0 <= start <= stop <= size, f"{part} is not within a dimension of {size}"
    return start, stop
