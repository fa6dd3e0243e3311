"""However a rank ends, all end, soon, with one error that says how; and nothing is left behind."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from ranks_helpers import OPTIONS, command_of, eventually, other_ranks

from octavo import LLM, EngineConfig, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.ranks.follower import _Steps
from octavo.engine.ranks.followers import Followers
from octavo.engine.ranks.records import Step
from octavo.errors import ConfigError, EngineDeadError, EngineError, OctavoError

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def start(tiny_folder: Path) -> Iterator[Callable[..., tuple[LLM, int]]]:
    """Start an engine with two ranks; return it and the other rank's process id."""
    started: list[LLM] = []

    def run(**options: object) -> tuple[LLM, int]:
        before = other_ranks()
        started.append(LLM(str(tiny_folder), **{**OPTIONS, "tensor_parallel_size": 2, **options}))
        (pid,) = set(other_ranks()) - set(before)
        return started[-1], pid

    yield run
    for llm in started:
        llm.engine.close()


def test_a_rank_killed_in_a_step_and_one_killed_idle_beside_it(
    start: Callable[..., tuple[LLM, int]],
) -> None:
    """Two engines side by side: what ends one of them does nothing to the other."""
    llm, pid = start()
    other, other_pid = start()
    expected = [output.outputs[0].token_ids for output in other.generate([[5], [6]], SHORT)]
    stream = llm.stream([5, 8], LONG)
    next(stream)
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 was killed by SIGKILL$"):
        list(stream)
    assert time.monotonic() - begun < 10
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            llm.generate([5], SHORT)
    assert other_ranks() == [other_pid]
    assert [output.outputs[0].token_ids for output in other.generate([[5], [6]], SHORT)] == expected

    assert other.engine.error is None
    os.kill(other_pid, signal.SIGKILL)
    eventually(lambda: other.engine.error, seconds=5)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        other.generate([5], SHORT)


