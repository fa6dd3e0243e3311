"""A thousand streams of 10 tokens/s each from one core: how evenly tokens reach their clients.

python tests/server/stress/ticks.py [--streams 1000] [--tokens 300] [--tick-ms 100] [--save MACHINE]
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from server_process import ServerProcess
from stream_client import HANG_S, TEXT
from stress_report import make_parser, percentile, report

# Streams begin in groups, as a queue of connections that is full drops new ones.
GROUP, BETWEEN_GROUPS_S = 50, 0.05
LIMIT = 1.5


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--tick-ms", type=float, default=100.0)
    arguments = parser.parse_args()
    figures = measure(arguments.streams, arguments.tokens, arguments.tick_ms)
    return report("ticks", figures, arguments)


def measure(num_streams: int, num_tokens: int, tick_ms: float) -> dict[str, Any]:
    """Read so many streams side by side; return gaps between tokens in ms, and failures."""
    script = Path(__file__).with_name("fake_server.py")
    with ServerProcess("--tick-ms", str(tick_ms), script=script) as server:
        files_before = server.num_files()
        gaps, failures = asyncio.run(read_all(server.port, num_streams, num_tokens))
        cpu_s = server.cpu_s()
        rss = server.rss_bytes()
        files_after = server.num_files()
    p99_ms = percentile(gaps, 99) * 1e3
    if p99_ms > LIMIT * tick_ms:
        failures.append(f"ITL p99 is {p99_ms:.1f} ms, the tick {tick_ms:g} ms")
    return {
        "streams": num_streams,
        "tokens": num_streams * num_tokens,
        "tick_ms": tick_ms,
        "errors": sum("stream" in text for text in failures),
        "itl_p50_ms": percentile(gaps, 50) * 1e3,
        "itl_p99_ms": p99_ms,
        "itl_max_ms": max(gaps, default=0.0) * 1e3,
        "server_cpu_s": cpu_s,
        "server_rss_mb": rss / 1e6,
        "files_before": files_before,
        "files_after": files_after,
        "failures": failures,
    }


async def read_all(port: int, num_streams: int, num_tokens: int) -> tuple[list[float], list[str]]:
    """Read streams side by side; return the seconds between tokens, and failures."""
    gaps: list[float] = []
    failures: list[str] = []

    async def client(number: int) -> None:
        await asyncio.sleep(number // GROUP * BETWEEN_GROUPS_S)
        try:
            await _read(port, num_tokens, gaps)
        except (AssertionError, OSError, TimeoutError) as error:
            failures.append(f"stream {number}: {error!r}")

    await asyncio.gather(*map(client, range(num_streams)))
    return gaps, failures


class _Reader(asyncio.Protocol):
    """Reads one stream for less CPU than any client: it only looks for words and for the end."""

    def __init__(self, request: bytes, gaps: list[float]) -> None:
        self._request, self._gaps = request, gaps
        self._before_s, self._last = 0.0, b""
        self.num_words = 0
        self.head = b""
        self.ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.head = self.head or data[:12]
        if num_new := data.count(b" word"):
            if self._before_s:
                # Words that come together took as long as the first of them, and nothing.
                self._gaps += [now - self._before_s, *[0.0] * (num_new - 1)]
            self._before_s = now
            self.num_words += num_new
        self._last = (self._last + data)[-20:]
        if self._last.endswith(b"0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(self._last)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the stream ended in the middle"))


async def _read(port: int, num_tokens: int, gaps: list[float]) -> None:
    body = json.dumps({"prompt": [5], "max_tokens": num_tokens, "stream": True})
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    events = asyncio.get_running_loop()
    transport, reader = await events.create_connection(lambda: _Reader(request, gaps), "127.0.0.1", port)
    try:
        last = await asyncio.wait_for(reader.ended, HANG_S + num_tokens)
        assert reader.head == b"HTTP/1.1 200", reader.head
        assert reader.num_words == num_tokens, reader.num_words
        assert b"[DONE]" in last, last
    finally:
        transport.abort()


if __name__ == "__main__":
    sys.exit(main())
