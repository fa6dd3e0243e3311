"""The StepRunner of rank 0 where other ranks follow: it sends them each step, then runs its own share."""

import dataclasses
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from octavo.attention.plan.prefix_forest import Sharing
from octavo.config import EngineConfig
from octavo.engine.memory import ExecutionPlan, require_devices
from octavo.engine.ranks.followers import Followers
from octavo.engine.ranks.mirror import Checksum, SentMasks, StepWriter
from octavo.engine.ranks.rank_thread import RankThread
from octavo.engine.ranks.records import Begin, Met, Planned, Prepare, Prepared, Ready, Reset
from octavo.engine.request import Request
from octavo.engine.runner_setup import make_runner, read_decoder
from octavo.engine.step.result import LateWork, PrepareProgress, StepResult, StepRunner
from octavo.engine.step.scheduled import SchedulerOutput
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.models import ModelSource
from octavo.parallel import PeerLostError, TensorParallel, connect

Found = TypeVar("Found")

# How long connections may take to close.
_END_S = 5.0


class Ranks:
    """The other ranks' processes, and the thread that runs this rank's share. They start and end together."""

    def __init__(self, config: EngineConfig) -> None:
        """Start them all; the others begin to plan.

        Args:
            config: engine options.
        """
        self.size = config.tensor_parallel_size
        self.parallel = TensorParallel.not_met(0, self.size)
        self._pid = os.getpid()
        self.on_death: list[Callable[[OctavoError], None]] = []
        # Releases what keeps connections open, once there is something to release.
        self.release: Callable[[], None] | None = None
        self.thread = RankThread("octavo-rank-0")
        # Ranks on GPUs need threads, too, to load weights, all at the same time.
        num_threads = max(1, torch.get_num_threads() // self.size)
        if "OMP_NUM_THREADS" not in os.environ:
            self.thread.call(partial(torch.set_num_threads, num_threads))
        try:
            self.followers = Followers(dataclasses.asdict(config), self.size, num_threads, self._on_end)
        except BaseException:
            self.thread.stop()
            raise

    def run(self, act: Callable[[], Found]) -> Found:
        """Run a part of rank 0's share in its thread. An error there ends all ranks.

        Raises:
            OctavoError: what ended them.
        """
        return self.thread.call(partial(self._run, act))

    def stop(self) -> None:
        """End the other ranks and the thread. Idempotent. A process forked from this one ends nothing."""
        if os.getpid() != self._pid:
            return
        if self.thread.error is None:
            self.thread.fail(EngineDeadError("the engine was closed"))
        self.thread.stop()
        self.followers.end()
        self.parallel.abort()
        if self.release is not None:
            self.release()
        self.parallel.wait_for_end(_END_S)

    def _run(self, act: Callable[[], Found]) -> Found:
        try:
            return act()
        except PeerLostError as error:
            # Another rank has ended, and the watching thread says how.
            self.followers.wait_for_end()
            self.followers.end(EngineDeadError(f"rank 0 of {self.size} failed: {error}"))
            raise
        except BaseException as error:
            if isinstance(error, OctavoError) and self.followers.is_loading:
                self.followers.end(error)
            else:
                self.followers.end(EngineDeadError(f"rank 0 of {self.size} failed: {error!r}"))
            raise

    def _on_end(self, error: OctavoError) -> None:
        self.thread.fail(error)
        self.parallel.abort()
        for call in self.on_death:
            call(error)


class LeaderRunner:
    """StepRunner of rank 0.

    Attributes:
        plan: of rank 0, with the number of blocks that all ranks have.
    """

    def __init__(self, local: StepRunner, plan: ExecutionPlan, ranks: Ranks) -> None:
        """Take over ranks that are ready.

        Args:
            local: runs rank 0's share.
            plan: of rank 0.
            ranks: ended together with this object.
        """
        self.decoder = local.decoder
        self.kv_cache = local.kv_cache
        self.runs_ahead = local.runs_ahead
        self.plan = plan
        self._local = local
        self._ranks = ranks
        self._writer = StepWriter()
        self._checksum = Checksum()
        ranks.release = local.close
        self._end = weakref.finalize(self, ranks.stop)

    @property
    def error(self) -> OctavoError | None:
        """The error after which no step will ever run again, or None."""
        return self._ranks.thread.error

    @property
    def late_rank(self) -> int | None:
        """The rank that this one waits for, as it does not answer; None: all do. See Followers."""
        return self._ranks.followers.late_rank

    def when_dead(self, call: Callable[[OctavoError], None]) -> None:
        """Register a function to be called in another thread when a rank is gone, perhaps twice."""
        self._ranks.on_death.append(call)
        if self.error is not None:
            call(self.error)

    def prepare(self, progress: PrepareProgress) -> None:
        """See StepRunner."""
        # Threads that compile leave others little time to answer.
        self._ranks.followers.is_loading = True
        self._ranks.followers.send(Prepare())
        self._ranks.run(partial(self._local.prepare, progress))
        self._ranks.followers.gather(Prepared)
        self._ranks.followers.is_loading = False

    def note_ready(self) -> None:
        """See StepRunner."""
        self._local.note_ready()

    def late_work(self) -> LateWork:
        """See StepRunner."""
        return self._local.late_work()

    def sharing(self) -> Sharing:
        """See StepRunner; all ranks share alike, so this one answers."""
        return self._local.sharing()

    def launch(self, step: SchedulerOutput) -> Callable[[], StepResult]:
        """See StepRunner."""
        wait = self._ranks.run(partial(self._launch, step))
        return partial(self._ranks.run, partial(self._wait, wait))

    def has_finished(self) -> bool:
        """See StepRunner; this rank answers."""
        return self._local.has_finished()

    def release(self, request: Request) -> None:
        """See StepRunner."""
        self._ranks.thread.post(partial(self._release, request))

    def reset(self) -> None:
        """See StepRunner. A step that was broken off here has run to its end in the rank's thread."""
        self._ranks.run(self._reset)

    def close(self) -> None:
        """See StepRunner: all ranks end. It happens by itself when this object is gone."""
        self._end()

    def _launch(self, step: SchedulerOutput) -> Callable[[], StepResult]:
        self._ranks.followers.send(self._writer.write(step, self._checksum))
        return self._local.launch(step)

    def _wait(self, wait: Callable[[], StepResult]) -> StepResult:
        result = wait()
        self._checksum.add(result)
        return result

    def _release(self, request: Request) -> None:
        self._writer.release(request)
        self._local.release(request)

    def _reset(self) -> None:
        self._ranks.followers.send(Reset())
        self._writer.reset()
        self._checksum = Checksum()
        self._local.reset()


def start_ranks(
    source: ModelSource, plan: ExecutionPlan, progress: Callable[[int, int], None] | None
) -> LeaderRunner:
    """Start all ranks, let them meet and load, and return the runner of rank 0.

    Args:
        source: where the model is.
        plan: of rank 0.
        progress: called with (tensors loaded, tensors in all) of rank 0, in its thread; or None.

    Raises:
        ConfigError: there are too few GPUs, or this is not Linux.
        OctavoError: what a rank could not do; no rank is left.
    """
    require_devices(plan.device, plan.parallel)
    if sys.platform != "linux":
        raise ConfigError(f"tensor_parallel_size > 1 runs on Linux, this is {sys.platform}")
    ranks = Ranks(plan.config)
    try:
        num_blocks = min(plan.num_blocks, *(report.num_blocks for report in ranks.followers.gather(Planned)))
        ranks.parallel = _meet(ranks, plan, num_blocks)
        plan = dataclasses.replace(plan, parallel=ranks.parallel, num_blocks=num_blocks)
        masks = SentMasks(plan.model.vocab_size, plan.device, ranks.followers.send)
        local = ranks.run(lambda: make_runner(read_decoder(source, plan, progress), plan, masks))
        ranks.followers.gather(Ready)
        ranks.followers.is_loading = False
        return LeaderRunner(local, plan, ranks)
    except BaseException:
        ranks.stop()
        raise


def _meet(ranks: Ranks, plan: ExecutionPlan, num_blocks: int) -> TensorParallel:
    """Let all ranks meet through a file in a folder that only this user can open."""
    with tempfile.TemporaryDirectory(prefix="octavo-ranks-") as folder:
        rendezvous = Path(folder, "rendezvous")
        ranks.followers.send(Begin(num_blocks, str(rendezvous)))
        meet = partial(
            connect,
            rank=0,
            size=ranks.size,
            device=plan.device,
            rendezvous=rendezvous,
            shares_memory=plan.config.all_reduce == "auto",
            in_order=plan.config.deterministic,
        )
        parallel = ranks.run(meet)
        ranks.followers.gather(Met)
    return parallel
