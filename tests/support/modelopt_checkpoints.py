"""Tiny checkpoints in ModelOpt's layouts, and in those of compressed-tensors for 4-bit floats and MXFP8.

Numbers and scales are random; what they mean is computed here in float64, from the formats' definitions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from integer_checkpoints import CONFIG
from torch import Tensor

from octavo.models import ModelConfig, parameter_shapes

FLOAT8 = torch.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_Rng = np.random.Generator
_Parts = tuple[dict[str, Tensor], np.ndarray]


def modelopt(algorithm: str | None, **more: Any) -> dict[str, Any]:
    fields = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "model.layers.0*"]}
    return fields | {"producer": {"name": "modelopt", "version": "0.47.0"}} | more


def compressed(form: str, bits: int, group: int) -> dict[str, Any]:
    strategy = "tensor_group" if form.startswith("nvfp4") else "group"
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group}
    inputs = {"num_bits": bits, "type": "float", "strategy": strategy, "dynamic": "local"}
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    fields = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return fields | {"config_groups": {"group_0": group_0}}


def spread(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Repeat scales for tiles to a matrix."""
    height, width = (-(-size // number) for size, number in zip(shape, scales.shape, strict=True))
    return scales.repeat(height, 0).repeat(width, 1)[: shape[0], : shape[1]].astype(np.float64)


def float8(rng: _Rng, shape: tuple[int, int], scales: np.ndarray, stored: Tensor) -> _Parts:
    numbers = torch.from_numpy(rng.normal(0, 100, shape)).to(FLOAT8)
    return {"weight": numbers, "weight_scale": stored}, numbers.double().numpy() * spread(scales, shape)


def fp8(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    scales = rng.uniform(1, 2, (1, 1)).astype(np.float32) / 1000
    parts, meant = float8(rng, shape, scales, torch.from_numpy(scales)[0, 0].clone())
    return parts | {"input_scale": torch.tensor(0.01)}, meant


def fp8_rows(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    scales = rng.uniform(1, 2, (shape[0], 1)).astype(np.float32) / 1000
    return float8(rng, shape, scales, torch.from_numpy(scales)[:, 0].clone())


def fp8_tiles(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    tiles = [-(-size // 128) for size in shape]
    scales = rng.uniform(1, 2, tiles).astype(np.float32) / 1000
    whole = scales.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    return float8(rng, shape, whole, torch.from_numpy(scales)[:, None, :, None].clone())


def mxfp8(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    exponents = rng.integers(115, 119, (shape[0], shape[1] // 32), dtype=np.uint8)
    return float8(rng, shape, 2.0 ** (exponents - 127.0), torch.from_numpy(exponents))


def int8(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    numbers = rng.integers(-127, 128, shape).astype(np.int8)
    scales = rng.uniform(1, 2, (shape[0], 1)).astype(np.float32) / 1000
    parts = {"weight": torch.from_numpy(numbers), "weight_scale": torch.from_numpy(scales)[:, 0].clone()}
    return parts | {"input_scale": torch.tensor(0.01)}, numbers * spread(scales, shape)


def int4(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    numbers = rng.integers(-8, 8, shape)
    scales = rng.uniform(1, 2, (shape[0], shape[1] // 64)).astype(np.float32) / 50
    packed = np.zeros((shape[0] // 2, shape[1]), np.uint8)
    for row in range(shape[0]):
        packed[row // 2] |= ((numbers[row] % 16) << 4 * (row % 2)).astype(np.uint8)
    parts = {"weight": torch.from_numpy(packed), "weight_scale": torch.from_numpy(scales)}
    return parts, numbers * spread(scales, shape)


def w4a8(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    parts, meant = int4(rng, shape)
    return parts | {"weight_scale_2": torch.tensor(0.003), "input_scale": torch.tensor(0.01)}, meant


def float4(rng: _Rng, shape: tuple[int, int]) -> tuple[Tensor, np.ndarray]:
    codes = rng.integers(0, 16, shape)
    packed = np.zeros((shape[0], shape[1] // 2), np.uint8)
    for column in range(shape[1]):
        packed[:, column // 2] |= (codes[:, column] << 4 * (column % 2)).astype(np.uint8)
    return torch.from_numpy(packed), E2M1[codes]


def mxfp4(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    packed, numbers = float4(rng, shape)
    exponents = rng.integers(120, 124, (shape[0], shape[1] // 32), dtype=np.uint8)
    meant = numbers * spread(2.0 ** (exponents - 127.0), shape)
    return {"weight": packed, "weight_scale": torch.from_numpy(exponents)}, meant


def nvfp4(rng: _Rng, shape: tuple[int, int], group: int = 16) -> _Parts:
    packed, numbers = float4(rng, shape)
    scales = torch.from_numpy(rng.uniform(50, 400, (shape[0], shape[1] // group))).to(FLOAT8)
    factor = torch.tensor(0.0002)
    meant = numbers * spread(scales.double().numpy(), shape) * factor.double().item()
    parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor}
    return parts | {"input_scale": torch.tensor(0.01)}, meant


def nvfp4_wide(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    return nvfp4(rng, shape, 32)


def nvfp4_packed(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    parts, _ = nvfp4(rng, shape)
    factor = torch.tensor([5000.0])
    codes = np.stack((parts["weight"].numpy() & 15, parts["weight"].numpy() >> 4), -1).reshape(shape)
    meant = E2M1[codes] * spread(parts["weight_scale"].double().numpy(), shape) / 5000
    return {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": factor,
        "input_global_scale": torch.ones(1),
    }, meant


def mxfp4_packed(rng: _Rng, shape: tuple[int, int]) -> _Parts:
    parts, meant = mxfp4(rng, shape)
    return {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"]}, meant


Packer = Callable[[_Rng, tuple[int, int]], _Parts]
# Fields of config.json, and what packs a matrix.
LAYOUTS: dict[str, tuple[dict[str, Any], Packer]] = {
    "fp8": (modelopt("FP8"), fp8),
    "fp8-rows": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8_rows),
    "fp8-tiles": (modelopt("fp8_pb_wo"), fp8_tiles),
    "mxfp8": (modelopt("MXFP8"), mxfp8),
    "int8": (modelopt("W8A8_SQ_PER_CHANNEL"), int8),
    "int8-weights": (modelopt("W8A16"), int8),
    "int4": (modelopt("W4A16_AWQ", group_size=64, has_zero_point=False, pre_quant_scale=True), int4),
    "w4a8": (modelopt("W4A8_AWQ"), w4a8),
    "nvfp4": (modelopt("NVFP4", group_size=16), nvfp4),
    "nvfp4-wide": (modelopt("W4A8_NVFP4_FP8"), nvfp4_wide),
    "mxfp4": (modelopt("mxfp4"), mxfp4),
    "mxfp4-compressed": (compressed("mxfp4-pack-quantized", 4, 32), mxfp4_packed),
    "nvfp4-compressed": (compressed("nvfp4-pack-quantized", 4, 16), nvfp4_packed),
    "mxfp8-compressed": (compressed("mxfp8-quantized", 8, 32), mxfp8),
}


def make(
    packer: Callable[[str], Packer | None], config: dict[str, Any] = CONFIG
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint's tensors, and the network's that they mean, float32.

    packer: of a projection's name; None: it is not quantised.
    """
    rng = np.random.default_rng(3)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(ModelConfig.from_hf(config)).items():
        pack = packer(name) if name.endswith("_proj.weight") else None
        if pack is None:
            values = rng.normal(1.0 if "norm" in name else 0.0, 0.1, shape).astype(np.float32)
            stored[name] = meant[name] = torch.from_numpy(values)
            continue
        parts, exact = pack(rng, (shape[0], shape[1]))
        stored |= {name.removesuffix("weight") + part: values for part, values in parts.items()}
        meant[name] = torch.from_numpy(exact).float()
    return stored, meant
