"""What a row of gemm.table says, a layer or a product, and how the first row that holds is found."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.forms.base import ExpertsWeight, weight_kind
from octavo.gemm.cpu.library import compile_failure
from octavo.kernels.device import nvidia_generation, triton_unsupported_reason

MANY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Target:
    """Where weights are multiplied, and by activations of which dtype.

    Attributes:
        device: a device that is here; with a capability, "cuda" stands for such a GPU.
        dtype: of activations.
        capability: of a GPU that need not be here; None: the device says.
    """

    device: torch.device
    dtype: torch.dtype
    capability: tuple[int, int] | None = None

    @property
    def generation(self) -> int:
        """Major number of a GPU's compute capability; 0: of other devices."""
        return nvidia_generation(self.device) if self.capability is None else self.capability[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What multiplies a kind of weights as they are.

    Attributes:
        make: module of octavo.gemm and its function or class: (weights or weight, bias) -> a layer.
        why: how it multiplies, for people; a function where that depends on the CPU.
        form: by which the table has its products; "": the layer is the product, for all numbers of rows.
        device: its type; "": any.
        dtypes: of activations; (): any.
        capability: the least one of a GPU.
        compiles: a C compiler is needed.
        pack: makes a weight of the form out of a stored one; None: it is of the form already.
        fits: whether the layer multiplies a weight, packed; None: it multiplies all.
        blank: of experts, the ExpertStack; else (shape, Storage, device) -> a weight without numbers.
    """

    make: str = ""
    why: str | Callable[[], str]
    form: str = ""
    device: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = ()
    capability: tuple[int, int] = (8, 0)
    compiles: bool = False
    pack: Callable[[Any], Any] | None = None
    fits: Callable[[Any], bool] | None = None
    blank: Any = None

    def describe(self) -> str:
        """Say how it multiplies."""
        return self.why if isinstance(self.why, str) else self.why()

    def unsupported_reason(self, target: Target) -> str | None:
        """Return why the layer cannot run on a target, or None if it can."""
        device, dtype = target.device, target.dtype
        if (self.device and device.type != self.device) or (self.dtypes and dtype not in self.dtypes):
            names = " or ".join(str(each).removeprefix("torch.") for each in self.dtypes) or "weights"
            where = "an NVIDIA GPU with Triton" if self.device == "cuda" else "a CPU"
            return f"it needs {names} on {where}, got {dtype} on {device}"
        if self.device == "cuda":
            return self._gpu_reason(target)
        return compile_failure() if self.compiles else None

    def _gpu_reason(self, target: Target) -> str | None:
        capability = target.capability
        if capability is None:
            reason = triton_unsupported_reason("cuda")
            if reason is not None:
                return reason
            capability = torch.cuda.get_device_capability(target.device)
            if target.generation < capability[0]:
                # OCTAVO_GPU_GENERATION says so: the newest of that generation.
                capability = target.generation, 9
        if capability >= self.capability:
            return None
        needed, got = (".".join(map(str, each)) for each in (self.capability, capability))
        return f"it needs a GPU of compute capability {needed} or later, got {got}"


@dataclass(frozen=True, slots=True)
class Product:
    """A product for a form of weights and some numbers of rows.

    Attributes:
        name: for people; of experts, the method of StackedExperts that runs it.
        launch: module of octavo.gemm and its function; of experts, a module; on a CPU, a layer's method.
        why: what it does, and where it is the fastest.
        rows: least and most rows of x, or tokens.
        generation: of the GPUs that run it, which no other ones do; 0: all.
        where: whether the measured limits hold for a weight.
        misfit: why the kernel cannot multiply by a weight, as far as rows do not matter; or None.
        refuses: the same for (x, weight, is_gated), of experts (x, weight, k, summed); asked in each step.
        norms: most rows whose norm it takes in.
        rounds: rows become float8, with a scale for each of the "rows", or for "tiles" like the weight's.
        fuses: activation and residual sum are a part of it.
        streams: it fetches weights before the kernel ahead of it ends, as the decode step's attention does.
        above: rows of an expert, on average, above which it runs.
        mixes: gate and up, and down may be of different forms.
        tiling: of a weight and rows of an expert on average; see portable.experts.expert_tiling.
    """

    name: str
    launch: str
    _: KW_ONLY
    why: str
    rows: tuple[int, int] = (0, MANY)
    generation: int = 0
    where: Callable[[Any], bool] | None = None
    misfit: Callable[[Any], str | None] | None = None
    refuses: Callable[..., str | None] | None = None
    norms: int = 0
    rounds: str = ""
    fuses: bool = True
    streams: bool = False
    above: float = -1.0
    mixes: bool = False
    tiling: Callable[..., Any] | None = None

    @property
    def run(self) -> Callable[..., Any]:
        """Return the function that launches it; imported now, as Triton runs where it is called."""
        return load(self.launch)

    def part(self, function: str) -> Callable[..., Any]:
        """Return a function of its module."""
        return load(f"{self.launch}:{function}")


def load(address: str) -> Callable[..., Any]:
    """Return the function or class of octavo.gemm at "module:name"."""
    module, name = address.split(":")
    return getattr(_load_module(module), name)


@cache
def _load_module(name: str) -> ModuleType:
    return import_module(f"octavo.gemm.{name}")


def find_layer(layers: Sequence[Layer], target: Target) -> Layer | None:
    """Return the first layer that runs on a target, or None."""
    return next((layer for layer in layers if layer.unsupported_reason(target) is None), None)


def available(rows: Sequence[Product], weight: Any, generation: int | None = None) -> tuple[Product, ...]:
    """Return the products that can multiply by a weight, once for all numbers of rows.

    Args:
        rows: of PRODUCTS or EXPERTS.
        weight: of the form; of a CPU's layer the layer.
        generation: of the GPU; None: that of the weight's device.
    """
    if generation is None:
        generation = nvidia_generation(weight.device)
    return tuple(
        row
        for row in rows
        if row.generation in (0, generation)
        and (row.where is None or row.where(weight))
        and (row.misfit is None or row.misfit(weight) is None)
    )


def find(products: Sequence[Product], x: Tensor, weight: Any, *, is_gated: bool = False) -> Product:
    """Return the product for x [M, K]; called per layer and step.

    Args:
        products: from `available`.
        x: its rows.
        weight: as for `available`.
        is_gated: whether an activation of gate and up is part of it.
    """
    num_rows = x.shape[0]
    for row in products:
        least, most = row.rows
        if least <= num_rows <= most and (row.refuses is None or row.refuses(x, weight, is_gated) is None):
            return row
    raise AssertionError(f"no product for {num_rows} rows and {weight_kind(weight)}")


def pair(
    ups: Sequence[Product], downs: Sequence[Product], *, deterministic: bool = False
) -> tuple[tuple[Product, Product], ...]:
    """Return the products of both projections of experts that can follow one another, the fastest first.

    Args:
        ups, downs: from `available`, of gate and up, and of down.
        deterministic: no bit of a token's result may depend on the rest of the batch.
    """
    return tuple(
        (up, down)
        for up in ups
        for down in downs
        if up.name == down.name and (up.launch == down.launch or up.mixes)
        if up.name == "grouped" or not deterministic
    )


def find_pair(
    pairs: Sequence[tuple[Product, Product]], x: Tensor, weights: Sequence[ExpertsWeight], *,
    num_chosen: int, rows_per_expert: float,
) -> tuple[Product, Product]:  # fmt: skip
    """Return the products of the experts of tokens x [T, hidden]; called per layer and step.

    Args:
        pairs: from `pair`.
        x: tokens.
        weights: of gate and up, and of down.
        num_chosen: k.
        rows_per_expert: on average.
    """
    for both in pairs:
        if all(
            row.rows[0] <= len(x) <= row.rows[1]
            and row.above < rows_per_expert
            and (row.refuses is None or row.refuses(x, weight, num_chosen, summed) is None)
            for row, weight, summed in zip(both, weights, (1, num_chosen), strict=True)
        ):
            return both
    raise AssertionError(f"no product for {len(x)} tokens and {[weight.kind for weight in weights]}")
