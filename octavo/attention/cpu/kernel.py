"""The compiled CPU kernels, called through ctypes."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from octavo.attention.checks import bad_block, bad_slot
from octavo.attention.cpu.compile import KernelUnavailableError, load_library
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.options import ScoreOptions
from octavo.attention.plan.host_plan import ForestPlan
from octavo.attention.torch_paged import host_plan
from octavo.errors import EngineError, OutOfMemoryError

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_BAD_BLOCK, _NO_MEMORY = 1, 2


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Plan(ctypes.Structure):
    """Plan of cpu_kernel.c."""

    _fields_ = [
        *_fields(_POINTER, "row begin end token_begin tokens slots order merge_begin"),
        ("num_items", _INT),
        ("num_tokens", _INT),
    ]


class AttendCall(ctypes.Structure):
    """Call of cpu_kernel.c."""

    _fields_ = [
        *_fields(_POINTER, "q k v table positions alibi out lse partial_out partial_lse"),
        *_fields(_INT, "q_token q_head k_block k_token k_head v_block v_token v_head"),
        *_fields(_INT, "table_row num_blocks block_size num_heads num_kv_heads head_dim"),
        ("window", _INT),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class StoreCall(ctypes.Structure):
    """Store of cpu_store.c."""

    _fields_ = [
        *_fields(_POINTER, "k v k_cache v_cache slots"),
        *_fields(_INT, "k_token k_head v_token v_head kc_block kc_token kc_head"),
        *_fields(_INT, "vc_block vc_token vc_head num_tokens num_kv_heads head_dim"),
        ("num_slots", _INT),
        ("block_size", _INT),
    ]


def unavailable_reason(device_type: str, dtype: torch.dtype) -> str | None:
    """Say why the compiled kernels cannot run on a device with a dtype; None: they can."""
    if device_type != "cpu":
        return f"the compiled kernels run on CPUs, the tensors are on {device_type}"
    if dtype != torch.float32:
        return f"the compiled kernels are float32, the tensors {dtype}"
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write each token's key and value to its slot, in place; see octavo.attention.store_kv.

    Raises:
        InvalidArgumentError: a slot does not exist; nothing was written.
    """
    assert k_scale is None, "scales are of float8 caches, which unavailable_reason refuses"
    assert v_scale is None, "scales are of float8 caches, which unavailable_reason refuses"
    slots = slot_mapping.to(torch.int64).contiguous()
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    call = StoreCall(
        *(tensor.data_ptr() for tensor in (k, v, k_cache, v_cache, slots)),
        *(stride for tensor in (k, v, k_cache, v_cache) for stride in tensor.stride()[:-1]),
        *(k.shape[0], num_kv_heads, head_dim, num_blocks * block_size, block_size),
    )
    bad_token = kernel_library().octavo_store(call, torch.get_num_threads())
    if bad_token >= 0:
        raise bad_slot(bad_token, int(slots[bad_token]), num_blocks * block_size)


def paged_attention_with_lse(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Attend by the plan's work list; see octavo.attention.paged_attention_with_lse.

    Raises:
        InvalidArgumentError: the block table names a block that does not exist.
    """
    plan = host_plan(q.shape[0], k_cache.shape[1], metadata)
    num_tokens, num_heads, head_dim = q.shape
    out, lse = torch.empty(q.shape), torch.empty(num_tokens, num_heads)
    if plan.num_tokens < num_tokens:
        out[plan.num_tokens :] = 0.0
        lse[plan.num_tokens :] = -torch.inf
    partial_out = torch.empty(plan.num_partials, num_heads, head_dim)
    partial_lse = torch.empty(plan.num_partials, num_heads)
    # A table of one column may have any stride; a row must be contiguous for the kernel.
    table = metadata.block_table if metadata.block_table.stride(1) == 1 else metadata.block_table.contiguous()
    positions = metadata.positions.contiguous()
    alibi = None if options.alibi_slopes is None else options.alibi_slopes.contiguous()
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    call = AttendCall(
        *(tensor.data_ptr() for tensor in (q, k_cache, v_cache, table, positions)),
        None if alibi is None else alibi.data_ptr(),
        *(tensor.data_ptr() for tensor in (out, lse, partial_out, partial_lse)),
        *(*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], table.stride(0)),
        *(num_blocks, block_size, num_heads, num_kv_heads, head_dim),
        options.window or 0,
        options.scale,
        options.softcap,
    )
    max_rows = plan.max_item_tokens * (num_heads // num_kv_heads)
    status = kernel_library().octavo_attend(plan_struct(plan), call, max_rows, torch.get_num_threads())
    check_status(status, num_blocks)
    return out, lse


def plan_struct(plan: ForestPlan) -> _Plan:
    return _Plan(*plan.addresses, plan.num_items, plan.num_tokens)


def check_status(status: int, num_blocks: int) -> None:
    if status == _BAD_BLOCK:
        raise bad_block(num_blocks)
    if status == _NO_MEMORY:
        raise OutOfMemoryError("no memory for the attention kernel's scratch; lower the batch size")
    if status:
        raise EngineError(f"the attention kernel returned the unknown status {status}")


def kernel_library() -> ctypes.CDLL:
    loaded = _load()
    assert not isinstance(loaded, str), loaded
    return loaded


@cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none. Asked once per process."""
    try:
        library = load_library()
    except KernelUnavailableError as error:
        return str(error)
    library.octavo_attend.argtypes = [ctypes.POINTER(_Plan), ctypes.POINTER(AttendCall), _INT, ctypes.c_int]
    library.octavo_attend.restype = ctypes.c_int
    library.octavo_store.argtypes = [ctypes.POINTER(StoreCall), ctypes.c_int]
    library.octavo_store.restype = _INT
    library.octavo_rotate.argtypes = [_POINTER, _POINTER, _INT, _INT, _INT, _INT, ctypes.c_int]
    library.octavo_rotate.restype = None
    return library
