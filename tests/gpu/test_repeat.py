"""Alike calls are repeated with today's addresses, if they only allocate, make views and launch."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from octavo.kernels.launch import launch
from octavo.kernels.repeat import Repeater, tensors_in


class Rows(NamedTuple):
    pointer: torch.Tensor
    stride: int


class Address(NamedTuple):
    pointer: int


class Kernel:
    """Stands for a Triton kernel, and for its compiled form; notes launches of both."""

    def __init__(self, *arg_names):
        self.arg_names = arg_names
        self.found, self.launched = [], []

    def run(self, *arguments, grid, warmup, **options):
        self.found.append(arguments)
        return self

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.launched.append((grid, arguments, stream))


@pytest.fixture(autouse=True)
def _cpu_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)


def run(repeater, function, *groups):
    return repeater.run(function, groups, tensors_in(groups))


def test_the_third_call_is_launched_with_its_own_addresses():
    kernel, kept, num_calls = Kernel("rows", "part", "end", "none", "number", "FLAG"), [], []

    def call(tensors, sizes):
        x, y = tensors
        num_calls.append(1)
        _, part = torch.empty(6, dtype=torch.int32).split([2, 4])
        out, counts = torch.empty_like(x), torch.zeros(3)
        kept.append(part)
        launch(kernel, (5, 2), Rows(x, sizes[0]), part, y[1:], None, 7, FLAG=True, num_warps=4)
        launch(kernel, (1,), Rows(out, 1), counts, y, None, 8, FLAG=False)
        return out, counts

    repeater = Repeater()
    given = [tuple(torch.randn(2, 3, 4)) for _ in range(3)]
    for tensors in given[:2]:
        run(repeater, call, tensors, (9,))
    assert (len(num_calls), len(kernel.found), kernel.launched) == (2, 4, [])
    x, y = given[2]
    out, counts = run(repeater, call, (x, y), (9,))
    assert (len(num_calls), len(kernel.found)) == (2, 4)
    (grid, arguments, stream), last = kernel.launched
    rows, part, *others = arguments
    assert (grid, stream) == ((5, 2, 1), 77)
    assert rows == (x.data_ptr(), 9)
    assert part not in {tensor.data_ptr() for tensor in (*kept, x, y, out, counts)}
    assert others == [y.data_ptr() + 16, None, 7, True]
    assert last == ((1, 1, 1), ((out.data_ptr(), 1), counts.data_ptr(), y.data_ptr(), None, 8, False), 77)
    assert (out.shape, out.dtype, counts.tolist()) == (x.shape, x.dtype, [0.0] * 3)


def test_descriptors_follow_their_tensor():
    @dataclass
    class Descriptor:
        base: Address
        size: int

    kernel = Kernel("descriptor")

    def call(tensors):
        launch(kernel, (1,), Descriptor(Address(tensors[0].data_ptr()), 5))
        return (torch.empty(1),)

    repeater = Repeater()
    for number in range(4):
        x = torch.ones(2)
        run(repeater, call, (x, torch.ones(2)))
        if number >= 2:
            expected = Descriptor(Address(x.data_ptr()), 5)
            assert kernel.launched[-1][1] == (expected,)


def test_parts_of_one_tensor_keep_their_distance():
    kernel = Kernel("a", "b", "c")

    def call(tensors):
        a, b = torch.empty(3, 4).unbind()[1:]
        launch(kernel, (1,), a, b, torch.empty(1000))
        return (torch.empty(1),)

    repeater = Repeater()
    for _ in range(3):
        run(repeater, call, (torch.ones(1),))
    a, b, c = kernel.launched[0][1]
    assert b - a == 16
    assert c >= b + 16 or c + 4000 <= a - 16


def test_a_tensor_given_twice_is_not_taken_for_another():
    kernel = Kernel("a", "b")

    def call(tensors):
        launch(kernel, (1,), *tensors)
        return (torch.empty(1),)

    repeater, twice = Repeater(), torch.ones(2)
    for _ in range(2):
        run(repeater, call, (twice, twice))
    a, b = torch.randn(2, 2)
    run(repeater, call, (a, b))
    assert kernel.launched[0][1] == (a.data_ptr(), b.data_ptr())


def computes(x):
    return (x + 1,)


def joins(x):
    return (torch.cat([x, x]),)


def returns_what_it_got(x):
    return (x,)


def launches_a_copy(x):
    launch(Kernel("x"), (1,), x.to(torch.int64))
    return (torch.empty(1),)


def launches_what_is_contiguous_now(x):
    launch(Kernel("x"), (1,), x.expand(3, 2).contiguous())
    return (torch.empty(1),)


def launches_what_it_computed(x):
    launch(Kernel("x"), (1,), x * 2)
    return (torch.empty(1),)


def launches_what_nobody_gave(x):
    launch(Kernel("x"), (1,), ELSEWHERE)
    return (torch.empty(1),)


def launches_what_it_wraps(x):
    launch(Kernel("x"), (1,), Wrapped(x))
    return (torch.empty(1),)


def launches_tuples_in_tuples(x):
    launch(Kernel("x"), (1,), ((x,), 1))
    return (torch.empty(1),)


class Wrapped:
    def __init__(self, base):
        self.base = base


ELSEWHERE = torch.ones(2)


OTHERS = (
    *(computes, joins, returns_what_it_got, launches_a_copy, launches_what_is_contiguous_now),
    *(launches_what_it_computed, launches_what_nobody_gave, launches_what_it_wraps),
    launches_tuples_in_tuples,
)


@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("function", OTHERS)
def test_other_calls_run_as_written(function, *, infers):
    with torch.inference_mode(infers):
        check_runs_as_written(function)


def check_runs_as_written(function):
    repeater, seen = Repeater(), []

    def call(tensors):
        seen.append(tensors[0])
        return function(*tensors)

    for number in range(4):
        x = torch.full((2,), float(number))
        result = run(repeater, call, (x,))[0]
        assert torch.equal(seen[-1], x)
        if function in (computes, joins):
            assert torch.equal(result, function(x)[0])
    assert len(seen) == 4


def test_a_call_that_fails_while_it_is_watched():
    repeater, kernel, calls = Repeater(), Kernel("x"), []

    def call(tensors):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        launch(kernel, (1,), *tensors)
        return (torch.empty(1),)

    x = (torch.ones(1),)
    run(repeater, call, x)
    with pytest.raises(MemoryError):
        run(repeater, call, x)
    run(repeater, call, x)
    launch(kernel, (1,), torch.ones(1))
    assert (len(kernel.found), kernel.launched) == (3, [])


def test_attention_returns_whole_tensors() -> None:
    """A call that returns part of a tensor is never repeated."""
    pytest.importorskip("triton")
    from octavo.attention.triton.kernel_call import empty_results

    for result in empty_results(torch.empty(5, 2, 8), 16, torch.float16):
        assert result._base is None
        assert result.untyped_storage().nbytes() == result.nbytes
