"""The stream of snapshots: shared, at most five a second, only while somebody watches, and cheap."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable

import pytest
from loop_helpers import collect, pace, stop_after_a_step, until
from starlette.applications import Starlette
from starlette.types import Message

from octavo import SamplingParams
from octavo.errors import EngineDeadError
from octavo.server.api_errors import ApiError
from octavo.server.live import routes
from octavo.server.live.routes import MAX_WATCHERS, MIN_INTERVAL_S, Watch, page_routes
from octavo.server.live.snapshot import Snapshot
from octavo.server.loop.engine_loop import EngineLoop

StartLoop = Callable[..., EngineLoop]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def snapshot_of(event: bytes) -> dict:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event.removeprefix(b"data: "))


async def first_events(watch: Watch, count: int) -> list[bytes]:
    async with contextlib.aclosing(watch.events()) as events:
        return [await anext(events) for _ in range(count)]


def test_all_watchers_share_one_snapshot_and_none_is_made_without_them(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        watch = Watch(loop)
        await asyncio.sleep(0.05)
        assert watch.num_made == 0
        begun = time.monotonic()
        seen = await asyncio.gather(*(first_events(watch, 3) for _ in range(20)))
        seconds = time.monotonic() - begun
        assert all(events == seen[0] for events in seen)
        assert seconds >= 2 * MIN_INTERVAL_S - 0.02
        assert watch.num_watchers == 0
        made = watch.num_made
        assert made == 3
        await asyncio.sleep(2 * MIN_INTERVAL_S)
        assert watch.num_made == made
        # Somebody who comes at once when the last has left begins anew.
        assert snapshot_of((await first_events(watch, 1))[0])["state"] == "ready"
        assert len(await first_events(watch, 1)) == 1

    asyncio.run(run())


def test_it_follows_the_engine(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        watch = Watch(loop)
        assert snapshot_of((await first_events(watch, 1))[0])["state"] in ("loading", "ready")
        await loop.wait_until_ready()
        # Tokens that are read together with the first one have no time between them: these come later.
        go_on = await loop.call(stop_after_a_step)
        stream = await loop.submit([3, 4, 5, 6, 7], PARAMS, request_id="one")
        assert len((await anext(stream))[0].token_ids) == 1
        go_on.set()
        await collect(stream)
        seen = snapshot_of((await first_events(watch, 1))[0])
        assert seen["counts"]["output_tokens"] == 8
        assert seen["counts"]["finished"] == {"length": 1}
        assert sum(seen["first_token"]["counts"]) == 1
        assert sum(seen["inter_token"]["counts"]) == 7
        assert seen["pool"]["num_blocks"] == 64
        await asyncio.to_thread(loop.stop)

    asyncio.run(run())


def test_watchers_leave_when_a_server_that_ends_has_answered_all(start_loop: StartLoop) -> None:
    """Trap: the server waited for them until its shutdown timeout."""

    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        await loop.call(pace)
        watch = Watch(loop)
        stream = await loop.submit([3, 4, 5, 6, 7], PARAMS, request_id="one")
        async with contextlib.aclosing(watch.events()) as events:
            await anext(events)
            drained = asyncio.create_task(loop.drain(30))
            seen = [snapshot_of(event) async for event in events]
        assert stream.output.finished
        assert [each["state"] for each in seen[-2:]] == ["draining"] * 2
        assert len([snapshot_of(event) async for event in watch.events()]) <= 1
        await drained

    asyncio.run(run())


def test_a_dead_engine_is_shown_as_dead(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        watch = Watch(loop)
        async with contextlib.aclosing(watch.events()) as events:
            await anext(events)
            loop._worker.error = EngineDeadError("it is dead")
            event = b""
            while b"dead" not in event:
                event = await anext(events)
            assert snapshot_of(event).keys() == {"state", "time_s"}

    asyncio.run(run())


def test_the_interval_keeps_the_cost_below_a_thousandth(start_loop: StartLoop) -> None:
    watch = Watch(start_loop())
    assert watch.interval_s == MIN_INTERVAL_S
    watch.note_cost(0.1e-3, 0.2e-3)
    assert watch.interval_s == MIN_INTERVAL_S
    watch.note_cost(3e-3, 4e-3)
    assert watch.interval_s == pytest.approx(3.0)
    watch.note_cost(1e-3, 50e-3)
    assert watch.interval_s == pytest.approx(5.0)
    # Any series of costs stays within the share, but for the very last snapshot.
    watch, seconds = Watch(start_loop()), 0.0
    for number in range(500):
        watch.note_cost((number * 37 % 11) * 1e-4, 0.0)
        seconds += watch.interval_s
    assert watch.engine_s <= 1e-3 * seconds


def test_a_real_snapshot_of_a_busy_engine_costs_less_than_a_thousandth(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop(num_blocks=4096, max_num_seqs=32)
        await loop.wait_until_ready()
        params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        streams = [await loop.submit([*range(3, 60), 3 + n], params, request_id=str(n)) for n in range(32)]
        watch = Watch(loop)
        begun = time.monotonic()
        async with contextlib.aclosing(watch.events()) as events:
            while time.monotonic() - begun < 0.8:
                await anext(events)
            interval_s = watch.interval_s
        made = watch.num_made
        assert made >= 2
        # The last one's interval has yet to pass.
        seconds = time.monotonic() - begun + interval_s
        assert 0 < watch.engine_s < 1e-3 * seconds
        for stream in streams:
            stream.abort()

    asyncio.run(run())


def test_a_failure_ends_every_stream_and_the_next_watcher_tries_again(
    start_loop: StartLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        watch = Watch(loop)
        calls = []

        def look_once(engine: object) -> object:
            calls.append(engine)
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(routes, "look", look_once)
            ended = await asyncio.gather(*(_all_events(watch) for _ in range(3)))
        assert ended == [[], [], []]
        assert len(calls) == 1
        assert len(await first_events(watch, 1)) == 1

    asyncio.run(run())


async def _all_events(watch: Watch) -> list[bytes]:
    return [event async for event in watch.events()]


def test_the_route_streams_and_ends_with_its_client(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        app = Starlette(routes=page_routes(loop))
        sent: list[Message] = []
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            if len(sent) == 4:
                gone.set()

        scope = {"type": "http", "method": "GET", "path": "/live", "headers": [], "query_string": b""}
        await asyncio.wait_for(app(scope, receive, send), 60)
        headers = dict(sent[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"cache-control"] == b"no-store"
        assert headers[b"x-content-type-options"] == b"nosniff"
        assert snapshot_of(sent[1]["body"])["state"] == "ready"

    asyncio.run(run())


def test_a_client_that_never_reads_loses_its_place(
    start_loop: StartLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_WRITE_TIMEOUT_S", 0.05)

    async def for_ever(message: Message | None = None) -> Message:
        if message is not None and message["type"] == "http.response.start":
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        watch = Watch(loop)
        await asyncio.wait_for(watch.answer()({"type": "http"}, for_ever, for_ever), 60)
        assert watch.num_made == 1
        assert watch.num_watchers == 0

    asyncio.run(run())


def test_a_client_that_reads_nothing_is_sent_the_newest_and_costs_no_memory(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        watch = Watch(loop)
        async with contextlib.aclosing(watch.events()) as slow:
            await anext(slow)
            await until(lambda: watch.num_made >= 4)
            latest = watch._latest
            assert await anext(slow) == latest
        assert watch.num_watchers == 0
        assert watch._latest is None

    asyncio.run(run())


def test_too_many_watchers_are_refused(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        watch = Watch(loop)
        streams = [watch.events() for _ in range(MAX_WATCHERS)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        with pytest.raises(ApiError, match="too many watch") as refused:
            watch.answer()
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "10"})
        for stream in streams:
            await stream.aclose()
        assert watch.answer().status_code == 200

    asyncio.run(run())


def test_without_an_engine_only_the_state_is_sent() -> None:
    assert json.loads(Watch.encode(Snapshot("loading", 1.5)).removeprefix(b"data: ")) == {
        "state": "loading",
        "time_s": 1.5,
    }
