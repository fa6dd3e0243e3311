"""A step's attention on a CPU: what all layers have in common is prepared once.

Each layer then makes three calls into C: rotate, store, attend. Through the public operators it would call
several times as many functions, whose overhead dominates small steps.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.cache import KVCache
from octavo.attention.checks import bad_slot, check_mask, check_plan
from octavo.attention.cpu.c_calls import AttendCall, StoreCall, check_status, kernel_library, plan_struct
from octavo.attention.implementations import choose_impl
from octavo.attention.lengths import check_capacity
from octavo.attention.merge import add_sinks
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.torch_paged import host_plan
from octavo.errors import InvalidArgumentError
from octavo.layers.compiled_stack import LayerStack, StackGroup, StackPlace, StackStep
from octavo.layers.layer_options import LayerOptions
from octavo.layers.rotary import Rotary, rotated_heads
from octavo.layers.steps.grouped_step import GroupedStep
from octavo.layers.steps.operator_step import AttentionStep, values_of


def unsupported_reason(kv_cache: KVCache, impl: str, dtype: torch.dtype) -> str | None:
    """Return why a step cannot be prepared for the compiled kernels, or None if it can; dtype: of queries."""
    data = kv_cache.data
    if choose_impl(impl, data.device.type, data.dtype, dtype) != "c":
        return f"attention_impl={impl!r} does not mean the compiled kernels here"
    return None if data.is_contiguous() else "the cache is not laid out as by KVCache.allocate"


def _check_slots_shape(slots: Tensor, num_tokens: int) -> None:
    if slots.shape != (num_tokens,):
        raise InvalidArgumentError(
            f"slot_mapping must be [{num_tokens}], one slot per position; got {list(slots.shape)}"
        )


class CpuStep:
    """Attention of one step, for any of its layers, with H = num_heads query heads.

    Only for caches that `unsupported_reason` accepts. The layers share the buffers of partial results.

    Raises:
        InvalidArgumentError: the plan, the slots or the block table do not fit the step.
    """

    def __init__(
        self, kv_cache: KVCache, metadata: AttentionMetadata, *, num_heads: int, group: int = 0
    ) -> None:
        self.layers = kv_cache.groups[group]
        # [N, KH, B, D], as in memory.
        tiles = kv_cache.layer(self.layers[0]).k.transpose(1, 2)
        num_blocks, num_kv_heads, block_size, head_dim = tiles.shape
        num_tokens = metadata.positions.shape[0]
        self._num_heads, self._num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.heads = num_heads, num_kv_heads
        self._num_slots = num_blocks * block_size
        self._threads = torch.get_num_threads()
        self._addresses = kv_cache.addresses
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self._out_shape = (num_tokens, num_heads * head_dim)
        # Each layer checks its window.
        planned = None if metadata.plan is None else metadata.plan.window
        plan = host_plan(num_tokens, block_size, metadata, window=planned)
        check_capacity(metadata.max_seq_len, block_size, metadata.block_table)
        check_plan(plan, num_tokens, block_size, metadata)
        assert plan.num_tokens == num_tokens, "the plan does not cover all tokens"
        self._plan = plan_struct(plan)
        slots = metadata.slot_mapping.to(torch.int64).contiguous()
        _check_slots_shape(slots, num_tokens)
        table, positions = metadata.block_table.contiguous(), metadata.positions.contiguous()
        partial_out = torch.empty(plan.num_partials, num_heads, head_dim, dtype=torch.float32)
        self._lse = torch.empty(num_tokens, num_heads, dtype=torch.float32)
        partial_lse = torch.empty(plan.num_partials, num_heads, dtype=torch.float32)
        # The structures hold only addresses, so these objects must stay alive.
        self._alive = (kv_cache, table, positions, partial_out, partial_lse)
        self._host_plan, self._slots = plan, slots
        block_stride, head_stride, token_stride, _ = tiles.stride()
        self._store = StoreCall(
            slots=slots.data_ptr(), k_token=width, k_head=head_dim, v_token=width, v_head=head_dim,
            kc_block=block_stride, kc_token=token_stride, kc_head=head_stride, vc_block=block_stride,
            vc_token=token_stride, vc_head=head_stride, num_tokens=num_tokens, num_kv_heads=num_kv_heads,
            head_dim=head_dim, num_slots=self._num_slots, block_size=block_size, kv_bytes=tiles.itemsize,
        )  # fmt: skip
        self._attend = AttendCall(
            table=table.data_ptr(), positions=positions.data_ptr(), lse=self._lse.data_ptr(),
            partial_out=partial_out.data_ptr(), partial_lse=partial_lse.data_ptr(), q_token=width,
            q_head=head_dim, k_block=block_stride, k_token=token_stride, k_head=head_stride,
            v_block=block_stride, v_token=token_stride, v_head=head_stride, table_row=table.stride(0),
            num_tokens=num_tokens, num_rows=table.shape[0], num_columns=table.shape[1], num_blocks=num_blocks,
            block_size=block_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            kv_bytes=tiles.itemsize,
        )  # fmt: skip
        self._library = kernel_library()

    def rotations(self, rope: Rotary, positions: Tensor) -> Tensor:
        """See AttentionStep."""
        return rope(positions)

    def attend(self, qkv: Tensor, rotations: Tensor, options: LayerOptions) -> Tensor:
        """See AttentionStep; float32, q and k are overwritten.

        Raises:
            InvalidArgumentError: a slot or a block does not exist, or the plan was damaged, or is for a
                smaller window.
        """
        check_mask(self._host_plan, 0, options.window)
        library, threads, store, call = self._library, self._threads, self._store, self._attend
        out = torch.empty(self._out_shape, dtype=torch.float32)
        num_tokens = self._out_shape[0]
        base, width = qkv.data_ptr(), qkv.shape[1]
        num_keys = 0 if options.shares_cache else self._num_kv_heads
        num_rotated = self._num_heads + num_keys
        heads = qkv.view(num_tokens, -1, self.head_dim)
        is_plain = options.value_norm is None and not options.keys_are_values
        values = heads if is_plain else values_of(heads, num_keys, options).contiguous()
        if options.qk_norm is not None:
            options.qk_norm.apply_(heads[:, :num_rotated])
        for first, number, turns in rotated_heads(rotations, self._num_heads, num_keys):
            at = base + first * self.head_dim * 4
            library.octavo_rotate(at, turns.data_ptr(), num_tokens, number, self.head_dim, width, threads)
        call.k, call.v = self._addresses[options.layer]
        if num_keys:
            store.k = base + self._num_heads * self.head_dim * 4
            store.v = values.data_ptr() + (num_rotated * self.head_dim * 4 if is_plain else 0)
            store.k_token, store.v_token = width, values.stride(0)
            store.k_cache, store.v_cache = call.k, call.v
            self._check_slots(library.octavo_store(store, threads))
        call.q, call.q_token, call.out = base, width, out.data_ptr()
        call.scale, call.window, call.softcap = options.scale, options.window or 0, options.softcap
        check_status(library.octavo_attend(self._plan, call, threads), self._plan, call)
        if options.sinks is None:
            return out
        heads = out.view(num_tokens, self._num_heads, -1)
        return add_sinks(heads, self._lse, options.sinks, out.dtype)[0].flatten(1)

    def check_stack(self, stack: LayerStack) -> None:
        """Check slots, and that the plan is for no smaller window than the stack's layers have here.

        Raises:
            InvalidArgumentError: it is, or a slot does not exist.
        """
        for layer, window in stack.windows:
            if layer in self.layers:
                check_mask(self._host_plan, 0, window)
        self._check_slots(self._library.octavo_bad_slot(self._store))

    def stack_group(self) -> StackGroup:
        """Return the step as all layers of a stack in this group share it; valid as long as this object."""
        return StackGroup(ctypes.addressof(self._plan), self._attend, self._store)

    def check_status(self, status: int, attend: AttendCall) -> None:
        """Raise what a stack of layers found in a call of this group; see check_status."""
        check_status(status, self._plan, attend)

    def _check_slots(self, bad_token: int) -> None:
        if bad_token >= 0:
            raise bad_slot(bad_token, int(self._slots[bad_token]), self._num_slots)


def cpu_steps(step: AttentionStep) -> list[CpuStep]:
    """Return the steps of all groups of layers, if they are of this kind and have equal heads; else none."""
    steps = list(dict.fromkeys(step.of_layers.values())) if isinstance(step, GroupedStep) else [step]
    found = [each for each in steps if isinstance(each, CpuStep)]
    shapes = {(*each.heads, each.head_dim) for each in found}
    return found if len(found) == len(steps) and len(shapes) == 1 else []


def run_layers(
    steps: Sequence[CpuStep],
    kv_cache: KVCache,
    stack: LayerStack,
    hidden: Tensor,
    rotations: Sequence[Tensor],
) -> None:
    """Run all layers over hidden [T, hidden] float32, in place.

    Args:
        steps: of the cache's groups of layers.
        kv_cache: the cache.
        stack: the layers.
        hidden: residual stream, contiguous.
        rotations: from rotations, one per rope of the network.

    Raises:
        InvalidArgumentError: a slot or a block does not exist, or a plan was damaged.
        OutOfMemoryError: there is none for the layers' buffers.
    """
    for step in steps:
        step.check_stack(stack)
    groups = (StackGroup * len(steps))(*(step.stack_group() for step in steps))
    # All layers of a stack have heads of one size. The first turns are the queries', the last are the keys'.
    turns = [rotated_heads(each, *steps[0].heads) for each in rotations]
    queries, keys = (
        (ctypes.c_void_p * len(turns))(*(each[index][2].data_ptr() for each in turns)) for index in (0, -1)
    )
    group_of = {layer: index for index, step in enumerate(steps) for layer in step.layers}
    places = (StackPlace * len(kv_cache.addresses))(
        *(StackPlace(group_of[layer], *at) for layer, at in enumerate(kv_cache.addresses))
    )
    step = StackStep(*map(ctypes.addressof, (queries, keys, groups, places)))
    status = stack(hidden, step)
    steps[step.failed].check_status(status, groups[step.failed].attend)
