"""Checks of the public functions' arguments. Each raises InvalidArgumentError; none waits for a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.cache import FLOAT8
from octavo.errors import InvalidArgumentError

MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, FLOAT8)
_INTEGERS = (torch.int32, torch.int64)


def check_tensor(name: str, value: object) -> None:
    """Check that an argument is a tensor."""
    if not isinstance(value, Tensor):
        raise InvalidArgumentError(f"{name} must be a tensor; got {type(value).__name__}")


def check_shape(name: str, tensor: Tensor, layout: str, shape: Sequence[int | None]) -> None:
    """Check that an argument is a tensor of a shape; None in it fits any size.

    Args:
        name: of the argument.
        tensor: to check.
        layout: the shape in words, such as "[B, Sq, H, D]".
        shape: expected.
    """
    check_tensor(name, tensor)
    fits = tensor.dim() == len(shape) and all(
        size is None or size == actual for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidArgumentError(f"{name} must be {layout} = [{expected}]; got {list(tensor.shape)}")


def check_queries(q: Tensor, layout: str) -> None:
    """Check q, [B, Sq, H, D] or [T, H, D] as the layout says."""
    check_shape("q", q, layout, [None] * (layout.count(",") + 1))
    if q.dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"q must be float16, bfloat16, float32, float64 or float8_e4m3fn; got {q.dtype}"
        )
    if q.device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"q must be on a CPU or an NVIDIA GPU; it is on {q.device}")
    if q.dtype == torch.float64 and q.device.type != "cpu":
        raise InvalidArgumentError(f"float64 runs on a CPU only, q is on {q.device}; convert it to float32")
    if q.shape[-2] == 0 or not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise InvalidArgumentError(
            f"q must have at least one head and a head dim of 1 to {MAX_HEAD_DIM}; "
            f"got {layout} = {list(q.shape)}"
        )


def check_keys(names: tuple[str, str], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check keys [..., KH, D] and values [..., KH, Dv] of equal leading sizes beside q [..., H, D]."""
    k_name, v_name = names
    check_tensor(k_name, k)
    check_tensor(v_name, v)
    if k.shape[:-1] != v.shape[:-1]:
        raise InvalidArgumentError(
            f"{k_name} and {v_name} must differ in the last dimension only; "
            f"got {list(k.shape)} and {list(v.shape)}"
        )
    num_heads, head_dim = q.shape[-2:]
    num_kv_heads = k.shape[-2]
    if k.shape[-1] != head_dim or not 1 <= v.shape[-1] <= MAX_HEAD_DIM:
        raise InvalidArgumentError(
            f"{k_name} must have q's head dim {head_dim}, and {v_name} one of 1 to {MAX_HEAD_DIM}; "
            f"got {k.shape[-1]} and {v.shape[-1]}"
        )
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise InvalidArgumentError(
            f"q's heads must be a multiple of {k_name}'s; got {num_heads} and {num_kv_heads}"
        )
    for name, tensor in ((k_name, k), (v_name, v)):
        check_device(name, tensor, q)
        check_dtype(name, tensor, q.dtype if k.dtype != FLOAT8 else FLOAT8)


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Check a tensor's dtype."""
    if tensor.dtype != dtype:
        raise InvalidArgumentError(f"{name} must be {dtype}, got {tensor.dtype}; convert it first")


def check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    """Check that a tensor is where q is."""
    if tensor.device != q.device:
        raise InvalidArgumentError(f"{name} is on {tensor.device}, q on {q.device}; move one")


def check_integers(name: str, tensor: Tensor, q: Tensor, layout: str, shape: Sequence[int | None]) -> None:
    """Check an integer tensor beside q."""
    check_shape(name, tensor, layout, shape)
    check_device(name, tensor, q)
    if tensor.dtype not in _INTEGERS:
        raise InvalidArgumentError(f"{name} must be int32 or int64; got {tensor.dtype}")


def check_floats(name: str, tensor: Tensor, q: Tensor, layout: str, shape: Sequence[int | None]) -> None:
    """Check a float tensor beside q."""
    check_shape(name, tensor, layout, shape)
    check_device(name, tensor, q)
    if not tensor.is_floating_point():
        raise InvalidArgumentError(f"{name} must hold floats; got {tensor.dtype}")


def refuse(**unsupported: object) -> None:
    """Raise for the first unsupported argument with a value other than None and 0."""
    for name, value in unsupported.items():
        if value is not None and (not isinstance(value, int) or value):
            got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise InvalidArgumentError(f"{name} is not supported by octavo.ops; leave it out, got {got}")


def refuse_missing(
    dropout_p: float, qv: Tensor | None, attention_chunk: int, q_v: Tensor | None = None
) -> None:
    """Refuse by name what Octavo does not have."""
    if dropout_p != 0:
        raise InvalidArgumentError(f"dropout_p must be 0, octavo.ops is for inference; got {dropout_p}")
    refuse(qv=qv, q_v=q_v, attention_chunk=attention_chunk)
