"""Who a request comes from, as far as shares and turns are concerned."""

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from octavo.server.api_errors import ApiError
from octavo.server.config import ServerConfig
from octavo.server.entry.bodies import BodyBudget, Upload, UploadBudget
from octavo.server.entry.door import Door
from octavo.server.replicas.reporting import ReportingApp

KEYS = ("sk-0123456789abcdef", "sk-fedcba9876543210")


def sender(client: Any, key: str = "", config: ServerConfig | None = None) -> bytes:
    headers = [(b"host", b"localhost")] + [(b"x-api-key", key.encode())] * bool(key)
    scope = {"method": "POST", "path": "/v1/completions", "client": client, "headers": headers}
    Door(config or ServerConfig()).check(scope, scope["path"], dict(headers))
    return scope["octavo.sender"]


def test_a_sender_is_a_key_or_else_an_address() -> None:
    assert sender(("10.0.0.1", 5)) == sender(("10.0.0.1", 6)) != sender(("10.0.0.2", 5))
    assert sender(("::ffff:10.0.0.1", 5)) == sender(("10.0.0.1", 5))
    # One client may have all addresses of a network.
    assert (
        sender(("2001:db8:1:2::1", 5))
        == sender(("2001:db8:1:2:ffff::9", 5))
        != sender(("2001:db8:1:3::1", 5))
    )
    assert sender(("fe80::1%eth0", 5)) == sender(("fe80::2", 5))
    assert sender(None) == sender(("", 0)) == b""
    keyed = ServerConfig(api_key=",".join(KEYS))
    found = {sender((address, 5), key, keyed) for address in ("10.0.0.1", "10.0.0.2") for key in KEYS}
    assert len(found) == 2
    with pytest.raises(ApiError) as refused:
        sender(("10.0.0.1", 5), "sk-something-else", keyed)
    assert refused.value.status == 401


def test_a_replica_is_told_a_clients_address_by_the_front() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"])

    async def run() -> None:
        told = ReportingApp(app, None)  # type: ignore[arg-type]
        for headers in ([(b"x-octavo-client", b"10.0.0.1")], []):
            scope = {"type": "http", "path": "/", "headers": headers, "client": ("", 0)}
            await told(scope, None, None)  # type: ignore[arg-type]

    asyncio.run(run())
    assert [address for address, _ in seen] == ["10.0.0.1", ""]


def test_room_is_taken_from_who_holds_most() -> None:
    room = UploadBudget(4096)
    places = [Upload(b"many") for _ in range(4)] + [Upload(b"few")]
    for place in places[:4]:
        room.enter(place)
        room.take(place, 1000)
    # It takes what it needs from the other's, one after the other, until it holds as much itself.
    room.enter(places[4])
    for _ in range(19):
        room.take(places[4], 100)
    assert [place.lost._is_set for place in places] == [True, True, False, False, False]
    with pytest.raises(ApiError) as refused:
        room.take(places[4], 2000)
    assert refused.value.status == 429
    for place in places:
        room.leave(place)
    assert (room._num_bytes, room._uploads) == (0, {})


def test_whole_bodies_of_one_sender_leave_room_for_others() -> None:
    shelf, size = BodyBudget(10 << 20), 1 << 20
    with ExitStack() as held:
        for sender, most in ((b"a", 5), (b"b", 3), (b"c", 1)):
            for _ in range(most):
                held.enter_context(shelf.reserve(sender, size))
            with pytest.raises(ApiError) as refused:
                held.enter_context(shelf.reserve(sender, size))
            assert refused.value.status == 429
            # Small ones pass whatever large ones hold.
            for _ in range(1000):
                held.enter_context(shelf.reserve(sender, 64 << 10))
        held.enter_context(shelf.reserve(b"d", size))
    assert not shelf._bytes_of
