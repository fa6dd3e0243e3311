"""The compiled CPU kernels, called through ctypes."""

import ctypes
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.attention.cache import LayerCache
from octavo.attention.checks import bad_block, bad_slot
from octavo.attention.merge import add_sinks
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.plan.host_plan import ForestPlan
from octavo.attention.score_options import ScoreOptions, shift_positions
from octavo.attention.torch_paged import host_plan
from octavo.errors import EngineError, InvalidArgumentError, OctavoError, OutOfMemoryError
from octavo.kernels.c.compiler import TOOLS, KernelUnavailableError, Library, load_library

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_FOLDER = Path(__file__).parent
ATTENTION = Library(
    "attention",
    (_FOLDER / "attend.c", _FOLDER / "store.c"),
    (*TOOLS, *(_FOLDER / name for name in ("calls.h", "few.c", "plan.c", "tile.c", "wide.c"))),
)
_OK, _NO_MEMORY, _BAD_SIZES, _BAD_SCORES, _BAD_BLOCK, _BAD_ROW = range(6)

# What the kernel requires of each array of a plan, in the order of the status codes from _BAD_ROW on.
_EXPECTED = (
    ("item_table_row", "a row of the block table"),
    ("item_kv_begin", "0 or more, and no more than item_kv_end"),
    ("item_kv_end", "no more than the tokens that a row of the block table holds"),
    ("item_token_begin", "numbers that rise from 0 to the length of item_tokens"),
    ("item_tokens", "a query token of the plan"),
    ("item_partial_ids", "a free place in its token's range of merge_begin, or -1 if that is empty"),
    ("item_order", "each item once"),
    ("merge_begin", "numbers that rise from 0 to num_partials"),
)
_UNWRITTEN = _BAD_ROW + len(_EXPECTED)
_REMEDY = "make plans by ForestPlan.flat or ForestPlan.from_block_tables, and do not change them"


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Plan(ctypes.Structure):
    """Plan of calls.h."""

    _fields_ = [
        *_fields(_POINTER, "row begin end token_begin tokens slots order merge_begin"),
        *_fields(_INT, "num_items num_pairs num_tokens num_partials fault_index fault_value"),
    ]


