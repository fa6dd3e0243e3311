"""GGUF files: a checked header, and the bytes of tensors on request."""

from pathlib import Path
from typing import Self

import numpy as np

from octavo.errors import FileFormatError
from octavo.models.formats.gguf.header import GGUFTensorInfo
from octavo.models.formats.gguf.parts import GGUFHeader, read_parts
from octavo.models.weights import missing_tensor


class GGUFFile:
    """One GGUF file, or several of one model, with checked headers. Only one thread at a time may read.

    A file is memory-mapped only while its header is parsed; tensors are read with plain reads. So it never
    counts as memory of this process, and truncating it while in use raises an error instead of a bus fault.

    Attributes:
        path: the file, of several the first.
        metadata: key -> int, float, bool, str, list[str], NumPy array, or a list of arrays.
        tensors: by name, in the order of the files.
    """

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        """Wrap a parsed file; use `open`."""
        self.path = path
        self.metadata = header.metadata
        self.tensors = header.tensors
        self._parts = header.parts

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a file, and the other parts of its model, and check their whole headers.

        Raises:
            ModelNotFoundError: a file cannot be opened, it is not the first part, or parts are missing.
            FileFormatError: it is not a GGUF file, or damaged; names the field, its value and the bound.
            UnsupportedModelError: Octavo does not have its version or byte order.
        """
        return cls(Path(path), read_parts(Path(path)))

    def read_into(self, info: GGUFTensorInfo, start: int, buffer: np.ndarray) -> None:
        """Fill a buffer with bytes of a tensor.

        Args:
            info: of the tensor, or of a part of one that is a tensor by itself.
            start: first byte within the tensor.
            buffer: [n] uint8 contiguous, overwritten; start + n is at most the tensor's size.

        Raises:
            FileFormatError: the file has changed since its header was read.
        """
        part = self._parts[info.part]
        file = part.opened()
        assert 0 <= start <= start + buffer.nbytes <= info.nbytes, f"{info.name}: bytes beyond the tensor"
        file.seek(info.offset + start)
        view = buffer.data
        while view:
            num_read = file.readinto(view)
            if not num_read:
                raise FileFormatError(
                    f"{part.path.name}: {info.name} is cut short: the file changed while it was in use"
                )
            view = view[num_read:]

    def raw(self, name: str) -> np.ndarray:
        """Return all bytes of a tensor: [nbytes] uint8, a copy.

        Raises:
            WeightsError: there is no such tensor.
        """
        info = self._info(name)
        buffer = np.empty(info.nbytes, np.uint8)
        self.read_into(info, 0, buffer)
        return buffer

    def close(self) -> None:
        """Close all files. The header stays usable; reading a tensor opens its file again."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _info(self, name: str) -> GGUFTensorInfo:
        if name not in self.tensors:
            raise missing_tensor(self.path.name, name, self.tensors)
        return self.tensors[name]
