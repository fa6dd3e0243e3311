"""Random calls of everything that is compiled: what is wrong ends in a typed error, the rest is right.

    python tests/attention/kernel_fuzz.py --seed 1 --cases 1000

test_kernel_sanitizers.py runs it over kernels that were compiled with sanitizers; by itself it takes the
usual ones. A seed is one sequence of calls, and is printed first.
"""

import argparse
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from attention_cases import make_case, with_bfloat16_cache
from fuzz_helpers import BLOCK_SIZES, HEADS, NOWHERE, close, refused, slots_of, strided
from layer_fuzz import (
    check_bfloat16,
    check_blocks,
    check_experts,
    check_float8,
    check_layers,
    check_mxfp4,
    check_stack,
    check_tiles,
)
from plan_damage import edited, edits, mixed_up, with_arrays

from octavo.attention import ForestPlan, KVCache, merge, store_kv
from octavo.attention.cpu.c_calls import StoreCall, kernel_library
from octavo.attention.implementations import choose_impl
from octavo.layers.layer_options import LayerOptions
from octavo.layers.rotary import Rotary
from octavo.layers.steps.cpu_step import CpuStep
from octavo.layers.steps.operator_step import OperatorStep


def random_rows(pick, num_sequences, num_blocks):
    """Block ids of sequences, some of which begin like the one before: a forest."""
    rows, ids = [], iter(range(10**6))
    for s in range(num_sequences):
        shared = pick.randint(0, num_blocks[s]) if s and pick.random() < 0.6 else 0
        rows.append([*rows[-1][:shared]] if s else [])
        rows[-1] += [next(ids) for _ in range(num_blocks[s] - len(rows[-1]))]
    return rows


