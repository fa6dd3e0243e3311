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
from attention_cases import make_case
from plan_damage import edited, edits, mixed_up, with_arrays

from octavo.attention import ForestPlan, KVCache, merge, store_kv
from octavo.attention.choice import choose_impl
from octavo.attention.cpu.kernel import StoreCall, kernel_library
from octavo.errors import InvalidArgumentError
from octavo.layers import AttentionLayer, FeedForward, RMSNorm, make_input, make_output
from octavo.layers.cpu.layers import compiled_layers
from octavo.layers.layer_options import LayerOptions
from octavo.layers.linear.block_weight import BlockWeight
from octavo.layers.linear.blocks import BlockLinear, TiledBlocks, tiled
from octavo.layers.rotary import Rotary
from octavo.layers.stack import make_stack
from octavo.layers.steps.cpu import CpuStep
from octavo.layers.steps.operators import OperatorStep
from octavo.models.formats.gguf.blocks import blocks_of, read_as_stored
from octavo.parallel import TensorParallel

BLOCK_SIZES, HEADS = (1, 2, 3, 16, 17), ((1, 1), (2, 2), (4, 2), (7, 1), (6, 2), (50, 1))
NOWHERE = (-1, -(2**31), 2**31 - 1)


def refused(call, *arguments, **options):
    """Check that a call ends in a typed error."""
    try:
        call(*arguments, **options)
    except InvalidArgumentError:
        return
    raise AssertionError(f"accepted by {call}: {arguments} {options}")


def close(actual, expected, scale=1.0):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * scale)


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
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": pick.choice((1, 2, 7, 8, 16, 33, 64, 70))}
    case = make_case(
        seq_lens, query_lens, block_size=block_size, rows=rows, seed=pick.getrandbits(32), **shape
    )
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


