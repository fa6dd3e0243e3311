"""Whether windows, prefix hits, forks and preemption ever change a greedy token: random schedules on a CPU.

Tiny random models of each family that keeps windows run in float32, with blocks of several sizes, pools that
are too small for their requests, short steps, requests that begin like others, forks and aborts. transformers
then reads each prompt with its answer at once: every token must be its most likely one. Where its two best
logits are no further apart than 1e-4, a token counts as a near-tie instead. The last line is JSON.

    python benchmarks/window_exactness.py [--tokens 200000] [--seed 0] [--save MACHINE]
"""

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from support.common import make_parser, publish, table

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine.engine import Engine
from octavo.kv import CacheLayer, KVCacheManager, SequenceBlocks, plan_layout

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from window_models import OWN, VOCABULARY, WINDOW, write_model

NEAR = 1e-4
MAX_LEN = 160
MAX_PROMPT, MAX_OUTPUT = 100, 60
# Pages, in those that the longest request takes by itself: each engine of a family takes the next number.
ROOM = (1.0, 20.0, 2.0, 8.0, 60.0)
COLUMNS = ("requests", "tokens", "hits", "shortened", "preemptions", "forks", "differences", "near-ties")
Rows = list[tuple[list[int], list[int]]]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=200_000, help="greedy tokens to compare, all families")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    families, total = {}, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(OWN):
            wanted = -(-(arguments.tokens - total["tokens"]) // (len(OWN) - index))
            rng = random.Random(f"{arguments.seed} {name}")
            families[name] = run_family(write_model(Path(folder) / name, name), wanted, rng)
            total += families[name]
            print(name, dict(families[name]), file=sys.stderr, flush=True)
    shown = {**families, "all": total}
    print(table(("family", *COLUMNS), [(n, *(f"{c[k]:,}" for k in COLUMNS)) for n, c in shown.items()]))
    figures = {name: {key: counts[key] for key in COLUMNS} for name, counts in shown.items()}
    report = {"transformers": transformers.__version__, "seed": arguments.seed, "near": NEAR}
    publish("window_exactness", {**report, "families": figures}, arguments)


def run_family(folder: Path, num_tokens: int, rng: random.Random) -> Counter[str]:
    """Run engines of random options until so many tokens were compared; return the counts of COLUMNS."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    counts = Counter[str]()
    layers = LLM(str(folder), device="cpu", num_blocks=64).engine.model_config.cache_layers
    rooms = cycle(ROOM)
    while (num_left := num_tokens - counts["tokens"]) > 0:
        rows, round_counts = run_round(folder, layers, next(rooms), min(6000, num_left), rng)
        counts += round_counts
        counts += compare(model.eval(), rows)
    return counts


def run_round(
    folder: Path, layers: Sequence[CacheLayer], room: float, num_tokens: int, rng: random.Random
) -> tuple[Rows, Counter[str]]:
    """Run one engine; return prompts with their answers, and what happened."""
    block_size = rng.randint(2, 16)
    need = plan_layout(layers, block_size, MAX_LEN).num_pages(MAX_LEN)
    llm = LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=MAX_LEN,
        block_size=block_size,
        num_blocks=int(need * room),
        max_num_batched_tokens=rng.choice((16, 100, 512)),
        max_num_seqs=rng.choice((32, 128) if room > 2 else (3, 32)),
        share_prefixes=rng.random() < 0.8,
        enable_prefix_caching=rng.random() < 0.9,
    )
    hits = watch_hits(llm.engine.manager)
    # Few requests at a time take long.
    outputs = play(llm.engine, num_tokens if room > 2 else num_tokens // 16, rng)
    stats = llm.stats
    assert stats.kv.num_referenced == 0, "blocks leak"
    llm.engine.manager.check_invariants()
    llm.reset_prefix_cache()
    assert llm.stats.kv.num_free == llm.stats.kv.num_blocks, "blocks leak"
    counts = {
        "requests": len(outputs),
        "hits": len(hits["hits"]),
        "shortened": len(hits["shortened"]),
        "preemptions": stats.num_preemptions,
        "forks": sum(len(output.outputs) - 1 for output in outputs),
    }
    rows = [
        (list(output.prompt_token_ids), list(completion.token_ids))
        for output in outputs
        for completion in output.outputs
    ]
    return rows, Counter(counts)


def watch_hits(manager: KVCacheManager) -> dict[str, set[SequenceBlocks]]:
    """Note which sequences hit a prefix, and which of these hits a lost window made shorter."""
    match_prefix = manager.match_prefix
    found: dict[str, set[SequenceBlocks]] = {"hits": set(), "shortened": set()}

    def watched(sequence: SequenceBlocks, *arguments: Any) -> int:
        num_lost = manager.stats().prefix_lost_tokens
        num_tokens = match_prefix(sequence, *arguments)
        if num_tokens:
            found["hits"].add(sequence)
        if manager.stats().prefix_lost_tokens > num_lost:
            found["shortened"].add(sequence)
        return num_tokens

    manager.match_prefix = watched  # type: ignore[method-assign]
    return found


def play(engine: Engine, num_tokens: int, rng: random.Random) -> list[RequestOutput]:
    """Add requests at random moments, abort some of them, and run them to their ends."""
    documents = [draw(rng, MAX_PROMPT) for _ in range(4)]
    outputs: list[RequestOutput] = []
    lengths: dict[str, int] = {}
    num_left = num_tokens
    while num_left > 0 or engine.has_unfinished_requests:
        for _ in range(rng.choice((0, 0, 1, 24)) if num_left > 0 else 0):
            length, n = rng.choice((1, 8, 30, MAX_OUTPUT)), rng.choice((1, 1, 1, 3))
            params = SamplingParams(
                temperature=0,
                max_tokens=length,
                n=n,
                ignore_eos=True,
                detokenize=False,
            )
            num_left -= length * n
            begun = rng.choice(outputs) if outputs and rng.random() < 0.2 else None
            prompt = continue_chat(rng, begun) if begun else draw_prompt(rng, documents)
            outputs.append(engine.add_request(prompt, params))
            lengths[outputs[-1].request_id] = length
        engine.step()
        if rng.random() < 0.01 and not outputs[-1].finished:
            del lengths[outputs[-1].request_id]
            engine.abort(outputs[-1].request_id)
    for output in outputs:
        whole = lengths.get(output.request_id)
        assert whole is None or all(len(own.token_ids) == whole for own in output.outputs), "cut short"
    return outputs


def draw(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(num_tokens)]


def draw_prompt(rng: random.Random, documents: list[list[int]]) -> list[int]:
    """Begin like a document, as far as some token of it, and end otherwise."""
    cut = rng.choice((0, rng.randint(1, 3 * WINDOW), rng.randint(1, MAX_PROMPT)))
    prompt = rng.choice(documents)[:cut] + draw(rng, rng.choice((0, 1, 3, 2 * WINDOW)))
    return prompt[:MAX_PROMPT] or draw(rng, 1)


def continue_chat(rng: random.Random, begun: RequestOutput) -> list[int]:
    """Go on behind an answer, as far as it is written."""
    prompt = [*begun.prompt_token_ids, *begun.outputs[0].token_ids]
    return [*prompt[: MAX_PROMPT - 3], *draw(rng, rng.randint(1, 3))]


@torch.inference_mode()
def compare(model: Any, rows: Rows) -> Counter[str]:
    """Count the answers' tokens, and those that are not what transformers takes after the same tokens."""
    counts = Counter[str]()
    rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    for begin in range(0, len(rows), 64):
        batch = rows[begin : begin + 64]
        width = max(len(prompt) + len(answer) for prompt, answer in batch)
        # Tokens see none behind them, so what fills a row up changes nothing.
        ids = torch.tensor([(p + a + [0] * width)[:width] for p, a in batch])
        logits = model(ids, use_cache=False).logits
        for row, (prompt, answer) in zip(logits, batch, strict=True):
            best = row[len(prompt) - 1 : len(prompt) + len(answer) - 1].topk(2)
            differs = best.indices[:, 0] != torch.tensor(answer, dtype=torch.long)
            is_near = best.values[:, 0] - best.values[:, 1] <= NEAR
            counts["tokens"] += len(answer)
            counts["differences"] += int((differs & ~is_near).sum())
            counts["near-ties"] += int((differs & is_near).sum())
    return counts


if __name__ == "__main__":
    main()
