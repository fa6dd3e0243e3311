"""Runs batches one after the other, behind requests of clients that wait; goes on after a restart."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
from starlette.types import ASGIApp

from octavo.server.api.batches.store import BatchObject, Store
from octavo.server.batch import BatchError, BatchLine, BatchRequest, answer_request, read_batch, refused_url

# Requests of a batch that are under way at a time, and the priority of each.
_NUM_AT_ONCE, _PRIORITY = 64, 2**31 - 1
# Statuses of a server that is full or not ready: the request is sent again after a while, in seconds.
_LATER, _LATER_S = (429, 503), 1.0


class Runner:
    """Runs the batches of a store. For one event loop.

    Attributes:
        store: where batches are kept.
        gate: answers requests.
    """

    def __init__(self, store: Store, gate: ASGIApp) -> None:
        self.store = store
        self.gate = gate
        self._task: asyncio.Task[None] | None = None
        self._current: tuple[str, asyncio.Task[None]] | None = None
        # Batches whose end is written by `cancel`.
        self._cancelled: set[str] = set()

    def wake(self) -> None:
        """Run what there is to run, unless it runs already."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def cancel(self, holder: str, batch: BatchObject) -> BatchObject:
        """End a batch; what was answered before is kept."""
        self._cancelled.add(batch.id)
        if self._current is not None and self._current[0] == batch.id:
            self._current[1].cancel()
            await asyncio.wait((self._current[1],))
        batch = self.store.get(holder, batch.id, BatchObject)
        if not batch.is_over:
            batch.turn("cancelling")
            batch.turn("cancelled")
            self._finish(holder, batch)
        return batch

    def close(self) -> None:
        """Stop; a batch that is under way goes on when the server starts again."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            found = await asyncio.to_thread(self.store.keys, BatchObject, lambda _, batch: not batch.is_over)
            # What the disk says is over need not be remembered.
            self._cancelled &= {key.id for key in found}
            open_ones = [key for key in found if key.id not in self._cancelled]
            if not open_ones:
                return
            holder = open_ones[-1].holder
            batch = self.store.get(holder, open_ones[-1].id, BatchObject)
            task = asyncio.ensure_future(self._answer(holder, batch))
            self._current = batch.id, task
            try:
                await asyncio.wait((task,))
            finally:
                task.cancel()
                self._current = None
            if not task.cancelled() and (error := task.exception()) is not None:
                # The whole text of an OSError would tell the server's folder.
                text = f"a file: {error.strerror}" if isinstance(error, OSError) else str(error)
                batch.errors = _errors(text or type(error).__name__)
                batch.turn("failed")
                self._finish(holder, batch)

    async def _answer(self, holder: str, batch: BatchObject) -> None:
        """Answer all lines of a batch that have no answer yet."""
        lines = await asyncio.to_thread(self._lines, batch)
        if not any(isinstance(line, BatchRequest) for line in lines):
            wrong = [line.error.message for line in lines if isinstance(line, BatchLine) and line.error]
            raise RuntimeError("; ".join(["the input file holds no request", *wrong[:10]]))
        await asyncio.to_thread(self.store.check_room)
        batch.turn("in_progress")
        batch.request_counts.total = len(lines)
        done = await asyncio.to_thread(self._answered, batch)
        self.store.save(holder, batch)
        turns = asyncio.Semaphore(_NUM_AT_ONCE)
        left = [line for line in lines if isinstance(line, BatchLine) or line.custom_id not in done]
        tasks = [asyncio.ensure_future(self._answer_line(holder, batch, line, turns)) for line in left]
        try:
            with self._part(batch, "out").open("ab") as out, self._part(batch, "err").open("ab") as errors:
                for coming in asyncio.as_completed(tasks):
                    self._note(holder, batch, await coming, out, errors)
        finally:
            for task in tasks:
                task.cancel()
        batch.turn("finalizing")
        batch.turn("expired" if time.time() > batch.expires_at else "completed")
        self._finish(holder, batch)

    def _note(
        self, holder: str, batch: BatchObject, line: BatchLine, out: BinaryIO, errors: BinaryIO
    ) -> None:
        file = out if line.is_answered else errors
        file.write(msgspec.json.encode(line) + b"\n")
        file.flush()
        batch.request_counts.completed += line.is_answered
        batch.request_counts.failed += not line.is_answered
        self.store.save(holder, batch)

    async def _answer_line(
        self, holder: str, batch: BatchObject, line: BatchRequest | BatchLine, turns: asyncio.Semaphore
    ) -> BatchLine:
        if isinstance(line, BatchLine):
            return line
        async with turns:
            while time.time() < batch.expires_at:
                found = await answer_request(self.gate, line, holder, _PRIORITY)
                if not _may_succeed_later(found):
                    return found
                await asyncio.sleep(_LATER_S)
        error = BatchError(code="batch_expired", message="the batch's time was over before this request ran")
        return BatchLine(id=f"batch_req_{line.custom_id}", custom_id=line.custom_id, error=error)

    def _lines(self, batch: BatchObject) -> Sequence[BatchRequest | BatchLine]:
        lines = read_batch(self.store.path(batch.input_file_id))
        return [
            refused_url(line, batch.endpoint)
            if isinstance(line, BatchRequest) and line.url != batch.endpoint
            else line
            for line in lines
        ]

    def _answered(self, batch: BatchObject) -> set[str | None]:
        """Return the lines that a run before a restart has answered, and forget a line written halfway."""
        done: set[str | None] = set()
        counts, batch.request_counts.failed = batch.request_counts, 0
        # The answers may be far larger than memory.
        with self._part(batch, "out").open("a+b") as file:
            num_bytes = file.seek(0)
            with suppress(msgspec.MsgspecError):
                for line in file:
                    custom_id = msgspec.json.decode(line, type=BatchLine).custom_id
                    if line.endswith(b"\n"):
                        done.add(custom_id)
                        num_bytes += len(line)
            file.truncate(num_bytes)
        # Lines with errors are tried again.
        self._part(batch, "err").write_bytes(b"")
        counts.completed = len(done)
        return done

    def _part(self, batch: BatchObject, which: str) -> Path:
        return self.store.path(f"{batch.id}.{which}")

    def _finish(self, holder: str, batch: BatchObject) -> None:
        """Keep the answers as files."""
        for which, field in (("out", "output_file_id"), ("err", "error_file_id")):
            path = self._part(batch, which)
            if path.exists() and path.stat().st_size:
                file = self.store.adopt(holder, f"{batch.id}_{which}.jsonl", "batch_output", path)
                setattr(batch, field, file.id)
            path.unlink(missing_ok=True)
        self.store.save(holder, batch)


def _may_succeed_later(line: BatchLine) -> bool:
    """Return whether a server that is full, not ready or about to be restarted has refused a line."""
    if line.response is None:
        return False
    status = line.response.status_code
    return status in _LATER or (status == 500 and b"engine_dead" in bytes(line.response.body))


def _errors(message: str) -> dict[str, object]:
    return {
        "object": "list",
        "data": [{"code": "invalid_batch", "message": message, "line": None, "param": None}],
    }
