"""Schemes that find each quantised matrix by its tensors, and checkpoints that have several of them.

config.json may name the layers of each scheme, by classes and patterns. Which one a matrix has is seen from
its tensors: their types, shapes, and whether there are zeros or indices of groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.models.experts.names import with_stored_expert_names
from octavo.models.formats.input_scales import with_input_scales
from octavo.models.formats.quantised_tensors import QuantisedTensors, StoredMatrix, check_the_rest
from octavo.models.weights import StoredTensors

# Names of the cache's scales that some tools put beside the projection.
_CACHE_SCALES = {"k_proj.k_scale": "k_scale", "v_proj.v_scale": "v_scale"}


class MatrixScheme(ABC):
    """A Scheme that finds each matrix by the tensor that holds its numbers."""

    __slots__ = ()

    @property
    def tile_rows(self) -> int:
        """Rows that share a scale, where scales are for tiles; else 1."""
        return 1

    @abstractmethod
    def stores(self, tensors: StoredTensors, name: str) -> bool:
        """Return whether a tensor holds a matrix's numbers."""

    def fits(self, tensors: StoredTensors, name: str) -> bool:
        """Return whether a matrix, whose numbers a tensor holds, has the other tensors of this scheme.

        Asked only where there are several schemes.
        """
        return True

    @abstractmethod
    def matrix(self, tensors: StoredTensors, name: str) -> StoredMatrix:
        """Return the matrix whose numbers a tensor holds.

        Raises:
            WeightsError: other tensors are missing or of the wrong shape.
            UnsupportedModelError: a tensor's type is not supported.
        """

    def open(self, tensors: StoredTensors) -> QuantisedTensors:
        """See Scheme."""
        return _open(tensors, [self])


@dataclass(frozen=True, slots=True)
class MixedScheme:
    """A Scheme of several; a matrix has the first one that fits. With none, only the cache has scales."""

    schemes: Sequence[MatrixScheme]

    def open(self, tensors: StoredTensors) -> QuantisedTensors:
        """See Scheme."""
        return _open(tensors, self.schemes)


def _open(tensors: StoredTensors, schemes: Sequence[MatrixScheme]) -> QuantisedTensors:
    """Return a checkpoint's tensors, quantised matrices as matrices.

    Raises:
        WeightsError: a matrix lacks a tensor, or has one of a wrong shape.
        UnsupportedModelError: a tensor's type is not supported, or belongs to no matrix.
    """
    tensors = with_stored_expert_names(tensors, max((scheme.tile_rows for scheme in schemes), default=1))
    matrices: dict[str, StoredMatrix] = {}
    for name in sorted(tensors.names()):
        own = [scheme for scheme in schemes if scheme.stores(tensors, name)]
        if own:
            # If it fits none, the last one says what is wrong.
            fitting = (scheme for scheme in own[:-1] if scheme.fits(tensors, name))
            matrices[f"{name.rpartition('.')[0]}.weight"] = next(fitting, own[-1]).matrix(tensors, name)
    matrices = with_input_scales(tensors, matrices)
    check_the_rest(tensors, set().union(*(matrix.tensors for matrix in matrices.values())))
    renamed = {
        name.removesuffix(theirs) + ours: name
        for name in tensors.names()
        for theirs, ours in _CACHE_SCALES.items()
        if name.endswith(f".{theirs}")
    }
    return QuantisedTensors(tensors, matrices, renamed)
