"""Repeats calls that differ only in the numbers in their tensors; imports no Triton.

A call of a few short kernels takes longer on the host than on a GPU: tiles are chosen, arguments are put
together, and in every launch Triton looks for the compiled kernel. In calls that are alike, all of this gives
the same result:

    first call    runs as written
    second call   is watched     q -> [0]   empty(64) -> [1]   launch f(q, [1], 3)   launch g([1], 5)
    later calls   are repeated   allocate [1], launch the compiled f and g with today's addresses

A call can be repeated if it only allocates, makes views and launches. Any other always runs as written.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.tape import Described, Launch, Place, Tape

Groups = tuple[tuple[Any, ...], ...]
Results = tuple[Tensor, ...]

_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.empty_like.default,
)
# A call of the operator itself takes three times as long.
_FUNCTIONS = {_aten.zeros.default: torch.zeros, _aten.arange.default: torch.arange}
# Bytes to which PyTorch aligns its allocations on a GPU.
_ALIGNED = 512


class Watch(TorchDispatchMode):
    """Notes what a call does, from what it asks of PyTorch and from its launches."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        # All are kept until the end, so that no other tensor gets an identity that is known.
        self._tensors, self._views = list(given), list[Tensor]()
        self._places = {id(tensor): Place(number, 0) for number, tensor in enumerate(given)}
        self._num_given = len(given)
        # None stands for a tensor that nothing fills.
        self._makers: list[Callable[[], Tensor] | None] = []
        self._launches: list[Launch] = []
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
        elif isinstance(result, Tensor) and not any("Tensor" in str(x.type) for x in func._schema.arguments):
            self._add(result, partial(_FUNCTIONS.get(func, func), *args, **kwargs))
        else:
            self._can_repeat = False
        return result

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Launch a kernel and note it; see octavo.kernels.launch.launch."""
        compiled = kernel.run(*arguments, grid=grid, warmup=False, **options)
        # Arguments may be passed by name.
        by_name = [options[name] for name in kernel.arg_names[len(arguments) :]]
        noted = tuple([self._note(argument) for argument in (*arguments, *by_name)])
        with_places = tuple([at for at, argument in enumerate(noted) if _holds_place(argument)])
        self._launches.append(Launch(compiled[(*grid, 1, 1)[:3]], noted, with_places))

    def tape(self, results: Results) -> Tape | None:
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
        return Tape(tuple(made), num_bytes, tuple(self._launches), numbers)

    def _whole(self, result: Tensor) -> int | None:
        """Return the number of a tensor of the call's own that a result is all of."""
        place = self._places.get(id(result))
        if place is None or place.tensor < self._num_given or place.offset != 0:
            return None
        tensor = self._tensors[place.tensor]
        alike = [(x.shape, x.stride(), x.dtype) for x in (tensor, result)]
        return place.tensor if alike[0] == alike[1] else None

    def _add(self, tensor: Tensor, make: Callable[[], Tensor] | None) -> None:
        self._places[id(tensor)] = Place(len(self._tensors), 0)
        self._tensors.append(tensor)
        self._makers.append(make)

    def _add_view(self, parent: Tensor, view: Tensor) -> None:
        place = self._places.get(id(parent))
        # In inference mode some operators arrive undecomposed that may copy, such as Tensor.to.
        storages = {x.untyped_storage().data_ptr() for x in (parent, view)}
        if place is None or len(storages) > 1:
            self._can_repeat = False
            return
        offset = view.data_ptr() - parent.data_ptr() if view.numel() else 0
        self._places[id(view)] = Place(place.tensor, place.offset + offset)
        self._views.append(view)

    def _note(self, argument: Any) -> Any:
        """Return an argument of a launch with places instead of tensors."""
        if not isinstance(argument, tuple):
            return self._note_one(argument)
        noted = tuple([self._note_one(x) for x in argument])
        # Tape.play does not look any deeper.
        if any(isinstance(x, tuple | Described) and not isinstance(x, Place) for x in noted):
            self._can_repeat = False
        return noted

    def _note_one(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            self._can_repeat = self._can_repeat and place is not None
            return place
        # Descriptors, and other objects that stand for tensors, have a base.
        base = getattr(value, "base", None)
        if base is None:
            return value
        at = getattr(base, "pointer", None)
        tensors = [number for number, tensor in enumerate(self._tensors) if tensor.data_ptr() == at]
        self._can_repeat = self._can_repeat and len(tensors) == 1
        return Described(value, tensors[0]) if tensors else None


def _empty_like(tensor: Tensor) -> Callable[[], Tensor]:
    shape, strides, like = tensor.shape, tensor.stride(), {"dtype": tensor.dtype, "device": tensor.device}
    return partial(torch.empty_strided, shape, strides, **like)


def _holds_place(argument: Any) -> bool:
    if isinstance(argument, Place | Described):
        return True
    return isinstance(argument, tuple) and any(isinstance(x, Place) for x in argument)


class _Running(threading.local):
    watch: Watch | None = None


running = _Running()
"""The call that this thread watches."""


class Repeater:
    """Runs calls that are alike; several threads may use it at a time."""

    def __init__(self) -> None:
        self._tape: Tape | None = None
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
            # torch.cuda.current_stream would take 5 us to make an object that is not needed.
            return self._tape.play(given, torch._C._cuda_getCurrentRawStream(device.index))
        is_second = next(self._number) == 1
        return self._watch(function, groups) if is_second else function(*groups)

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