class AttendCall(ctypes.Structure):
    """Call of calls.h."""

    _fields_ = [
        *_fields(_POINTER, "q k v table positions alibi out lse partial_out partial_lse"),
        *_fields(_INT, "q_token q_head k_block k_token k_head v_block v_token v_head"),
        *_fields(_INT, "table_row num_tokens num_rows num_columns"),
        *_fields(_INT, "num_blocks block_size num_heads num_kv_heads head_dim kv_bytes"),
        ("window", _INT),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class StoreCall(ctypes.Structure):
    """Store of calls.h."""

    _fields_ = [
        *_fields(_POINTER, "k v k_cache v_cache slots"),
        *_fields(_INT, "k_token k_head v_token v_head kc_block kc_token kc_head"),
        *_fields(_INT, "vc_block vc_token vc_head num_tokens num_kv_heads head_dim"),
        *_fields(_INT, "num_slots block_size kv_bytes"),
    ]


def unsupported_reason(
    device_type: str, dtype: torch.dtype, query_dtype: torch.dtype | None = None
) -> str | None:
    """Return why the compiled kernels cannot run on a device type with a cache dtype, or None if they can.

    Args:
        device_type: of all tensors.
        dtype: of the cache.
        query_dtype: of queries, and of keys and values to store; None: dtype.
    """
    if device_type != "cpu":
        return f"the compiled kernels run on CPUs, the tensors are on {device_type}"
    query_dtype = query_dtype or dtype
    if query_dtype != torch.float32 or dtype not in (torch.float32, torch.bfloat16):
        return (
            "the compiled kernels take float32, over a cache in float32 or bfloat16; "
            f"got {query_dtype} over a cache in {dtype}"
        )
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def call_unsupported_reason(cache: LayerCache, options: ScoreOptions | None = None) -> str | None:
    """Return why the kernels cannot run a call over a cache (options None: a store), or None if they can."""
    if cache.v.shape[3] != cache.k.shape[3]:
        return f"values have head dim {cache.v.shape[3]}, keys {cache.k.shape[3]}"
    if options is None or options.alibi_slopes is None:
        return None
    if options.alibi_slopes.dim() == 2:
        return "it has one ALiBi slope per head, not per sequence"
    return None if options.right == 0 else "its ALiBi bias is for keys before the query only"


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot, in place; see octavo.attention.store_kv.

    Raises:
        InvalidArgumentError: a slot does not exist; nothing was written.
    """
    assert cache.k_scale is None, "only float8 caches have scales, and unsupported_reason refuses them"
    slots = slot_mapping.to(torch.int64).contiguous()
    num_blocks, block_size, num_kv_heads, head_dim = cache.k.shape
    call = StoreCall(
        *[tensor.data_ptr() for tensor in (k, v, cache.k, cache.v, slots)],
        *[stride for tensor in (k, v, cache.k, cache.v) for stride in tensor.stride()[:-1]],
        num_tokens=k.shape[0], num_kv_heads=num_kv_heads, head_dim=head_dim,
        num_slots=num_blocks * block_size, block_size=block_size, kv_bytes=cache.k.itemsize,
    )  # fmt: skip
    bad_token = kernel_library().octavo_store(call, torch.get_num_threads())
    if bad_token >= 0:
        raise bad_slot(bad_token, int(slots[bad_token]), num_blocks * block_size)


def paged_attention_with_lse(
    q: Tensor, cache: LayerCache, metadata: AttentionMetadata, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Attend by the step's plan; see octavo.attention.paged_attention_with_lse.

    Raises:
        InvalidArgumentError: the block table names a block that does not exist, or the plan is damaged.
    """
    plan = host_plan(q.shape[0], cache.k.shape[1], metadata, options.right, options.window)
    positions = shift_positions(metadata.positions, options.shift).contiguous()
    return attend_planned(
        q,
        cache,
        metadata.block_table,
        positions.data_ptr(),
        plan,
        plan_struct(plan),
        options,
        num_threads=torch.get_num_threads(),
    )


def attend_planned(
    q: Tensor,
    cache: LayerCache,
    block_table: Tensor,
    positions: int,
    plan: ForestPlan,
    structure: _Plan,
    options: ScoreOptions,
    *,
    num_threads: int,
) -> tuple[Tensor, Tensor]:
    """Attend by a plan; see octavo.attention.paged_attention_with_lse.

    Args:
        q, cache, block_table, options: of a call for which call_unsupported_reason returns None.
        positions: address of int32, one for each query token of the plan, shifted by options.shift.
        plan: the work.
        structure: the plan as plan_struct returns it; the kernel writes into it what it refuses.
        num_threads: threads that work on it.

    Raises:
        InvalidArgumentError: the block table names a block that does not exist, or the plan is damaged.
    """
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    if plan.num_tokens < num_tokens:
        out[plan.num_tokens :] = 0.0
        lse[plan.num_tokens :] = -torch.inf
    partial_out = partial_lse = None
    if plan.num_partials:
        partial_out = out.new_empty(plan.num_partials, num_heads, head_dim)
        partial_lse = lse.new_empty(plan.num_partials, num_heads)
    # The kernel needs contiguous rows; a table of one column may have any stride.
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    slopes = None if options.alibi_slopes is None else options.alibi_slopes.contiguous()
    num_blocks, block_size, num_kv_heads, _ = cache.k.shape
    call = AttendCall(
        q.data_ptr(), cache.k.data_ptr(), cache.v.data_ptr(), table.data_ptr(), positions, _address(slopes),
        out.data_ptr(), lse.data_ptr(), _address(partial_out), _address(partial_lse), *q.stride()[:2],
        *cache.k.stride()[:3], *cache.v.stride()[:3], table_row=table.stride(0), num_tokens=num_tokens,
        num_rows=table.shape[0], num_columns=table.shape[1], num_blocks=num_blocks, block_size=block_size,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, kv_bytes=cache.k.itemsize,
        window=options.shifted_window or 0, scale=options.scale, softcap=options.softcap,
    )  # fmt: skip
    check_status(kernel_library().octavo_attend(structure, call, num_threads), structure, call)
    return add_sinks(out, lse, options.sinks, out.dtype)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def plan_struct(plan: ForestPlan) -> _Plan:
    """Return a structure that points to a plan's arrays; keep the plan alive as long as it.

    Raises:
        InvalidArgumentError: the plan's memory does not match its sizes.
    """
    packed, num_items, num_pairs, num_tokens = plan.packed, plan.num_items, plan.num_pairs, plan.num_tokens
    lengths = (*[num_items] * 3, num_items + 1, num_pairs, num_pairs, num_items, num_tokens + 1)
    if packed.shape != (sum(lengths),) or packed.dtype != np.int32 or not packed.flags.c_contiguous:
        raise InvalidArgumentError(
            f"the plan is damaged: packed must be contiguous [{sum(lengths)}] int32, "
            f"got {list(packed.shape)} {packed.dtype}; {_REMEDY}"
        )
    # The number is checked here because partial results are allocated before the kernel checks the plan.
    if not 0 <= plan.num_partials <= num_pairs:
        raise InvalidArgumentError(
            f"the plan is damaged: num_partials is {plan.num_partials}, expected 0 to {num_pairs}, the "
            f"length of item_tokens; {_REMEDY}"
        )
    address = packed.__array_interface__["data"][0]
    begins = accumulate(lengths[:-1], initial=0)
    addresses = (address + begin * packed.itemsize for begin in begins)
    return _Plan(*addresses, num_items, num_pairs, num_tokens, plan.num_partials)


def check_status(status: int, plan: _Plan, call: AttendCall) -> None:
    """Raise the error that octavo_attend found; it checks the plan and the call before it uses them.

    Raises:
        InvalidArgumentError: the block table names a block that does not exist, or the plan is damaged.
        OutOfMemoryError: the machine has no memory for the kernel's scratch.
    """
    if status != _OK:
        raise _error(status, plan, call)


def _error(status: int, plan: _Plan, call: AttendCall) -> OctavoError:
    index, value = plan.fault_index, plan.fault_value
    if status == _NO_MEMORY:
        return OutOfMemoryError("no memory for the attention kernel's scratch; lower the batch size")
    if status == _BAD_BLOCK:
        row, column = divmod(index, call.num_columns)
        return bad_block(row, column, value, call.num_blocks)
    if status == _BAD_SIZES:
        return InvalidArgumentError(
            f"the kernel needs at least one token per block, kv head and dimension, and a multiple of the kv "
            f"heads as query heads; got {call.block_size}, {call.num_kv_heads}, {call.head_dim} and "
            f"{call.num_heads}, or a plan of more than {call.num_tokens} query tokens"
        )
    if status == _BAD_SCORES:
        return InvalidArgumentError(
            f"scale and softcap must be finite float32 numbers, softcap and window not negative; got "
            f"{call.scale}, {call.softcap}, {call.window}"
        )
    if status == _UNWRITTEN:
        return InvalidArgumentError(
            f"the plan is damaged: expected {value} pairs of an item and a token, one for each partial "
            f"result and each token without one, got {index}; {_REMEDY}"
        )
    if _BAD_ROW <= status < _UNWRITTEN:
        name, expected = _EXPECTED[status - _BAD_ROW]
        return InvalidArgumentError(
            f"the plan is damaged: {name}[{index}] is {value}, expected {expected}; {_REMEDY}"
        )
    return EngineError(f"the attention kernel returned the unknown status {status}")


def kernel_library() -> ctypes.CDLL:
    loaded = _load()
    assert not isinstance(loaded, str), loaded
    return loaded


@cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or why it cannot be loaded; tried once per process."""
    try:
        library = load_library(ATTENTION)
    except KernelUnavailableError as error:
        return str(error)
    library.octavo_attend.argtypes = [ctypes.POINTER(_Plan), ctypes.POINTER(AttendCall), ctypes.c_int]
    library.octavo_attend.restype = ctypes.c_int
    library.octavo_store.argtypes = [ctypes.POINTER(StoreCall), ctypes.c_int]
    library.octavo_store.restype = _INT
    library.octavo_bad_slot.argtypes = [ctypes.POINTER(StoreCall)]
    library.octavo_bad_slot.restype = _INT
    library.octavo_rotate.argtypes = [_POINTER, _POINTER, _INT, _INT, _INT, _INT, ctypes.c_int]
    library.octavo_rotate.restype = None
    return library
