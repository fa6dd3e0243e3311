"""Plans that no constructor makes: what a hand, or a bug, could do to the arrays that kernels follow."""

import copy
from itertools import accumulate

import numpy as np

ARRAYS = (
    "item_table_row",
    "item_kv_begin",
    "item_kv_end",
    "item_token_begin",
    "item_tokens",
    "item_partial_ids",
    "item_order",
    "merge_begin",
)
LARGEST, LEAST = 2**31 - 1, -(2**31)


def with_fields(plan, **fields):
    """Return a copy of a plan with other fields, past everything that forbids it."""
    changed = copy.copy(plan)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed


def with_arrays(plan, **arrays):
    """Return a copy of a plan with other arrays, in memory of their size."""
    arrays = {name: np.asarray(arrays.get(name, getattr(plan, name)), dtype=np.int32) for name in ARRAYS}
    packed = np.concatenate(list(arrays.values()))
    ends = accumulate(array.size for array in arrays.values())
    parts = {
        name: packed[end - array.size : end] for end, (name, array) in zip(ends, arrays.items(), strict=True)
    }
    return with_fields(plan, packed=packed, **parts)


def edits(plan, capacity):
    """List every kind of wrong entry as (array, index, value), for a table of `capacity` tokens a row."""
    num_items, num_pairs, num_tokens = plan.num_items, plan.item_tokens.size, plan.num_tokens
    item, pair, token = num_items // 2, num_pairs // 2, num_tokens // 2
    wrong = [("item_table_row", item, value) for value in (-1, plan.num_sequences, LARGEST, LEAST)]
    wrong += [
        ("item_kv_begin", item, value) for value in (-1, LEAST, int(plan.item_kv_end[item]) + 1, LARGEST)
    ]
    wrong += [("item_kv_end", item, value) for value in (-1, LEAST, capacity + 1, LARGEST)]
    wrong += [("item_token_begin", 0, value) for value in (1, -1, LARGEST)]
    wrong += [("item_token_begin", item + 1, value) for value in (-1, num_pairs + 1, LARGEST, LEAST)]
    wrong += [("item_token_begin", num_items, value) for value in (0, num_pairs - 1, num_pairs + 1)]
    wrong += [("item_tokens", pair, value) for value in (-1, num_tokens, LARGEST, LEAST)]
    wrong += [("item_partial_ids", pair, value) for value in (-2, plan.num_partials, LARGEST, LEAST)]
    wrong += [("item_order", item, value) for value in (-1, num_items, LARGEST, LEAST)]
    wrong += [("merge_begin", 0, value) for value in (1, -1, LEAST)]
    wrong += [("merge_begin", token, value) for value in (-1, plan.num_partials + 1, LARGEST)]
    wrong += [("merge_begin", num_tokens, value) for value in (plan.num_partials + 1, -1, LARGEST)]
    return [(name, at, value) for name, at, value in wrong if getattr(plan, name)[at] != value]


def edited(plan, name, at, value):
    """Return the plan with one entry of one array changed."""
    array = getattr(plan, name).copy()
    array[at] = value
    return with_arrays(plan, **{name: array})


def mixed_up(plan):
    """List plans whose every index exists but which leave something out, or do it twice."""
    twice = plan.item_order.copy()
    twice[0] = twice[-1]
    same_token = plan.item_tokens.copy()
    same_token[0] = same_token[-1]
    same_id = plan.item_partial_ids.copy()
    taken = np.flatnonzero(same_id >= 0)
    same_id[taken[0]] = same_id[taken[1]]
    fewer = plan.item_token_begin.copy()
    fewer[-1] -= 1
    return [
        with_arrays(plan, item_order=twice),
        with_arrays(plan, item_tokens=same_token),
        with_arrays(plan, item_partial_ids=same_id),
        with_arrays(plan, item_partial_ids=np.full_like(same_id, -1)),
        with_arrays(
            plan,
            item_token_begin=fewer,
            item_tokens=plan.item_tokens[:-1],
            item_partial_ids=plan.item_partial_ids[:-1],
        ),
        with_fields(plan, num_partials=plan.num_partials + 1),
        with_fields(plan, num_partials=0),
        with_fields(plan, num_partials=-1),
        with_fields(plan, num_partials=2**50),
        with_fields(plan, packed=plan.packed[:-1]),
        with_fields(plan, packed=plan.packed.astype(np.int16)),
        with_fields(plan, packed=np.repeat(plan.packed, 2)[::2]),
    ]