def test_a_rank_killed_while_it_loads(tiny_folder: Path) -> None:
    def kill() -> None:
        eventually(other_ranks)
        os.kill(other_ranks()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed by SIGKILL"):
        LLM(str(tiny_folder), **OPTIONS, tensor_parallel_size=2)
    killer.join()


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(1.0, "rank 1 of 2 was killed by SIGKILL"), (60.0, "rank 1 of 2 is gone, but its process did not end")],
)
def test_a_rank_that_takes_long_to_end(seconds: float, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with a GPU does: its wires are closed long before it can be said how it ended."""
    start_process = subprocess.Popen
    slow = f"import os, time; os.closerange(3, 1000); time.sleep({seconds}); os.kill(os.getpid(), 9)"

    def start_slow(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        return start_process([sys.executable, "-c", slow, *command[4:]], **options)

    monkeypatch.setattr(subprocess, "Popen", start_slow)
    monkeypatch.setattr("octavo.engine.ranks.followers._KILL_S", 2.5)
    errors: SimpleQueue[OctavoError] = SimpleQueue()
    Followers({}, 2, 1, errors.put)
    assert str(errors.get(timeout=20)).startswith(message)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_late_within_a_second_and_may_come_back(
    start: Callable[..., tuple[LLM, int]],
) -> None:
    llm, pid = start()
    expected = [output.outputs[0].token_ids for output in llm.generate([[5, 8]], SHORT)]
    assert llm.engine.late_rank is None
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: llm.engine.late_rank == 1, seconds=1.0)
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: llm.engine.late_rank is None, seconds=2.0)
    assert [output.outputs[0].token_ids for output in llm.generate([[5, 8]], SHORT)] == expected


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_given_up(start: Callable[..., tuple[LLM, int]]) -> None:
    llm, pid = start()
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 of 2 has not answered for 6 s"):
        llm.generate([5, 8], LONG)
    assert time.monotonic() - begun < 10
    assert not other_ranks()


@pytest.mark.slow
def test_no_rank_is_late_on_a_busy_machine(start: Callable[..., tuple[LLM, int]]) -> None:
    """Four neighbours take all the time that they get; long steps are no silence."""
    llm, _ = start(num_blocks=4096, max_num_batched_tokens=16384)
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    late, is_over = [], threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            late.append(llm.engine.late_rank)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        begun = time.monotonic()
        while time.monotonic() - begun < 10:
            llm.generate([[number + i % 60 for i in range(500)] for number in range(32)], SHORT)
            time.sleep(0.1)
    finally:
        is_over.set()
        looking.join()
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert len(late) > 100
    assert set(late) == {None}


def test_a_rank_without_memory_says_so(start: Callable[..., tuple[LLM, int]]) -> None:
    llm, pid = start(num_blocks=4096, max_num_batched_tokens=16384)
    llm.generate([5, 8], SHORT)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**20
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    prompts = [[number + i % 60 for i in range(500)] for number in range(32)]
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 failed: .*(memory|Memory)"):
        llm.generate(prompts, SHORT)


@pytest.mark.parametrize("moment", ["load", "step"])
def test_one_rank_alone_without_memory_ends_all_in_its_own_words(
    moment: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "now"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("short_of_memory")))
    monkeypatch.setenv("SHORT_OF_MEMORY", "load" if moment == "load" else str(flag))
    message = r"^rank 1 of 2 failed: .*Tried to allocate 7 GiB, as this test asks for"

    def run() -> None:
        llm = LLM(str(tiny_folder), **OPTIONS, tensor_parallel_size=2)
        assert moment == "step"
        llm.generate([5, 8], SHORT)
        flag.touch()
        llm.generate([5, 8], SHORT)

    with pytest.raises(EngineDeadError, match=message):
        run()
    eventually(lambda: not other_ranks())


def test_ranks_that_disagree_are_found() -> None:
    steps = _Steps(None, 4)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="this rank sampled other tokens than rank 0 within 0 steps"):
        steps._step(Step([], [], [], [], num_steps=0, checksum=1))


def test_what_fails_in_this_rank_ends_the_others(
    start: Callable[..., tuple[LLM, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = start()

    def fails(*_: object) -> None:
        raise ValueError("a broken device")

    monkeypatch.setattr(type(llm.engine.runner._local), "_forward", fails)  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match=r"rank 0 of 2 failed: ValueError\('a broken device'\)"):
        llm.generate([5, 8], SHORT)
    eventually(lambda: not other_ranks())


@pytest.mark.slow
def test_an_engine_that_is_dropped_ends_its_ranks(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), **OPTIONS, tensor_parallel_size=2)
    llm.generate([5, 8], SHORT)
    assert other_ranks()
    del llm
    eventually(lambda: not other_ranks())


def test_a_process_that_is_killed_leaves_no_rank(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo", "bench", "--model", str(tiny_folder), "-tp", "2"]
    command += ["--load-format", "dummy", "--num-blocks", "64", "--device", "cpu"]
    command += ["--max-model-len", "512", "--input-len", "8", "--output-len", "400", "--num-prompts", "2000"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: other_ranks(process.pid), seconds=60)
        (rank,) = other_ranks(process.pid)
        # It may load or run a step by now; both must end.
        time.sleep(1)
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not command_of(rank))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "3 ranks must divide the model's 4 attention heads"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a positive integer"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size must be a positive integer"),
        ({"deterministic": True}, "deterministic=True runs by the Triton kernels for NVIDIA GPUs"),
        ({"deterministic": True, "all_reduce": "nccl"}, "several ranks needs all_reduce='auto', got 'nccl'"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_rank_starts(
    tiny_folder: Path, options: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_folder), **{**OPTIONS, "tensor_parallel_size": 2, **options})


def test_an_engine_makes_all_ranks_itself(tiny_folder: Path) -> None:
    one = LLM(str(tiny_folder), **OPTIONS)
    config = EngineConfig.from_dict({"model": str(tiny_folder), **OPTIONS, "tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="an engine makes all ranks' decoders itself"):
        Engine(config, decoder=one.engine.runner.decoder)
