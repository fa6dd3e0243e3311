"""A process of rank 1, 2, ...: it runs its share of what rank 0 runs.

Run as `python -m octavo.engine.ranks.follower`; see Followers.
"""

import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from octavo.config import EngineConfig
from octavo.engine.memory import ExecutionPlan
from octavo.engine.ranks.mirror import Checksum, ReceivedMasks, StepReader, require_equal
from octavo.engine.ranks.records import (
    Begin,
    Failed,
    Masks,
    Met,
    Planned,
    Prepare,
    Prepared,
    Ready,
    Record,
    RecordWire,
    ReportWire,
    Reset,
    Setup,
    Step,
)
from octavo.engine.runner_setup import make_runner, plan_model, read_decoder
from octavo.engine.step.result import StepResult, StepRunner
from octavo.errors import EngineError, OctavoError
from octavo.kv import CacheLayout
from octavo.parallel import PeerLostError, TensorParallel, connect

logger = logging.getLogger(__name__)

Wanted = TypeVar("Wanted", bound=Record)

# How often to check that rank 0's process still exists while no ping arrives.
_LOOK_S = 2.0


class _Left(Exception):
    """Rank 0 has closed the wires."""


def main(arguments: list[str]) -> None:
    """Run one rank until rank 0 ends.

    Args:
        arguments: file descriptors of the connections for records and reports, and rank 0's process id.
    """
    # Rank 0 logs the same warnings.
    logging.getLogger("octavo").setLevel(logging.ERROR)
    connections = [socket.socket(fileno=int(number)) for number in arguments[:2]]
    records, reports = RecordWire(connections[0]), ReportWire(connections[1])
    threading.Thread(target=_answer_pings, args=(reports, int(arguments[2])), daemon=True).start()
    try:
        _follow(records, reports)
    except _Left:
        return
    except BaseException as error:
        _report(reports, error)
        sys.stderr.flush()
        # Threads of PyTorch and of collectives may never end.
        os._exit(1)


def _answer_pings(reports: ReportWire, parent: int) -> None:
    """Answer rank 0's pings; end this process when rank 0's has ended, even if that left the wires open."""
    reports.connection.settimeout(_LOOK_S)
    while True:
        try:
            if not reports.receive():
                break
            reports.ping()
        except TimeoutError:
            if os.getppid() != parent:
                break
        except OSError:
            break
    os._exit(1)


def _report(reports: ReportWire, error: BaseException) -> None:
    """Tell rank 0 why this rank ends."""
    is_echo = isinstance(error, PeerLostError)
    is_known = isinstance(error, OctavoError)
    if not is_known:
        logger.error("a rank failed", exc_info=error)
    message = str(error) if is_known else repr(error)
    try:
        reports.send(Failed(type(error).__name__ if is_known and not is_echo else "", message, is_echo))
    except OSError:
        logger.error("rank 0 has ended; this rank failed, too: %s", message)


def _follow(records: RecordWire, reports: ReportWire) -> None:
    setup = _receive(records, Setup)
    config = EngineConfig.from_dict(setup.config)
    source, plan = plan_model(config, TensorParallel.not_met(setup.rank, setup.size))
    _choose_device(plan)
    reports.send(Planned(plan.num_blocks))
    begin = _receive(records, Begin)
    parallel = connect(
        setup.rank,
        setup.size,
        plan.device,
        Path(begin.rendezvous),
        shares_memory=config.all_reduce == "auto",
        in_order=config.deterministic,
    )
    reports.send(Met())
    plan = replace(plan, parallel=parallel, num_blocks=begin.num_blocks)
    masks = ReceivedMasks(plan.model.vocab_size, plan.device, lambda: _receive(records, Masks))
    runner = make_runner(read_decoder(source, plan, None), plan, masks)
    reports.send(Ready())
    _Steps(runner, plan.layout).run(records, reports)


def _choose_device(plan: ExecutionPlan) -> None:
    """Make the rank's GPU the current device."""
    if plan.device.type == "cuda":
        import torch

        torch.cuda.set_device(plan.device)


class _Steps:
    """Runs the steps that rank 0 sends."""

    def __init__(self, runner: StepRunner, layout: CacheLayout) -> None:
        self._runner = runner
        self._reader = StepReader(layout)
        self._checksum = Checksum()
        # Steps launched whose tokens are not in the checksum, oldest first.
        self._in_flight: deque[Callable[[], StepResult]] = deque()

    def run(self, records: RecordWire, reports: ReportWire) -> None:
        """Handle records until rank 0 closes the wires."""
        while True:
            match records.receive():
                case Step() as record:
                    self._step(record)
                case Reset():
                    self._reset()
                case Prepare():
                    self._runner.prepare(lambda *_: None)
                    reports.send(Prepared())
                case None:
                    return
                case record:
                    raise EngineError(f"rank 0 sent {type(record).__name__} between two steps")

    def _step(self, record: Step) -> None:
        for number in record.released:
            self._runner.release(self._reader.release(number))
        self._wait_for(len(self._in_flight) + self._checksum.num_steps - record.num_steps)
        require_equal(self._checksum, record)
        self._in_flight.append(self._runner.launch(self._reader.read(record)))
        self._wait_for(1 if self._runner.runs_ahead else 0)

    def _wait_for(self, num_left: int) -> None:
        """Wait for the oldest steps until at most so many are in flight."""
        while len(self._in_flight) > max(0, num_left):
            self._checksum.add(self._in_flight.popleft()())

    def _reset(self) -> None:
        self._in_flight.clear()
        self._checksum = Checksum()
        self._reader.reset()
        self._runner.reset()


def _receive(records: RecordWire, kind: type[Wanted]) -> Wanted:
    """Wait for the next record, which must be of this kind."""
    record = records.receive()
    if record is None:
        raise _Left
    if not isinstance(record, kind):
        raise EngineError(f"rank 0 sent {type(record).__name__}, expected {kind.__name__}")
    return record


if __name__ == "__main__":
    main(sys.argv[1:])
