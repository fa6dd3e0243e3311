"""Keys, hosts, other origins, caches of other keys, and what is never written or opened."""

import ast
import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from http_helpers import LiveServer, chat

import octavo.server
from octavo.errors import ConfigError
from octavo.server.app import ROUTES
from octavo.server.config import ServerConfig
from octavo.server.entry.door import KeyRing

CHAT = "/v1/chat/completions"
KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"
Serve = Callable[..., LiveServer]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_health_wants_a_key(serve_tiny: Serve) -> None:
    server = serve_tiny(api_key=f"{KEY},{OTHER}")
    opened = set()
    for method, path, _ in ROUTES:
        path = path.replace("{name:path}", "tiny")
        for headers in (
            {},
            bearer("wrong-key-000"),
            {"Authorization": "Bearer"},
            {"Authorization": KEY},
            {"X-Api-Key": "wrong-key-000"},
            {"Authorization": "Bearer wrong-key-000", "X-Api-Key": KEY},
        ):
            response = server.http.request(method, path, headers=headers)
            if response.status_code == 200:
                opened.add(path)
            else:
                assert response.status_code == 401, path
                assert "expected a valid API key" in str(response.json()["error"])
    assert opened == {"/health", "/ping", "/ready"}
    assert server.http.get("/nothing").status_code == 401
    for key in (KEY, OTHER):
        for headers in (bearer(key), {"X-Api-Key": key}):
            assert server.post(CHAT, chat("Hi"), headers=headers).status_code == 200
    assert server.http.get("/metrics", headers=bearer(KEY)).status_code == 200


def test_metrics_may_be_public(serve_tiny: Serve) -> None:
    server = serve_tiny(api_key=KEY, public_metrics=True)
    assert server.http.get("/metrics").status_code == 200
    assert server.http.get("/v1/models").status_code == 401


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(f"# ours\n{KEY}\n\n  {OTHER}\n")
    assert ServerConfig(api_key_file=str(path)).read_keys() == [KEY, OTHER]
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="at least one API key"):
        ServerConfig(api_key_file=str(path)).read_keys()
    with pytest.raises(ConfigError, match="8 or more"):
        ServerConfig(api_key="short").read_keys()
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerConfig(api_key_file=str(tmp_path / "nowhere")).read_keys()
    assert KEY not in repr(ServerConfig(api_key=KEY))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_bytes(("\ufeff" + ending.join([KEY, "# ours", OTHER, ""])).encode())
    assert ServerConfig(api_key_file=str(path)).read_keys() == [KEY, OTHER]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (0o644, "can be read by every user of this machine; run: chmod o-r"),
        (0o604, "can be read by every user"),
        (0o620, "can be changed by other users; run: chmod go-w"),
        (0o602, "can be changed by other users"),
    ],
)
def test_a_key_file_that_others_can_read_or_change_is_refused(
    tmp_path: Path, mode: int, message: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(mode)
    (tmp_path / "link").symlink_to(path)
    for given in (path, tmp_path / "link"):
        with pytest.raises(ConfigError, match=message):
            ServerConfig(api_key_file=str(given)).read_keys()
    # As a mounted secret of Kubernetes: the group may read it, and links lead to it.
    path.chmod(0o440)
    assert ServerConfig(api_key_file=str(tmp_path / "link")).read_keys() == [KEY]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(KEY)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345, not to you"):
        ServerConfig(api_key_file=str(path)).read_keys()


def test_keys_may_come_through_a_pipe() -> None:
    """As a shell writes it: --api-key-file <(command)."""
    reading, writing = os.pipe()
    os.write(writing, f"{KEY}\n".encode())
    os.close(writing)
    assert ServerConfig(api_key_file=f"/dev/fd/{reading}").read_keys() == [KEY]
    os.close(reading)


def test_keys_are_hashed_and_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing([KEY, OTHER])
    assert KEY.encode() not in b"".join(ring._digests)
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr("octavo.server.entry.door.hmac.compare_digest", compare)
    assert ring.holder({b"authorization": f"Bearer {KEY}".encode()}) == ring._digests[0]
    # All of them, although the first one was right.
    assert compared == ring._digests
    assert ring.holder({b"x-api-key": OTHER.encode()}) == ring._digests[1]
    assert ring.holder({b"authorization": b"Bearer nothing-like-it"}) is None
    assert ring.holder({}) is None


def test_a_public_address_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="clients need a key"):
            ServerConfig(host=host)
        ServerConfig(host=host, insecure=True)
        ServerConfig(host=host, api_key=KEY)
    for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
        assert ServerConfig(host=host).is_local


