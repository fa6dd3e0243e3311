"""What a call on a GPU does, recorded to be repeated with other tensors; see octavo.kernels.repeat.

Imports no Triton.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Descriptors kept: enough for the layers of a few models.
_MOST_DESCRIPTORS = 1024


class Place(NamedTuple):
    """Where something lies: bytes after the beginning of a tensor of the call."""

    tensor: int
    offset: int


class Described:
    """A descriptor for TMA of a tensor of the call.

    Its base is a NamedTuple with the tensor's address in `pointer`, so that it keeps no memory alive.
    """

    def __init__(self, descriptor: Any, tensor: int) -> None:
        self.tensor = tensor
        self._descriptor, self._known = descriptor, dict[int, Any]()

    def at(self, pointer: int) -> Any:
        """Return the descriptor of such a tensor at another address."""
        found = self._known.get(pointer)
        if found is None:
            if len(self._known) >= _MOST_DESCRIPTORS:
                self._known.clear()
            base = self._descriptor.base._replace(pointer=pointer)
            found = self._known[pointer] = dataclasses.replace(self._descriptor, base=base)
        return found


class Launch(NamedTuple):
    """A launch: what runs the compiled kernel in its grid, and arguments, some of which hold places."""

    run: Callable[..., None]
    arguments: tuple[Any, ...]
    with_places: tuple[int, ...]


class Tape(NamedTuple):
    """What a call does.

    Attributes:
        made: how each of its own tensors, numbered after its arguments', is allocated; for a tensor that it
            neither fills nor returns, its first byte in a piece of memory that such tensors share.
        num_bytes: size of that piece.
        launches: its kernels, in their order.
        results: the numbers of the tensors that it returns.
    """

    made: tuple[Callable[[], Tensor] | int, ...]
    num_bytes: int
    launches: tuple[Launch, ...]
    results: tuple[int, ...]

    def play(self, given: Sequence[Tensor], stream: int) -> tuple[Tensor, ...]:
        """Repeat the call with other tensors."""
        shared = torch.empty(self.num_bytes, dtype=torch.uint8, device=given[0].device)
        begin = shared.data_ptr()
        tensors = [*given, *[shared if isinstance(make, int) else make() for make in self.made]]
        addresses = [tensor.data_ptr() for tensor in given]
        for make, tensor in zip(self.made, tensors[len(given) :], strict=True):
            addresses.append(begin + make if isinstance(make, int) else tensor.data_ptr())
        for run, noted, with_places in self.launches:
            arguments = list(noted)
            for at in with_places:
                arguments[at] = _fill(noted[at], addresses)
            run(*arguments, stream=stream)
        return tuple([tensors[number] for number in self.results])


def _fill(noted: Any, addresses: list[int]) -> Any:
    """Return an argument of a launch with today's addresses."""
    if noted.__class__ is Place:
        return addresses[noted.tensor] + noted.offset
    if noted.__class__ is Described:
        return noted.at(addresses[noted.tensor])
    return tuple([addresses[x.tensor] + x.offset if x.__class__ is Place else x for x in noted])
