"""What the front of `octavo serve --replicas` adds to a request: the same chats with and without it.

Streams of one token of a small random model, alternately straight to a replica's unix socket and through the
front, which reads the request, chooses and proxies. What is measured is the time to the first event.

    python benchmarks/replica_latency.py MODEL [--requests 300] [--chars 500 8000 32000] [--save MACHINE]

MODEL is a folder with config.json and a tokenizer; weights are random. The last line is JSON.
"""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from support.common import make_parser, publish, table

PATH = "/v1/chat/completions"


async def first_event_s(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Return the seconds from a request to its first event; read the rest."""
    begun = time.perf_counter()
    async with session.post(url + PATH, json=body) as answer:
        answer.raise_for_status()
        await answer.content.readany()
        seconds = time.perf_counter() - begun
        await answer.read()
    return seconds


async def measure(front: str, replica: Path, num_requests: int, num_chars: int) -> dict[str, float]:
    """Return medians and 99th percentiles in milliseconds, of requests that are sent one after the other."""
    times: dict[str, list[float]] = {"direct": [], "front": []}
    straight = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(replica)))
    async with straight, aiohttp.ClientSession() as through:
        for number in range(num_requests):
            # A question of its own each, behind text that the replica has: what is left is the way there.
            content = "word " * (num_chars // 5) + str(number // 2)
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "stream": True}
            times["direct"].append(await first_event_s(straight, "http://localhost", body))
            times["front"].append(await first_event_s(through, front, body))
    found: dict[str, float] = {"chars": num_chars}
    for name, values in times.items():
        kept = sorted(values[10:])
        found[f"{name}_p50_ms"] = kept[len(kept) // 2] * 1e3
        found[f"{name}_p99_ms"] = kept[len(kept) * 99 // 100] * 1e3
    return found | {"added_p50_ms": found["front_p50_ms"] - found["direct_p50_ms"]}


def main() -> None:
    """Serve, measure, and end what was started."""
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--chars", type=int, nargs="+", default=[500, 8000, 32000])
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", arguments.model, "--load-format", "dummy"]
    command += ["--replicas", "2", "--port", str(port)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()
                (replica,) = Path(folder).glob("octavo-*/0.sock")
                for chars in arguments.chars:
                    row = measure(f"http://127.0.0.1:{port}", replica, arguments.requests, chars)
                    rows.append(asyncio.run(row))
            finally:
                server.terminate()
    print(table(list(rows[0]), [[f"{value:.2f}" for value in row.values()] for row in rows]))
    publish("replica_latency", {"rows": rows}, arguments)


if __name__ == "__main__":
    main()
