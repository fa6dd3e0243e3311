"""Seeded random weights of any shape, for tests and measurements without a checkpoint."""

import hashlib
import math
import re
from collections.abc import Mapping, Set

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.forms.base import Storage
from octavo.forms.mxfp4 import MXFP4, Mxfp4Weight, block_slice
from octavo.models.weights import CPU, Part, missing_tensor, slice_bounds

_STANDARD_DEVIATION = 0.02
# A prime, so that rows of a tensor start at different numbers.
_POOL_SIZE = 2**21 - 9
# With any bytes, 2 ** -7 makes weights of standard deviation 0.023.
_MXFP4_EXPONENT = 127 - 7
_ONES = re.compile(r".*(?:norm(?:_\d)?\.weight|\.(?:layer_scalar|scale|per_expert_scale))")
_EXPERT = re.compile(r".*\.experts\.\d+\.\w+_proj\.weight")


class DummyWeights:
    """Normally distributed weights of standard deviation 0.02; weights of norms and factors are 1.

    All tensors copy from one pool of random numbers, each from its own start. Drawing billions of numbers
    would take minutes; copying takes seconds, and reading a slice costs only that slice.

        pool    [ r0 r1 r2 ............... rP ]  then from r0 again
        tensor         ^ start = hash(seed, name), row after row
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0) -> None:
        """Draw the pool.

        Args:
            shapes: shape of each tensor by its Hugging Face name.
            seed: equal seeds give equal weights.

        Raises:
            UnsupportedModelError: a row of a tensor is longer than the pool.
        """
        for name, shape in shapes.items():
            if math.prod(shape[1:]) >= _POOL_SIZE:
                raise UnsupportedModelError(
                    f"dummy weights need rows of fewer than {_POOL_SIZE} numbers, got {name} of {list(shape)}"
                )
        self._shapes = dict(shapes)
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randn(_POOL_SIZE, dtype=torch.float32, generator=generator) * _STANDARD_DEVIATION
        # The pool is stored twice, so that no read wraps around, and rounded only once for each dtype.
        self._pools = {torch.float32: torch.cat((pool, pool))}

    def names(self) -> Set[str]:
        """Return the names of `shapes`."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; see WeightSource."""
        if name not in self._shapes:
            raise missing_tensor("dummy weights", name, self._shapes)
        return self._shapes[name]

    def read(self, name: str, *, rows: Part = None, columns: Part = None, dtype: torch.dtype) -> Tensor:
        """Return a tensor or a part of it, equal to that part of the whole; see WeightSource."""
        first, *rest = self.shape(name)
        start, stop = slice_bounds(rows, first)
        kept = slice(None)
        out_shape = [stop - start, *rest]
        if columns is not None:
            kept = slice(*slice_bounds(columns, rest[0]))
            out_shape[1] = kept.stop - kept.start
        if _ONES.fullmatch(name):
            return torch.ones(out_shape, dtype=dtype)
        out = torch.empty(out_shape, dtype=dtype)
        self._fill(out, self._pool(dtype), self._position(name) + start * math.prod(rest), rest, kept)
        return out

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _pool(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._pools:
            self._pools[dtype] = self._pools[torch.float32].to(dtype)
        return self._pools[dtype]

    def _fill(self, out: Tensor, pool: Tensor, position: int, row_shape: list[int], columns: slice) -> None:
        """Fill `out` with rows of a pool from `position` on, as many at a time as it holds."""
        row_size = math.prod(row_shape)
        chunk = _POOL_SIZE // max(1, row_size)
        for row in range(0, out.shape[0], chunk):
            num_rows = min(chunk, out.shape[0] - row)
            start = (position + row * row_size) % _POOL_SIZE
            numbers = pool[start : start + num_rows * row_size].view(num_rows, *row_shape)
            out[row : row + num_rows] = numbers[:, columns] if row_shape else numbers

    def _position(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % _POOL_SIZE


class DummyMxfp4(DummyWeights):
    """Dummy weights whose experts are MXFP4, made of random bytes; it is a QuantisedSource, too."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0) -> None:
        """Draw the pools; arguments and errors as of DummyWeights."""
        super().__init__(shapes, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randint(256, (_POOL_SIZE,), dtype=torch.uint8, generator=generator)
        self._bytes = torch.cat((pool, pool))
        self._storage = dict.fromkeys(filter(_EXPERT.fullmatch, shapes), MXFP4)

    def storage(self) -> Mapping[str, Storage]:
        """See QuantisedSource."""
        return self._storage

    def read_quantised(
        self, name: str, *, rows: Part = None, columns: Part = None, device: torch.device = CPU
    ) -> Mxfp4Weight:
        """See QuantisedSource."""
        num_rows, num_columns = self.shape(name)
        start, stop = slice_bounds(rows, num_rows)
        first, last = slice_bounds(columns, num_columns)
        blocks = block_slice(name, first, last)
        values = torch.empty(stop - start, (last - first) // 2, dtype=torch.uint8)
        position = self._position(name) + start * (num_columns // 2)
        self._fill(values, self._bytes, position, [num_columns // 2], slice(first // 2, last // 2))
        exponents = values.new_full((len(values), blocks.stop - blocks.start), _MXFP4_EXPONENT)
        return Mxfp4Weight(values, exponents).to(device)
