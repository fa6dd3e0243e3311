"""A server whose engine computes nothing: one token for every stream at every tick, on one core.

python tests/server/stress/fake_server.py --port PORT [--tick-ms 100]
"""

import argparse
import asyncio
import math
import os
import time
from typing import cast

import server_process  # noqa: F401  (finds what benchmarks share)
from support.fake_engine import FakeEngine

from octavo.engine.engine import Engine
from octavo.server.app import make_app
from octavo.server.config import ServerConfig
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.serving import serve
from octavo.server.startup import url_of
from octavo.server.supervisor import READY


class TickingEngine(FakeEngine):
    """Steps at whole ticks of the clock, however long the step before took."""

    tokenizer = None

    def __init__(self, tick_s: float) -> None:
        super().__init__(0)
        self._tick_s = tick_s

    def step(self) -> None:
        now = time.monotonic()
        time.sleep(math.floor(now / self._tick_s + 1) * self._tick_s - now)
        super().step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tick-ms", type=float, default=100.0)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = ServerConfig(port=arguments.port, max_num_queued_reqs=4096)
    engine = TickingEngine(arguments.tick_ms / 1000)
    loop = EngineLoop(lambda: cast(Engine, engine), max_waiting=config.max_num_queued_reqs)
    gate = make_app(loop, config, "fake")

    def tell(kind: bytes) -> None:
        if kind == READY:
            print(f"is served at {url_of(config)}", flush=True)

    try:
        asyncio.run(serve(gate, loop, config, tell, gate))
    finally:
        loop.stop()


if __name__ == "__main__":
    main()