def random_case(pick):
    """A ragged batch, now and then long enough to be split, with empty rows and rows without queries."""
    block_size, (heads, kv_heads) = pick.choice(BLOCK_SIZES), pick.choice(HEADS)
    longest = 1400 if pick.random() < 0.1 else 150
    seq_lens = [pick.choice((0, 1, pick.randint(1, longest))) for _ in range(pick.randint(0, 5))]
    query_lens = [pick.choice((0, min(n, 1), pick.randint(0, min(n, 80)))) for n in seq_lens]
    rows = random_rows(pick, len(seq_lens), [-(-n // block_size) for n in seq_lens])
    shape = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": pick.choice((1, 2, 7, 8, 16, 33, 64, 70, 256, 512)),
    }
    case = make_case(
        seq_lens, query_lens, block_size=block_size, rows=rows, seed=pick.getrandbits(32), **shape
    )
    if pick.random() < 0.4:
        case = with_bfloat16_cache(case)
    for token in range(case.q.shape[0]):
        if pick.random() < 0.05:
            # A plan lists the keys of a token's place in its sequence; it may see fewer.
            latest = int(case.metadata.positions[token])
            case.metadata.positions[token] = pick.choice((-1, -(2**31), pick.randint(-1, max(latest, 0))))
    return case


def random_options(pick, case):
    options = {"window": pick.choice((None, 1, 9, 2**31, 2**40)), "softcap": pick.choice((0.0, 3.0, 1e30))}
    if pick.random() < 0.3:
        options["alibi_slopes"] = torch.rand(case.q.shape[1])
    return options


def lengths_of(case):
    return case.metadata.seq_lens.numpy(), case.metadata.cu_seqlens_q.numpy()


def check_attention(pick):
    """The operator by no plan, a flat one and a forest: the reference."""
    case = random_case(pick)
    options = random_options(pick, case)
    expected = case.run("reference", **options)
    if pick.random() < 0.3:
        case = strided(pick, case)
    split_tokens = pick.choice((8, 64, 512))
    flat = ForestPlan.flat(*lengths_of(case), tile_tokens=pick.choice((1, 3, 64)), split_tokens=split_tokens)
    for plan in (None, flat, case.forest(split_tokens=split_tokens)):
        out, lse = case.run("c", plan, **options)
        close(out, expected[0])
        close(lse, expected[1])


def check_damaged_plans(pick):
    """A few wrong entries, and everything that is left out or done twice."""
    rows = [[0, 1, 2, 3, 4], [0, 1, 5, 6, 7], [0, 1, 8, 9, 10], [11, 12, 13]]
    case = make_case([70, 70, 70, 40], [1, 2, 1, 30], rows=rows)
    # Without a spare column, so that what lies past a row is another sequence's.
    table = case.metadata.block_table[:, :5].contiguous()
    case = replace(case, metadata=replace(case.metadata, block_table=table))
    plan = case.forest(split_tokens=pick.choice((8, 512)))
    capacity = case.metadata.block_table.shape[1] * case.k_cache.shape[1]
    wrong = [edited(plan, *edit) for edit in pick.sample(edits(plan, capacity), 12)]
    for number in range(3):
        name = pick.choice(("item_kv_end", "item_tokens", "item_order", "item_partial_ids"))
        array = getattr(plan, name).copy()
        array[pick.randrange(array.size)] = pick.choice((-2, 10**6 + number, *NOWHERE[1:]))
        wrong.append(with_arrays(plan, **{name: array}))
    wrong.append(with_arrays(plan, item_kv_end=np.full_like(plan.item_kv_end, capacity)))
    for damaged in wrong + mixed_up(plan):
        refused(case.run, "c", damaged)


def run_with(case, **changes):
    """Attend with other metadata."""
    return replace(case, metadata=replace(case.metadata, **changes)).run("c")


def check_bad_calls(pick):
    """One thing wrong with a call that is right."""
    case = make_case([40, 70, 9], [1, 20, 9])
    table = case.metadata.block_table
    row, column = pick.choice(((0, 0), (0, 2), (1, 0), (1, 4), (2, 0)))
    good = int(table[row, column])
    table[row, column] = pick.choice((*NOWHERE, case.k_cache.shape[0]))
    refused(case.run, "c", window=pick.choice((None, 3)))
    table[row, column] = good
    refused(case.run, "c", scale=pick.choice((float("inf"), float("nan"), 1e39, None)))
    refused(case.run, "c", softcap=pick.choice((float("inf"), float("nan"), -1.0, 1e39)))
    refused(case.run, "c", window=pick.choice((0, -1, 2.5)))
    for name, values in (("seq_lens", NOWHERE), ("cu_seqlens_q", (31, *NOWHERE))):
        tensor = getattr(case.metadata, name).clone()
        tensor[pick.randrange(3)] = pick.choice(values)
        refused(run_with, case, **{name: tensor})
    refused(replace(case, q=case.q[:, :3]).run, "c")
    refused(replace(case, q=case.q[:-1]).run, "c")
    refused(replace(case, k_cache=case.k_cache[:, :0], v_cache=case.v_cache[:, :0]).run, "c")


def check_store(pick):
    """Slots in any order, some of them nowhere; or one that does not exist, and nothing is written."""
    block_size, kv_heads, head_dim = (
        pick.choice(BLOCK_SIZES),
        pick.randint(1, 4),
        pick.choice((1, 5, 16, 40, 512)),
    )
    shape = {"num_blocks": 5, "block_size": block_size, "num_kv_heads": kv_heads, "head_dim": head_dim}
    shape["dtype"] = pick.choice((torch.float32, torch.bfloat16))
    caches = [KVCache.allocate(num_layers=1, **shape) for _ in range(2)]
    for cache in caches:
        cache.data.zero_()
    num_slots = 5 * block_size
    slots = torch.tensor(
        [pick.choice((-1, slot)) for slot in pick.sample(range(num_slots), pick.randint(0, 5))]
    )
    slots = slots.to(pick.choice((torch.int32, torch.int64)))
    fused = torch.randn(slots.shape[0], 3 * kv_heads, head_dim)
    k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    for cache, impl in zip(caches, ("c", "reference"), strict=True):
        store_kv(k, v, cache.layer(0), slots, impl=impl)
    assert torch.equal(caches[0].data, caches[1].data)
    if slots.shape[0]:
        slots[pick.randrange(slots.shape[0])] = pick.choice((-2, num_slots, 2**31 - 1, -(2**31)))
        refused(store_kv, k + 1, v + 1, caches[0].layer(0), slots, impl="c")
        assert torch.equal(caches[0].data, caches[1].data)
    refused(store_kv, k[:, 1:], v, caches[0].layer(0), slots, impl="c")


def check_step(pick):
    """A decoder step's rotate, store and attend: those of the reference's operators."""
    heads, kv_heads = pick.choice(HEADS)
    head_dim = pick.choice((2, 8, 20, 64, 256, 512))
    seq_lens = [pick.randint(1, 90) for _ in range(pick.randint(1, 4))]
    query_lens = [pick.randint(1, min(n, 40)) for n in seq_lens]
    case = make_case(seq_lens, query_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    metadata = replace(case.metadata, slot_mapping=slots_of(case), work=case.forest())
    qkv = torch.randn(case.q.shape[0], (heads + 2 * kv_heads) * head_dim)
    options = LayerOptions(1, 0, 0.3, pick.choice((None, 8)), pick.choice((0.0, 4.0)), None)
    both = torch.stack([case.k_cache, case.v_cache]).transpose(2, 3)
    caches = [KVCache(torch.stack([both, both]).contiguous()) for _ in range(2)]
    fast = CpuStep(caches[0], metadata, num_heads=heads)
    plain = OperatorStep(caches[1], metadata, heads, "reference")
    rotations = fast.rotations(Rotary(torch.rand(head_dim // 2), 1.0), metadata.positions)
    outs = [step.attend(qkv.clone(), rotations, options) for step in (fast, plain)]
    close(*outs)
    torch.testing.assert_close(caches[0].data, caches[1].data, equal_nan=True)
    nan, infinity = float("nan"), float("inf")
    wrong = pick.choice(({"scale": nan}, {"softcap": infinity}, {"softcap": -1.0}, {"window": -1}))
    refused(fast.attend, qkv.clone(), rotations, replace(options, **wrong))
    if kv_heads > 1:
        odd = CpuStep(caches[0], metadata, num_heads=kv_heads + 1)
        refused(odd.attend, torch.ones(qkv.shape[0], (3 * kv_heads + 1) * head_dim), rotations, options)


def check_merge(pick):
    """Partial results over pieces of the keys, one of them empty: attention over all."""
    num_parts, generator = pick.randint(1, 4), torch.Generator().manual_seed(pick.getrandbits(32))
    scores, values = torch.randn(3, 2, 20, generator=generator), torch.randn(20, 5, generator=generator)
    pieces = [(scores[..., i::num_parts], values[i::num_parts]) for i in range(num_parts)]
    outs = torch.stack([*(s.softmax(-1) @ v for s, v in pieces), torch.full((3, 2, 5), torch.nan)])
    lses = torch.stack([*(s.logsumexp(-1) for s, _ in pieces), torch.full((3, 2), -torch.inf)])
    out, lse = merge(outs, lses)
    close(out, scores.softmax(-1) @ values)
    close(lse, scores.logsumexp(-1))
    refused(merge, outs, lses[:, :2])
    refused(merge, outs[0], lses)


CHECKS = (
    (check_attention, 6),
    (check_damaged_plans, 2),
    (check_bad_calls, 2),
    (check_store, 2),
    (check_step, 3),
    (check_merge, 1),
    (check_layers, 2),
    (check_bfloat16, 2),
    (check_blocks, 2),
    (check_float8, 2),
    (check_mxfp4, 2),
    (check_experts, 2),
    (check_tiles, 1),
    (check_stack, 2),
)


def overrun():
    """Rotate one head more than there is: an error that nothing but a sanitizer sees."""
    head, rotations = torch.zeros(8), torch.zeros(16)
    kernel_library().octavo_rotate(head.data_ptr(), rotations.data_ptr(), 2, 1, 8, 8, 1)


def divide():
    """Store to a block of no tokens."""
    numbers = torch.zeros(8)
    address = numbers.data_ptr()
    kernel_library().octavo_store(StoreCall(*[address] * 5, *[1] * 10, 1, 1, 1, 1, 0, 4), 1)


def check_sanitizers():
    """What each sanitizer is for ends a process, with a report; else it would not see the fuzz's errors."""
    for wrong, message in ((overrun, "heap-buffer-overflow"), (divide, "division by zero")):
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.dup2(write, 2)
            signal.alarm(60)
            wrong()
            os._exit(0)
        os.close(write)
        report = os.fdopen(read, "rb").read().decode(errors="replace")
        _, status = os.waitpid(process, 0)
        if status == 0 or message not in report:
            sys.exit(f"{wrong.__name__}: expected a report of a {message} and got status {status}: {report}")
    print("both sanitizers report")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument(
        "--sanitized", action="store_true", help="the kernels are compiled with sanitizers: see"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.cases} cases", flush=True)
    assert choose_impl("c", "cpu", torch.float32) == "c"
    if arguments.sanitized:
        check_sanitizers()
    # What is allocated and not written is NaN.
    torch.set_deterministic_debug_mode("error")
    done = Counter()
    checks, weights = zip(*CHECKS, strict=True)
    for number in range(arguments.cases):
        pick = random.Random(f"{arguments.seed}/{number}")
        torch.manual_seed(pick.getrandbits(32))
        check = pick.choices(checks, weights)[0]
        try:
            check(pick)
        except BaseException:
            print(f"case {number} of seed {arguments.seed}: {check.__name__}", flush=True)
            raise
        done[check.__name__] += 1
    print(", ".join(f"{name} {count}" for name, count in sorted(done.items())))


if __name__ == "__main__":
    main()
