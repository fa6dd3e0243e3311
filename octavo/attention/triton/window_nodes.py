"""Shared nodes of layers with a window: in each step, the keys of every unit that some of its queries see.

A plan stays while sequences decode, and their windows move on. What no query sees any more may be gone.

    unit, planned   kv begin |-------------------------------| kv end
    in this step             .......|------------------------|         from the first key that some query sees
                             ...........|--------------------|         full begin: all of them see these
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.triton.kernel_call import RECORD
from octavo.kernels.device import num_multiprocessors, power_of_two
from octavo.kernels.launch import launch


def see_nodes(forest: DeviceForest, positions: Tensor, window: int) -> None:
    """Write what each unit's queries see into the plan's records.

    Launch it before another kernel that starts when those before it have ended: node kernels read their
    records before they wait.

    Args:
        forest: the plan.
        positions: [T] int32 of the step's query tokens, not shifted.
        window: of the layers.
    """
    classes = (forest.fat_units, forest.num_fat_units), (forest.thin_units, forest.num_thin_units)
    for units, count in classes[: 1 + forest.has_thin_units]:
        launch(
            see_nodes_kernel,
            (min(units.shape[0], num_multiprocessors(positions.device)),),
            units=units, count=count, tokens=forest.tokens, positions=positions,
            num_rows=positions.shape[0], window=window, TOKENS=power_of_two(forest.most_unit_tokens),
            num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "window"])
def see_nodes_kernel(units, count, tokens, positions, num_rows, window, TOKENS: tl.constexpr):
    """Each program writes the records of its turns."""
    entry = tl.arange(0, TOKENS)
    for unit in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        record = units + unit * RECORD
        kv_end = tl.load(record + 4)
        valid = entry < tl.load(record + 2)
        token = tl.load(tokens + tl.load(record + 1) + entry, mask=valid, other=0)
        position = tl.load(positions + token, mask=valid & (token < num_rows), other=-1)
        # Queries come after their nodes; those that do not are of sequences that have ended.
        reads = position >= kv_end
        lowest = tl.min(tl.where(reads, position, 0x7FFFFFFF))
        highest = tl.max(tl.where(reads, position, -1))
        kv_begin = tl.minimum(kv_end, tl.maximum(tl.load(record + 7), lowest - window + 1))
        kv_begin = tl.where(highest < 0, kv_end, kv_begin)
        tl.store(record + 3, kv_begin)
        tl.store(record + 5, tl.minimum(kv_end, tl.maximum(kv_begin, highest - window + 1)))
