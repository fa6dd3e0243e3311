"""Decodes blocks of GGUF element types to float32.

A block holds a few numbers and their scale. In types with 32 numbers, the low halves of 16 bytes are the
first 16 numbers and the high halves the last 16:

    Q4_0  d  q[16]           d (q - 8)           Q5_0  d    h[4] q[16]   d (q + 16 h - 16)
    Q4_1  d  m  q[16]        d q + m             Q5_1  d  m h[4] q[16]   d (q + 16 h) + m
    Q8_0  d  q[32]           d q                 Q8_K  d (float32) q[256] sums[16]   d q

    MXFP4  e  q[16]          2 ** (e - 127) times the float that q is a code of, 4 bits

d and m are float16; h has one bit per number. Source: ggml's block layouts.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from octavo.errors import UnsupportedModelError
from octavo.install_hint import pip_command
from octavo.models.formats.gguf.gguf_blocks import quantised_of

Decoder = Callable[[np.ndarray, np.ndarray], None]


def decode_blocks(type_name: str, blocks: np.ndarray, out: np.ndarray) -> None:
    """Decode whole blocks.

    Args:
        type_name: name of the element type, such as "Q4_1".
        blocks: [n, block_bytes] uint8, contiguous.
        out: [n, block_size] float32, contiguous, overwritten.

    Raises:
        UnsupportedModelError: Octavo cannot decode the type.
        WeightsError: see quantised_of.
    """
    # A damaged or extreme scale may overflow to inf, as in other engines.
    with np.errstate(over="ignore", invalid="ignore"):
        require_decodable(type_name, "a tensor")
        _DECODERS[type_name](blocks, out)


def require_decodable(type_name: str, what: str) -> None:
    """Refuse element types that `decode_blocks` does not know; `what` names the tensor in the message.

    Raises:
        UnsupportedModelError: names the type and the supported ones.
    """
    if type_name not in _DECODERS:
        raise UnsupportedModelError(
            f"{what} has the element type {type_name}, which is not supported; use a file with "
            f"{', '.join(sorted(_DECODERS))}"
        )


def _decode_packed(type_name: str, blocks: np.ndarray, out: np.ndarray) -> None:
    """Decode a type that layers read in blocks as those layers do."""
    out[...] = quantised_of(type_name, torch.from_numpy(blocks)[:, None]).dequantise().numpy()


def _decode_with_gguf_package(type_name: str, blocks: np.ndarray, out: np.ndarray) -> None:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise UnsupportedModelError(
            f"{type_name} weights need the gguf package; run: {pip_command('gguf')}"
        ) from error
    out[...] = dequantize(blocks, GGMLQuantizationType[type_name])


def _decode_f32(blocks: np.ndarray, out: np.ndarray) -> None:
    out.reshape(-1)[...] = blocks.reshape(-1).view("<f4")


def _decode_f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out.reshape(-1)[...] = blocks.reshape(-1).view("<f2")


def _decode_bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    # A bfloat16 is the upper half of a float32.
    np.left_shift(blocks.reshape(-1).view("<u2"), 16, out=out.reshape(-1).view("<u4"), dtype="<u4")


def _decode_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    # quantised_of would lose the sign of -0.0.
    out[:, :16], out[:, 16:] = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
    out -= 8
    out *= blocks[:, :2].view("<f2").astype(np.float32)


def _decode_q8_k(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = blocks[:, 4:260].view(np.int8)
    out *= blocks[:, :4].view("<f4")


def _decode_mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    _decode_packed("MXFP4", blocks, out)
    # The code of -0.0 is 0.0 in ggml's table.
    out += 0.0


_PACKED = ("Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# The gguf package decodes these; it is imported only for them.
_BY_PACKAGE = ("Q2_K", "Q3_K")
_DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        **{name: partial(_decode_packed, name) for name in _PACKED},
        **{name: partial(_decode_with_gguf_package, name) for name in _BY_PACKAGE},
        "F32": _decode_f32,
        "F16": _decode_f16,
        "BF16": _decode_bf16,
        "Q4_0": _decode_q4_0,
        "Q8_K": _decode_q8_k,
        "MXFP4": _decode_mxfp4,
    }
)
