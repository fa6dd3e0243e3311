"""Repeats calls that differ only in the numbers in their tensors; imports no Triton.

A call of a few short kernels takes longer on the host than on a GPU: tiles are chosen, arguments are put
together, and in every launch Triton looks for the compiled kernel. In calls that are alike, all of it comes
out the same:

    first call    runs as written
    second call   is watched     q -> [0]   empty(64) -> [1]   launch f(q, [1], 3)   launch g([1], 5)
    later calls   are repeated   allocate [1], launch the compiled f and g with today's addresses

A call can be repeated if it only allocates, makes views and launches. Any other always runs as written.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Groups = tuple[tuple[Any, ...], ...]
Results = tuple[Tensor, ...]

_aten = torch.ops.aten
_EMPTY = (
    *(_aten.empty.memory_format, _aten.empty_strided.default),
    *(_aten.new_empty.default, _aten.empty_like.default),
)
# As PyTorch aligns what it allocates on a GPU.
_ALIGNED = 512
# Room for the layers of a few models.
_MOST_DESCRIPTORS = 1024


class Address(NamedTuple):
    """A pointer on the device, as a descriptor for TMA takes it; keeps no memory alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


class _Place(NamedTuple):
    """Where something lies: bytes after the beginning of a tensor of the call."""

    tensor: int
    offset: int


class _Described:
    """A descriptor for TMA of a tensor of the call."""

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


class _Launch(NamedTuple):
    """A launch: what runs the compiled kernel in its grid, and arguments, some of which hold places."""

    run: Callable[..., None]
    arguments: tuple[Any, ...]
    with_places: tuple[int, ...]


class _Tape(NamedTuple):
    """What a call does.

    Attributes:
        made: how each of its own tensors is allocated, which are numbered after the given ones; or, of those
            that it neither fills nor returns, the first byte in one piece of memory.
        num_bytes: of that piece.
        launches: its kernels, in their order.
        results: numbers of the tensors that it returns.
    """

    made: tuple[Callable[[], Tensor] | int, ...]
    num_bytes: int
    launches: tuple[_Launch, ...]
    results: tuple[int, ...]

    def play(self, given: Sequence[Tensor], stream: int) -> Results:
        """Do as the call did, with other tensors."""
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
    if noted.__class__ is _Place:
        return addresses[noted.tensor] + noted.offset
    if noted.__class__ is _Described:
        return noted.at(addresses[noted.tensor])
    return tuple([addresses[x.tensor] + x.offset if x.__class__ is _Place else x for x in noted])


