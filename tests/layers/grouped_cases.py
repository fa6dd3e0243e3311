"""What the tests of packed weights share: random weights, and the specification over them."""

import torch
from torch import Tensor
from triton_layer_cases import ACTIVATIONS, plain_linear, random

from octavo.forms.blocks import BlockWeight
from octavo.forms.packed import PackedWeight


def random_blocks(
    rows: int, columns: int, *, bits: int = 4, group: int = 32, mins: bool = True, seed: int = 0
) -> BlockWeight:
    """A weight whose products with rows of random numbers are about as large as the rows."""
    generator = torch.Generator().manual_seed(seed)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    quants = torch.randint(low, high, (rows, columns), generator=generator, dtype=dtype)
    shape = (rows, columns // group)
    scales = (torch.rand(shape, generator=generator) + 0.1) / (2**bits * columns**0.5)
    centre = -8 * scales if bits == 4 else 0 * scales
    offsets = centre + 0.1 * scales * torch.randn(shape, generator=generator) if mins else centre
    return BlockWeight(bits, quants, scales.half(), offsets.half() if bits == 4 or mins else None)


def packed(weight: BlockWeight, device: str) -> PackedWeight:
    """The weight on a device, packed."""
    return PackedWeight.pack(weight.to(torch.device(device)))


def both_ways(x: Tensor, weight: PackedWeight, **options) -> tuple[Tensor, Tensor]:
    """The specification in the dtype of x, and in float64."""
    floats = weight.dequantise()
    doubled = {
        name: value.double() if isinstance(value, Tensor) else value for name, value in options.items()
    }
    plain = plain_linear(x, floats, **options)
    return plain, plain_linear(x.double(), floats.double(), **doubled)


def options_of(
    names: list[str], num_rows: int, num_weight_rows: int, size: int, device: str, dtype: torch.dtype
) -> dict[str, object]:
    """Random operands for what is fused, by name."""
    options: dict[str, object] = {}
    if "bias" in names:
        options["bias"] = random(num_weight_rows, device=device, dtype=dtype, seed=2)
    if "norm" in names:
        options["norm_weight"] = random(size, device=device, dtype=dtype, seed=3)
    if "residual" in names:
        options["residual"] = random(num_rows, num_weight_rows, device=device, dtype=dtype, seed=4)
    for name in set(names) & ACTIVATIONS.keys():
        options["activation"] = name
    return options
