"""Kills ranks of engines at random moments, many times: `python tests/parallel/kill_ranks.py --rounds 20`.

Each round starts an engine with four ranks and kills one of the others in a step, idle, or while it loads.
All ranks must be gone within ten seconds, and the error must name the right one.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ranks_helpers import OPTIONS, eventually, other_ranks
from tiny_model import TINY_LLAMA

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError

NUM_RANKS = 4
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def kill(number: signal.Signals, rank: int, after_s: float) -> threading.Thread:
    """Kill a rank after a while, once all have started."""

    def run() -> None:
        eventually(lambda: len(other_ranks()) == NUM_RANKS - 1, 60)
        pids = other_ranks()
        time.sleep(after_s)
        os.kill(pids[rank - 1], number)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def run_round(folder: Path, rng: random.Random, moment: str) -> str:
    """Start, kill, and return what the error says."""
    rank, number = rng.randrange(1, NUM_RANKS), rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
    killer = None
    if moment == "loading":
        killer = kill(number, rank, rng.uniform(0, 8))
    try:
        llm = LLM(str(folder), **OPTIONS, tensor_parallel_size=NUM_RANKS)
        if moment == "step":
            killer = kill(number, rank, rng.uniform(0, 1))
        elif moment == "idle":
            killer = kill(number, rank, 0.0)
            eventually(lambda: llm.engine.error)
        while True:
            llm.generate([[5, 8], [7]] * 4, LONG)
    except EngineDeadError as error:
        found = str(error)
    assert killer is not None
    killer.join()
    eventually(lambda: not other_ranks())
    expected = f"rank {rank} of {NUM_RANKS} was killed by {number.name}"
    assert found == expected, f"{found!r}, expected {expected!r}"
    return found


def main() -> None:
    """Run the rounds and say how many went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_LLAMA))
        for number in range(arguments.rounds):
            moment = ("step", "loading", "step", "idle")[number % 4]
            begun = time.monotonic()
            said = run_round(Path(folder), rng, moment)
            print(f"{number + 1}/{arguments.rounds} {moment}: {said} ({time.monotonic() - begun:.1f} s)")


if __name__ == "__main__":
    main()
