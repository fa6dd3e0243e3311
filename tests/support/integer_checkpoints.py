"""Tiny checkpoints of packed integers, in the layouts of AutoAWQ, GPTQ and compressed-tensors.

Each weight is made of random integers, zeros and scales, so what it means is known in float64. They are
packed by what the formats say, a bit at a time.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_model import TINY_LLAMA
from torch import Tensor

CONFIG = TINY_LLAMA | {
    **{"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 32, "num_hidden_layers": 2, "vocab_size": 96},
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Matrix:
    """Integers q [N, K], zeros and scales [N, G], and each column's group [K]."""

    quants: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    def exact(self) -> Tensor:
        """scale * (q - zero) in float64."""
        scales, zeros = (part[:, self.groups].astype(np.float64) for part in (self.scales, self.zeros))
        return torch.from_numpy(scales * (self.quants.astype(np.float64) - zeros))


def random_matrix(
    rng: np.random.Generator,
    shape: tuple[int, int],
    bits: int,
    group: int,
    *,
    symmetric: bool,
    ordered: bool,
) -> Matrix:
    """A matrix with numbers of about the size of a random network's."""
    (rows, columns), most = shape, 2**bits
    num_groups = 1 if group == -1 else columns // group
    groups = np.repeat(np.arange(num_groups), columns // num_groups)
    if ordered:
        rng.shuffle(groups)
    zeros = np.full((rows, num_groups), most // 2)
    if not symmetric:
        zeros = rng.integers(0, most, (rows, num_groups))
    scales = rng.uniform(0.5, 1.5, (rows, num_groups)) * (4.0 / most / columns**0.5)
    return Matrix(rng.integers(0, most, shape), zeros, scales.astype(np.float16), groups)


def pack(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[R, C] integers to words [R, ceil(C / n)]; bits i of a word are its column order[i]."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).astype(np.uint32)
    words = np.zeros((len(values), padded.shape[1] // per_word), np.uint32)
    for place, column in enumerate(order or range(per_word)):
        words |= padded[:, column::per_word] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def awq(matrix: Matrix, fields: dict[str, Any]) -> dict[str, Tensor]:
    return {
        "qweight": pack(matrix.quants.T, 4, AWQ_ORDER),
        "qzeros": pack(matrix.zeros.T, 4, AWQ_ORDER),
        "scales": tensor(matrix.scales.T),
    }


def gptq(matrix: Matrix, fields: dict[str, Any]) -> dict[str, Tensor]:
    bits = fields["bits"]
    # Subtracted from words, as GPTQModel does it: a zero of 0 borrows from its neighbour.
    ones = 0 if fields.get("checkpoint_format") == "gptq_v2" else 0x01010101 if bits == 8 else 0x11111111
    return {
        "qweight": pack(matrix.quants, bits).T.contiguous(),
        "qzeros": pack(matrix.zeros.T, bits) - ones,
        "scales": tensor(matrix.scales.T),
        "g_idx": tensor(matrix.groups.astype(np.int32)),
    }


def compressed(matrix: Matrix, fields: dict[str, Any]) -> dict[str, Tensor]:
    weights = fields["config_groups"]["group_0"]["weights"]
    bits = weights["num_bits"]
    if fields["format"] == "int-quantized":
        middle = 2 ** (bits - 1)
        tensors = {"weight": tensor((matrix.quants - middle).astype(np.int8))}
        tensors["weight_scale"] = tensor(matrix.scales)
        if not weights["symmetric"]:
            tensors["weight_zero_point"] = tensor((matrix.zeros - middle).astype(np.int8))
            tensors |= {"input_scale": torch.ones(1), "input_zero_point": torch.zeros(1, dtype=torch.int8)}
        return tensors
    tensors = {
        "weight_packed": pack(matrix.quants, bits),
        "weight_scale": tensor(matrix.scales),
        "weight_shape": torch.tensor(matrix.quants.shape),
    }
    if not weights["symmetric"]:
        tensors["weight_zero_point"] = pack(matrix.zeros.T, bits).T.contiguous()
    if weights["actorder"] == "group":
        tensors["weight_g_idx"] = tensor(matrix.groups.astype(np.int32))
    return tensors


PACKERS = {"awq": awq, "gptq": gptq, "compressed-tensors": compressed}


def awq_fields(group_size: int) -> dict[str, Any]:
    fields = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    return fields | {"zero_point": True, "modules_to_not_convert": None}


def gptq_fields(
    group_size: int, *, bits: int = 4, sym: bool = True, desc_act: bool = False, form: str = "gptq"
) -> dict[str, Any]:
    fields = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "checkpoint_format": form}
    return fields | {"sym": sym, "desc_act": desc_act, "damp_percent": 0.01, "true_sequential": True}


def compressed_fields(
    group_size: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    actorder: str | None = None,
    form: str = "pack-quantized",
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": actorder}
    weights |= {"strategy": "channel" if group_size == -1 else "group"}
    weights |= {"group_size": None if group_size == -1 else group_size, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights}
    group["input_activations"] = None if form == "pack-quantized" else inputs
    fields = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return fields | {"config_groups": {"group_0": group}, "quantization_status": "compressed"}


FIELDS: dict[str, dict[str, Any]] = {
    **{f"awq-{group}": awq_fields(group) for group in (32, 64, 128)},
    **{f"gptq-{group}": gptq_fields(group) for group in (32, 128, -1)},
    "gptq-asymmetric": gptq_fields(32, sym=False),
    "gptq-v2": gptq_fields(64, sym=False, form="gptq_v2"),
    "gptq-ordered": gptq_fields(32, sym=False, desc_act=True),
    "gptq-8": gptq_fields(64, bits=8),
    "gptq-8-asymmetric": gptq_fields(64, bits=8, sym=False),
    "gptq-odd": gptq_fields(16),
    **{f"compressed-{group}": compressed_fields(group) for group in (32, 64, 128, -1)},
    "compressed-asymmetric": compressed_fields(32, symmetric=False),
    "compressed-ordered": compressed_fields(64, symmetric=False, actorder="group"),
    "compressed-static": compressed_fields(64, actorder="static"),
    "compressed-8": compressed_fields(-1, bits=8),
    "w8a8": compressed_fields(-1, bits=8, form="int-quantized"),
    "w8a8-asymmetric": compressed_fields(-1, bits=8, symmetric=False, form="int-quantized"),
    "w4a8": compressed_fields(64, form="int-quantized"),
}


def is_ordered(fields: dict[str, Any]) -> bool:
    weights = fields.get("config_groups", {}).get("group_0", {}).get("weights", {})
    return fields.get("desc_act", False) or weights.get("actorder") == "group"


def is_symmetric(fields: dict[str, Any]) -> bool:
    weights = fields.get("config_groups", {}).get("group_0", {}).get("weights", {})
    return weights.get("symmetric", fields.get("sym", False))


def group_size(fields: dict[str, Any]) -> int:
    weights = fields.get("config_groups", {}).get("group_0", {}).get("weights", fields)
    return weights["group_size"] or -1


def num_bits(fields: dict[str, Any]) -> int:
    weights = fields.get("config_groups", {}).get("group_0", {}).get("weights", {})
    return weights.get("num_bits", fields.get("bits"))


def make(
    fields: dict[str, Any], config: dict[str, Any] = CONFIG, also: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint's tensors, and the network's that they mean, float32.

    also: matrices that are packed besides projections.
    """
    from octavo.models import ModelConfig, parameter_shapes

    rng = np.random.default_rng(3)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(ModelConfig.from_hf(config)).items():
        if not name.endswith("_proj.weight") and name not in also:
            values = rng.normal(1.0 if "norm" in name else 0.0, 0.1, shape).astype(np.float32)
            stored[name] = meant[name] = torch.from_numpy(values)
            continue
        matrix = random_matrix(
            rng,
            (shape[0], shape[1]),
            num_bits(fields),
            group_size(fields),
            symmetric=is_symmetric(fields),
            ordered=is_ordered(fields),
        )
        layer = name.removesuffix("weight")
        packed = PACKERS[fields["quant_method"]](matrix, fields)
        stored |= {layer + part: values for part, values in packed.items()}
        meant[name] = matrix.exact().float()
    return stored, meant


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """Write a model folder and return its path."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return str(folder)
