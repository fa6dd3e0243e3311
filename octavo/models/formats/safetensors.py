"""A folder of safetensors files, whole or in shards, memory-mapped."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import FileFormatError, ModelNotFoundError, UnsupportedModelError, suggest
from octavo.json_file import is_present, read_json_object
from octavo.models.formats.quantised_tensors import FLOATS
from octavo.models.weights import Part, missing_tensor, slice_bounds

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_MAX_INDEX_BYTES = 64 * 2**20
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})


class SafetensorsWeights:
    """The tensors of a folder with model.safetensors, or with several such files and their index."""

    def __init__(self, folder: Path, *, any_type: bool = False) -> None:
        """Open all files and check them against each other.

        Args:
            folder: a model folder in Hugging Face's layout.
            any_type: tensors may be of any type, and single numbers; False: others than floats are refused.

        Raises:
            ModelNotFoundError: the folder has no safetensors files.
            UnsupportedModelError: it has pickled weights only, or tensors that are not of a float type.
            FileFormatError: a file is damaged, or the index and the shards disagree.
        """
        self._folder = folder
        self._any_type = any_type
        self._slices: dict[str, Any] = {}
        if is_present(folder / INDEX_NAME):
            for file_name, names in _read_index(folder / INDEX_NAME).items():
                self._add(folder / file_name, names)
        elif (folder / SINGLE_NAME).is_file():
            self._add(folder / SINGLE_NAME, None)
        else:
            raise _nothing_to_load(folder)

    def names(self) -> Set[str]:
        """Return the names of all tensors."""
        return self._slices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; see WeightSource."""
        return tuple(self._slice(name).get_shape()) or (1,)

    def type_name(self, name: str) -> str:
        """See StoredTensors."""
        return self._slice(name).get_dtype()

    def read(self, name: str, *, rows: Part = None, columns: Part = None, dtype: torch.dtype) -> Tensor:
        """Read a tensor or a part of it; see WeightSource."""
        # This is always a copy: truncating the file later would crash the process at a mapped tensor.
        mapped = self._mapped(name, rows, columns)
        return mapped.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)

    def read_stored(self, name: str, *, rows: Part = None, columns: Part = None) -> Tensor:
        """See StoredTensors."""
        return self._mapped(name, rows, columns).clone(memory_format=torch.contiguous_format)

    def _mapped(self, name: str, rows: Part, columns: Part) -> Tensor:
        """Return a part of a tensor as a view of the file; a single number as [1]."""
        if not self._slice(name).get_shape():
            return self._slice(name)[...].reshape(1)
        shape = self.shape(name)
        part: tuple[slice, ...] = (slice(*slice_bounds(rows, shape[0])),)
        if columns is not None:
            part += (slice(*slice_bounds(columns, shape[1])),)
        try:
            return self._slice(name)[part]
        except SafetensorError as error:
            raise FileFormatError(f"{self._folder}: cannot read {name}: {error}") from error

    def close(self) -> None:
        """Unmap the files."""
        self._slices.clear()

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            raise missing_tensor(str(self._folder), name, self._slices)
        return self._slices[name]

    def _add(self, path: Path, expected: Set[str] | None) -> None:
        """Add a file's tensors, which must be those that the index puts there."""
        try:
            file = safe_open(path, framework="pt")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            message = f"{path} is missing, though the index names it: download the checkpoint again"
            raise FileFormatError(message) from error
        except (SafetensorError, OSError) as error:
            raise FileFormatError(f"{path} is not a complete safetensors file: {error}") from error
        if expected is not None:
            _check_index(path, expected, slices.keys())
        for name, found in slices.items():
            if not self._any_type:
                _check_tensor(path, name, found.get_dtype(), found.get_shape())
        self._slices |= slices


def _check_index(path: Path, expected: Set[str], found: Set[str]) -> None:
    """Refuse an index that does not match a shard: files of two checkpoints were mixed."""
    for name in sorted(expected - found):
        raise FileFormatError(
            f"{path}: no tensor {name!r}, which {INDEX_NAME} places there{suggest(name, found)}"
        )
    for name in sorted(found - expected):
        raise FileFormatError(
            f"{path}: has a tensor {name!r}, which {INDEX_NAME} does not place there{suggest(name, expected)}"
        )


def _check_tensor(path: Path, name: str, dtype: str, shape: list[int]) -> None:
    if dtype not in FLOATS:
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} has the type {dtype}, which is not supported; "
            f"supported: {', '.join(sorted(FLOATS))}"
        )
    if not shape:
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} is a single number; expected 1 dimension or more"
        )


def _nothing_to_load(folder: Path) -> ModelNotFoundError | UnsupportedModelError:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        return UnsupportedModelError(
            f"{folder} has its weights only as {pickles[0]}: opening such files can run code, so Octavo "
            "never reads them; convert them to safetensors"
        )
    return ModelNotFoundError(f"{folder}: expected {SINGLE_NAME} or {INDEX_NAME}, found neither")


def _read_index(path: Path) -> Mapping[str, Set[str]]:
    """Return the names of the tensors in each shard, by file name."""
    weight_map = read_json_object(path, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileFormatError(f"{path}: expected weight_map to be an object of tensor name -> file name")
    shards: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        if not _is_plain_name(file_name):
            raise FileFormatError(
                f"{path}: expected shards to be .safetensors files of the same folder, got {file_name!r}"
            )
        shards.setdefault(file_name, set()).add(name)
    return shards


def _is_plain_name(file_name: object) -> bool:
    """Return whether a name from the untrusted index stays in its folder."""
    return (
        isinstance(file_name, str)
        and file_name.endswith(".safetensors")
        and not set("/\\:\0").intersection(file_name)
    )