def test_other_hosts_and_origins(live: LiveServer, serve_tiny: Serve) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
        response = live.http.get("/health", headers={"Host": host})
        assert response.status_code in (400, 403), host
    for host in ("localhost", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"):
        assert live.http.get("/health", headers={"Host": host}).status_code == 200
    origin = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for response in (
        live.http.options(CHAT, headers=origin),
        live.post(CHAT, chat("Hi"), headers=origin),
        live.http.get("/v1/models", headers=origin),
    ):
        assert not any(name.startswith("access-control") for name in response.headers)
    # What a page may send without asking: a form or plain text.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        body = json.dumps(chat("Hi"))
        assert live.http.post(CHAT, content=body, headers={"content-type": kind}).status_code == 415
    named = serve_tiny(allowed_hosts=("my.host",))
    assert named.http.get("/health", headers={"Host": "my.host:8000"}).status_code == 200


def test_keys_have_caches_of_their_own(serve_tiny: Serve) -> None:
    server = serve_tiny(api_key=f"{KEY},{OTHER}", cache_isolation="key")

    def cached(key: str, **fields: object) -> int:
        answer = server.post(CHAT, chat("A prompt that fills some blocks", **fields), headers=bearer(key))
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER) == 0
    assert cached(KEY, cache_salt="mine") == 0
    assert cached(OTHER, cache_salt="mine") == 0
    assert cached(KEY, cache_salt="mine") > 0


def test_prompts_and_keys_are_never_logged(serve_tiny: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve_tiny(api_key=KEY, access_log=True)
    secret = "my-secret-prompt"
    bodies = [
        chat(secret),
        chat(secret, stream=True),
        chat(secret, temprature=1),
        chat(secret, n=-1),
        {"messages": [{"role": secret, "content": 5}]},
    ]
    for body in bodies:
        server.post(CHAT, body, headers=bearer(KEY))

    def broken(*arguments: object, **keywords: object) -> None:
        raise RuntimeError(secret)

    server.loop.submit = broken  # type: ignore[method-assign, assignment]
    response = server.post(CHAT, chat(secret), headers=bearer(KEY))
    assert (response.status_code, secret in response.text) == (500, False)
    server.http.get("/a%0d%0aforged: line", headers=bearer(KEY))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("octavo")]
    assert any("POST '/v1/chat/completions' 200" in line for line in lines)
    assert any("failed with RuntimeError" in line for line in lines)
    text = caplog.text
    assert secret not in text
    assert KEY not in text
    assert "\r\nforged" not in "".join(lines)


def test_the_server_opens_no_connection(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    connect = socket.socket.connect

    def noted(self: socket.socket, address: object) -> None:
        opened.append(address)
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", noted)
    image = {"type": "image_url", "image_url": {"url": "http://192.0.2.1/a.png"}}
    for body in (chat("Hi"), chat("Hi", stream=True), {"messages": [{"role": "user", "content": [image]}]}):
        live.post(CHAT, body)
    live.post("/v1/completions", {"prompt": "http://192.0.2.1/"})
    assert all(address == ("127.0.0.1", live.config.port) for address in opened)


def test_no_module_of_the_server_unpickles_or_evaluates() -> None:
    banned = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
    for path in Path(octavo.server.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.split(".")[0] for alias in node.names}
                names.add((getattr(node, "module", None) or "").split(".")[0])
                assert not names & banned, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), path