class Watch(TorchDispatchMode):
    """Notes what a call does, from what it asks of PyTorch and from its launches."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        # All are kept until the end, so that no other tensor gets an identity that is known.
        self._tensors, self._views = list(given), list[Tensor]()
        self._places = {id(tensor): _Place(number, 0) for number, tensor in enumerate(given)}
        self._num_given = len(given)
        # None: nothing fills the tensor.
        self._makers: list[Callable[[], Tensor] | None] = []
        self._launches: list[_Launch] = []
        self._can_repeat = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator of PyTorch and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _EMPTY:
            self._add(result, None)
        elif func.is_view:
            for view in result if isinstance(result, list | tuple) else (result,):
                self._add_view(args[0], view)
        elif isinstance(result, Tensor) and not _takes_tensors(func):
            self._add(result, partial(func, *args, **kwargs))
        else:
            self._can_repeat = False
        return result

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Launch a kernel and note it; see octavo.gpu.launch.launch."""
        compiled = kernel.run(*arguments, grid=grid, warmup=False, **options)
        # Constants may be given by name.
        by_name = [options[name] for name in kernel.arg_names[len(arguments) :]]
        noted = tuple([self._note(argument) for argument in (*arguments, *by_name)])
        with_places = tuple([at for at, argument in enumerate(noted) if _holds_place(argument)])
        self._launches.append(_Launch(compiled[(*grid, 1, 1)[:3]], noted, with_places))

    def tape(self, results: Results) -> _Tape | None:
        """Return what the call did, or None if it cannot be repeated."""
        returned = [self._whole(result) for result in results]
        if not self._can_repeat or None in returned:
            return None
        made: list[Callable[[], Tensor] | int] = []
        num_bytes = 0
        for number, make in enumerate(self._makers, start=self._num_given):
            tensor = self._tensors[number]
            if make is None and number not in returned:
                made.append(num_bytes)
                num_bytes += -(-tensor.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
            else:
                made.append(make or _empty_like(tensor))
        numbers = tuple([number for number in returned if number is not None])
        return _Tape(tuple(made), num_bytes, tuple(self._launches), numbers)

    def _whole(self, result: Tensor) -> int | None:
        """Return the number of a tensor of the call's own that a result is all of."""
        place = self._places.get(id(result))
        if place is None or place.tensor < self._num_given or place.offset != 0:
            return None
        tensor = self._tensors[place.tensor]
        alike = [(x.shape, x.stride(), x.dtype) for x in (tensor, result)]
        return place.tensor if alike[0] == alike[1] else None

    def _add(self, tensor: Tensor, make: Callable[[], Tensor] | None) -> None:
        self._places[id(tensor)] = _Place(len(self._tensors), 0)
        self._tensors.append(tensor)
        self._makers.append(make)

    def _add_view(self, parent: Tensor, view: Tensor) -> None:
        place = self._places.get(id(parent))
        if place is None:
            self._can_repeat = False
            return
        offset = view.data_ptr() - parent.data_ptr() if view.numel() else 0
        self._places[id(view)] = _Place(place.tensor, place.offset + offset)
        self._views.append(view)

    def _note(self, argument: Any) -> Any:
        """Return an argument of a launch with places instead of tensors."""
        if isinstance(argument, tuple):
            return tuple([self._note_one(x) for x in argument])
        return self._note_one(argument)

    def _note_one(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            self._can_repeat = self._can_repeat and place is not None
            return place
        if isinstance(address := getattr(value, "base", None), Address):
            tensors = [n for n, x in enumerate(self._tensors) if x.data_ptr() == address.pointer]
            self._can_repeat = self._can_repeat and len(tensors) == 1
            return _Described(value, tensors[0]) if tensors else None
        return value


def _takes_tensors(func: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in func._schema.arguments)


def _empty_like(tensor: Tensor) -> Callable[[], Tensor]:
    shape, strides, like = tensor.shape, tensor.stride(), {"dtype": tensor.dtype, "device": tensor.device}
    return partial(torch.empty_strided, shape, strides, **like)


def _holds_place(argument: Any) -> bool:
    if isinstance(argument, _Place | _Described):
        return True
    return isinstance(argument, tuple) and any(isinstance(x, _Place) for x in argument)


class _Running(threading.local):
    watch: Watch | None = None


running = _Running()
"""The call of this thread that is watched."""


class Repeater:
    """Runs calls that are alike; several threads may use it at a time."""

    def __init__(self) -> None:
        self._tape: _Tape | None = None
        self._number = itertools.count()

    def run(self, function: Callable[..., Results], groups: Groups, given: Sequence[Tensor]) -> Results:
        """Return function(*groups), which works on an NVIDIA GPU.

        Calls are alike if the function does the same in all of them but for the numbers in their tensors,
        which it must not look at. Their tensors have the same shapes, strides and dtypes, are on one device,
        and begin at multiples of 16 bytes or not; all else in the groups is equal. The function takes tensors
        from the groups only, and returns tensors that it has allocated.

        Args:
            function: the call.
            groups: its arguments, each a tuple.
            given: tensors_in(groups).
        """
        device = given[0].device
        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self.run(function, groups, given)
        if self._tape is not None:
            return self._tape.play(given, torch.cuda.current_stream(device).cuda_stream)
        return self._watch(function, groups) if next(self._number) == 1 else function(*groups)

    def _watch(self, function: Callable[..., Results], groups: Groups) -> Results:
        # Each tensor as an object of its own: one may have been given twice.
        groups = tuple([_alias(group) for group in groups])
        running.watch = watch = Watch(tensors_in(groups))
        try:
            with watch:
                results = function(*groups)
        finally:
            running.watch = None
        self._tape = watch.tape(results)
        return results


def tensors_in(groups: Iterable[tuple[Any, ...]]) -> list[Tensor]:
    """Return the tensors of tuples, in their order."""
    return [x for group in groups for x in group if x is not None and isinstance(x, Tensor)]


def _alias(group: tuple[Any, ...]) -> tuple[Any, ...]:
    values = [value.detach() if isinstance(value, Tensor) else value for value in group]
    make = getattr(group, "_make", tuple)
    return make(values)