def strided(pick, case):
    """The same numbers, with what lies between them in memory NaN."""
    wide = torch.full((case.q.shape[0], case.q.shape[1] + 3, case.q.shape[2]), torch.nan)
    wide[:, 2:-1] = case.q
    both = torch.stack([case.k_cache, case.v_cache], dim=3)
    return replace(case, q=wide[:, 2:-1], k_cache=both[:, :, :, 0], v_cache=both[:, :, :, 1])


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
    block_size, kv_heads, head_dim = pick.choice(BLOCK_SIZES), pick.randint(1, 4), pick.choice((1, 5, 16, 40))
    shape = {"num_blocks": 5, "block_size": block_size, "num_kv_heads": kv_heads, "head_dim": head_dim}
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
    head_dim = pick.choice((2, 8, 20, 64))
    seq_lens = [pick.randint(1, 90) for _ in range(pick.randint(1, 4))]
    query_lens = [pick.randint(1, min(n, 40)) for n in seq_lens]
    case = make_case(seq_lens, query_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    metadata = replace(case.metadata, slot_mapping=_slots(case), work=case.forest())
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


def _slots(case):
    """Where the query tokens of a case lie in its cache."""
    metadata, block_size = case.metadata, case.k_cache.shape[1]
    sequence = torch.repeat_interleave(torch.arange(metadata.seq_lens.shape[0]), metadata.cu_seqlens_q.diff())
    positions = metadata.positions.long()
    return (
        metadata.block_table[sequence, positions // block_size].long() * block_size + positions % block_size
    )


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


def check_layers(pick):
    """The fused small layers beside torch's operators."""
    layers = compiled_layers()
    assert layers is not None
    rows, size = pick.randint(0, 5), pick.choice((1, 7, 16, 33, 100))
    hidden, delta, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    total = hidden + delta
    normed = layers.add_rms_norm(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, total)
    close(normed, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight)
    assert torch.equal(layers.add_rms_norm(total, None, weight, 1e-5), normed)
    gate_up = torch.randn(rows, 2 * size) * 40
    gate, up = gate_up.split(size, dim=1)
    close(layers.silu_and_multiply(gate_up), torch.nn.functional.silu(gate) * up, scale=40.0)


def check_blocks(pick):
    """The product with weights in blocks of every form, beside torch's on the numbers that they stand for."""
    bits, halves = pick.choice(((4, 1), (8, 1), (8, 2)))
    rows, outputs, columns = pick.randint(0, 9), pick.randint(1, 40), 32 * pick.randint(1, 6)
    low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    dtype = torch.float32 if halves == 2 else pick.choice((torch.float16, torch.float32))
    scales = torch.randn(outputs, columns // 32 * halves).to(dtype)
    mins = torch.randn(outputs, columns // 32).to(dtype) if halves == 1 and pick.random() < 0.5 else None
    weight = BlockWeight(bits, torch.randint(low, high, (outputs, columns), dtype=kind), scales, mins)
    # Whole numbers to 127, and one of that size in each block: nothing is rounded.
    x = torch.randint(-127, 128, (rows, columns)).float()
    x[:, ::32] = 127
    bias = torch.randn(outputs) if pick.random() < 0.5 else None
    expected = torch.nn.functional.linear(
        x.double(), weight.dequantise().double(), None if bias is None else bias.double()
    )
    close(BlockLinear(tiled([weight]), bias)(x), expected.float(), scale=1e4)


def check_tiles(pick):
    """Blocks of a file in the kernel's order: as PyTorch orders them."""
    name, block_bytes = pick.choice((("Q4_1", 20), ("Q8_0", 34)))
    rows, shape = pick.randint(1, 20), (pick.randint(1, 5), block_bytes)
    # No float16 of such bytes is infinite.
    stored, num_rows = torch.randint(0, 60, (rows, *shape), dtype=torch.uint8), rows + pick.randint(0, 9)
    weights = read_as_stored(name, stored), blocks_of(name, stored)
    tiles, expected = (
        TiledBlocks(weight, num_rows=num_rows).rows(torch.arange(num_rows)) for weight in weights
    )
    assert torch.equal(tiles, expected)


def random_linear(pick, outputs, columns):
    """A layer of one weight in blocks."""
    bits, low, high, kind = pick.choice(((4, 0, 16, torch.uint8), (8, -128, 128, torch.int8)))
    scales = torch.randn(outputs, columns // 32) / columns
    quants = torch.randint(low, high, (outputs, columns), dtype=kind)
    return BlockLinear(tiled([BlockWeight(bits, quants, scales, None)]))


def check_stack(pick):
    """All layers of a decoder in one call: what they are one by one."""
    heads, kv_heads = pick.choice(((2, 1), (4, 2), (6, 6)))
    head_dim, hidden, inner = pick.choice((16, 48)), 32 * pick.randint(1, 3), 32 * pick.randint(1, 3)
    seq_lens = [pick.randint(1, 50) for _ in range(pick.randint(1, 4))]
    query_lens = [pick.randint(1, n) for n in seq_lens]
    case = make_case(seq_lens, query_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    metadata = replace(case.metadata, slot_mapping=_slots(case), work=case.forest())
    options = LayerOptions(0, 0, 0.3, pick.choice((None, 8)), pick.choice((0.0, 4.0)), None)
    qkv = random_linear(pick, (heads + 2 * kv_heads) * head_dim, hidden)
    output = make_output(random_linear(pick, hidden, heads * head_dim), None, TensorParallel())
    attention = AttentionLayer(make_input(RMSNorm(torch.rand(hidden), 1e-5), qkv), output, options)
    gate_up = make_input(RMSNorm(torch.rand(hidden), 1e-5), random_linear(pick, 2 * inner, hidden), "silu")
    down = make_output(random_linear(pick, hidden, inner), None, TensorParallel())
    feed_forward, stream = FeedForward(gate_up, down), torch.randn(case.q.shape[0], hidden)
    rope, outs = Rotary(torch.rand(head_dim // 2), 1.0), []
    for stack in (None, make_stack([(attention, feed_forward)])):
        cache = KVCache(torch.stack([case.k_cache, case.v_cache]).transpose(2, 3)[None].contiguous())
        step, out = CpuStep(cache, metadata, num_heads=heads), stream.clone()
        rotations = [step.rotations(rope, metadata.positions)]
        if stack is None:
            out += feed_forward(out, attention(out, None, rotations, step))
        else:
            step.run_layers(stack, out, rotations)
        outs.append((out, cache.data))
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


CHECKS = (
    (check_attention, 6),
    (check_damaged_plans, 2),
    (check_bad_calls, 2),
    (check_store, 2),
    (check_step, 3),
    (check_merge, 1),
    (check_layers, 2),
    (check_blocks, 2),
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
    kernel_library().octavo_store(StoreCall(*[address] * 5, *[1] * 10, 1, 1, 1, 1, 0), 1)


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
