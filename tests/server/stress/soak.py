"""Thousands of requests and visits of all routes: memory must not grow, files and blocks must come back.

A second server has a model that embeds. Memory is fitted by a line after warm-up; growth is what a thousand
requests add.

    python tests/server/stress/soak.py [--requests 10000] [--save MACHINE]
"""

import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from server_process import ServerProcess
from soak_routes import POOLED_VISITS, VISITS, HasLeft, Visit, Visitor, delete_files
from stream_client import CHAT, RESPONSES, TEXT, chat, post
from stress_report import make_parser, report, slope

NUM_AT_ONCE, NUM_TEXTS = 16, 300
# The share of requests before memory counts: caches and pools fill.
WARM_UP = 0.3
MAX_GROWTH_MB = 1.0
# The store is full within the warm-up.
OPTIONS = ("--num-blocks", "512", "--served-model-name", "tiny", "--response-store-mib", "1")
EMBEDS = ("--num-blocks", "512", "--served-model-name", "tiny", "--task", "embed")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ServerProcess(*OPTIONS, "--batch-dir", folder) as server:
        figures = measure(server, arguments.requests, VISITS)
    with ServerProcess(*EMBEDS) as server:
        pooled = measure(server, arguments.requests // 4, POOLED_VISITS)
    failures = [*figures["failures"], *(f"embeds: {failure}" for failure in pooled["failures"])]
    all_figures = {**figures, **{f"embeds_{name}": value for name, value in pooled.items()}}
    return report("soak", {**all_figures, "failures": failures}, arguments)


def measure(server: ServerProcess, num_requests: int, visits: Mapping[str, Visit]) -> dict[str, Any]:
    """Make so many requests or visits in rounds of a fiftieth; return memory, files and blocks after each."""
    per_round = max(1, num_requests // 50)
    rows, failures = [], []
    for begin in range(0, num_requests, per_round):
        end = min(begin + per_round, num_requests)
        failures += asyncio.run(_round(server.port, range(begin, end), visits))
        failures += [f"after {end} requests left: {left}" for left in [server.leftovers()] if left]
        rows.append([end, server.rss_bytes() / 1e6, server.num_files()])
    warm = [row for row in rows if row[0] > WARM_UP * num_requests]
    growth_mb = slope([(end / 1000, megabytes) for end, megabytes, _ in warm])
    files = [num_files for _, _, num_files in warm]
    if growth_mb > MAX_GROWTH_MB:
        failures.append(f"memory grows by {growth_mb:.2f} MB in 1,000 requests")
    failures += [f"{server.num_failed()} answers had a status of 500 or more"] if server.num_failed() else []
    if max(files) - min(files) > NUM_AT_ONCE or files[-1] > files[0] + 2:
        failures.append(f"open files: {files}")
    return {
        "requests": num_requests,
        "mb_per_1000_requests": growth_mb,
        "rss_mb_warm": warm[0][1],
        "rss_mb_end": warm[-1][1],
        "files_warm": files[0],
        "files_end": files[-1],
        "rounds": rows,
        "failures": failures,
    }


async def _round(port: int, numbers: range, visits: Mapping[str, Visit]) -> list[str]:
    failures: list[str] = []
    turns = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(number: int) -> None:
        async with turns:
            try:
                await _act(port, random.Random(number), visits)
            except (AssertionError, OSError, TimeoutError) as error:
                failures.append(f"request {number}: {error!r}")

    await asyncio.gather(*map(one, numbers))
    if "batches" in visits:
        await delete_files(port)
    return failures


async def _act(port: int, rng: random.Random, visits: Mapping[str, Visit]) -> None:
    if visits is VISITS and rng.random() < 0.5:
        return await _request(port, rng)
    with contextlib.suppress(HasLeft):
        # A visit makes further texts of its own, and of answers, which are the same ones each time.
        await rng.choice([*visits.values()])(Visitor(port, rng, f"{rng.randrange(NUM_TEXTS // 10)} 😀"))


def _text(rng: random.Random) -> str:
    """Return one of as many texts as repeat within the warm-up: caches keep thousands of texts."""
    return f"{'shared words ' * rng.randrange(4)}{rng.randrange(NUM_TEXTS)} 😀"


async def _request(port: int, rng: random.Random) -> None:
    """Any kind of request: whole, streamed, cut, wrong, with log-probabilities, with a grammar."""
    seed, num_tokens, text = rng.randrange(NUM_TEXTS), rng.randrange(1, 12), _text(rng)
    fields: dict[str, Any] = {"max_tokens": num_tokens, "seed": seed}
    path, body, status = rng.choice(
        [
            (CHAT, chat(text, **fields), 200),
            (CHAT, chat(text, **fields, logprobs=True, top_logprobs=2, n=2), 200),
            (CHAT, chat(text, **fields, response_format={"type": "json_object"}), 200),
            (CHAT, chat(text, **fields, top_p=7), 400),
            (CHAT, chat(text, **fields, structured_outputs={"regex": f"({seed}"}), 400),
            (TEXT, {"prompt": text, **fields}, 200),
            (TEXT, {"prompt": [text, "b"], **fields, "echo": True, "logprobs": 1}, 200),
            (RESPONSES, {"input": text, "max_output_tokens": num_tokens}, 200),
            ("/tokenize", {"prompt": text}, 200),
            ("/nowhere", {}, 404),
        ]
    )
    can_stream = path in (CHAT, TEXT, RESPONSES) and status == 200 and "echo" not in body
    if can_stream and rng.random() < 0.5:
        body = {**body, "stream": True}
    answer = await post(port, path, body)
    try:
        assert answer.status == status, (answer.status, body)
        if rng.random() < 0.9:
            await answer.body()
    finally:
        answer.cut()


if __name__ == "__main__":
    sys.exit(main())
