"""/v1/files and /v1/batches: OpenAI's client, bounds, keys, cancelling, and a restart."""

import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from http_helpers import LiveServer, chat, eventually, slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.server.api.batches import store
from octavo.server.api.batches.runner import Runner
from octavo.server.config import ServerConfig

Serve = Callable[..., LiveServer]


def requests(num: int, **fields: Any) -> bytes:
    url = "/v1/chat/completions"
    listed = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": chat(f"Hi {number}", **fields)}
        for number in range(num)
    ]
    return b"\n".join(json.dumps(one).encode() for one in listed)


def upload(server: LiveServer, content: bytes, **headers: str) -> dict[str, Any]:
    answer = server.http.post(
        "/v1/files", files={"file": ("../../a.jsonl", content)}, data={"purpose": "batch"}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def begin(server: LiveServer, file_id: str, **headers: str) -> dict[str, Any]:
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answer = server.post("/v1/batches", body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(server: LiveServer, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def is_over() -> bool:
        found.update(server.http.get(f"/v1/batches/{batch_id}").json())
        return found["status"] in ("completed", "failed", "cancelled", "expired")

    eventually(is_over)
    return found


def lines(server: LiveServer, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.http.get(f"/v1/files/{file_id}/content").text.splitlines()]


@pytest.fixture
def batch_server(serve_tiny: Serve, tmp_path: Path) -> Iterator[LiveServer]:
    server = serve_tiny(batch_dir=str(tmp_path / "batches"))
    yield server
    server.assert_drained()


def test_the_openai_client_runs_a_batch(openai: ModuleType, batch_server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{batch_server.url}/v1", api_key="none")
    elsewhere = b'{"custom_id": "5", "url": "/v1/completions", "body": {"prompt": "x"}}'
    content = b"\n".join([requests(5), elsewhere, b"no JSON"])
    file = client.files.create(file=("input.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("input.jsonl", len(content), "batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    ended(batch_server, batch.id)
    batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 7, 5, 2)
    assert batch.metadata == {"a": "b"}
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    for answer in answers:
        alone = batch_server.post("/v1/chat/completions", chat(f"Hi {answer['custom_id']}")).json()
        assert answer["response"]["body"]["choices"] == alone["choices"]
    assert {answer["custom_id"] for answer in answers} == set("01234")
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert {error["custom_id"] for error in errors} == {"5", None}
    assert [one.id for one in client.batches.list()] == [batch.id]
    assert {one.id for one in client.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}
    assert client.files.retrieve(file.id) == file
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_batch_is_cancelled_and_keeps_its_answers(batch_server: LiveServer) -> None:
    slow(batch_server)
    batch = begin(batch_server, upload(batch_server, requests(300, max_tokens=2))["id"])

    def some_are_answered() -> bool:
        counts = batch_server.http.get(f"/v1/batches/{batch['id']}").json()["request_counts"]
        return 0 < counts["completed"] < 300

    eventually(some_are_answered)
    found = batch_server.post(f"/v1/batches/{batch['id']}/cancel", {}).json()
    assert found["status"] == "cancelled"
    assert len(lines(batch_server, found["output_file_id"])) == found["request_counts"]["completed"] < 300
    eventually(lambda: batch_server.loop.stats().num_live == 0, 10)
    assert batch_server.http.get(f"/v1/batches/{batch['id']}").json() == found
    # The next batch runs, and nothing in memory grows with what was cancelled.
    following = begin(batch_server, upload(batch_server, requests(2))["id"])
    assert ended(batch_server, following["id"])["status"] == "completed"
    runner = batch_server.gate.context.batches
    assert runner is not None
    eventually(lambda: not runner._cancelled)


def test_what_is_removed_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    kept = store.Store(tmp_path / "batches")
    file = kept.upload("", "a", b"x")
    fields = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = kept.add_batch("", fields)
    for part in ("out", "err"):
        kept.path(f"{batch.id}.{part}").write_bytes(b"x")
    kept.remove(file.id)
    kept.remove(batch.id)
    assert list((tmp_path / "batches").iterdir()) == []


def store_of(folder: Path, num_batches: int) -> store.Store:
    """Make a store of batches of 10 kB each."""
    kept = store.Store(folder)
    fields = {"input_file_id": "", "endpoint": "/v1/completions", "completion_window": "24h"}
    for number in range(num_batches):
        kept.add_batch("", {**fields, "metadata": {"number": str(number), "text": "x" * 10_000}})
    return kept


def test_a_list_holds_one_batch_at_a_time(tmp_path: Path) -> None:
    kept = store_of(tmp_path / "batches", 100)
    tracemalloc.start()
    try:
        keys = kept.keys(store.BatchObject, lambda _, batch: not batch.is_over)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(keys) == 100
    assert keys == sorted(keys, reverse=True)
    assert most < 200_000


def test_names_of_batches_stay_out_of_pythons_table_of_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interned, intern = list[str](), sys.intern
    kept = store_of(tmp_path / "batches", 3)
    monkeypatch.setattr(sys, "intern", lambda text: interned.append(text) or intern(text))
    keys = kept.keys(store.BatchObject, lambda holder, batch: True)
    for key in keys:
        kept.save("", kept.get("", key.id, store.BatchObject))
    assert len(kept.described("", [key.id for key in keys], store.BatchObject)) == 3
    kept.remove(keys[0].id)
    assert [text for text in interned if "batch-" in text] == []
    # A Path would.
    assert kept.path(keys[1].id).name in interned


def test_a_batch_goes_on_after_a_restart(serve_tiny: Serve, tmp_path: Path) -> None:
    first = serve_tiny(batch_dir=str(tmp_path / "batches"))
    slow(first)
    batch = begin(first, upload(first, requests(200, max_tokens=2))["id"])
    eventually(lambda: first.http.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] > 0)
    assert first._events is not None
    first._events.call_soon_threadsafe(first.gate.context.stop_batches)
    first.assert_drained()
    (written,) = (tmp_path / "batches").glob("batch-*.out.data")
    before = {json.loads(line)["id"] for line in written.read_text().splitlines()}
    assert 0 < len(before) < 200
    with written.open("a") as file:
        file.write('{"id": "half')
    second = serve_tiny(batch_dir=str(tmp_path / "batches"))

    async def wake() -> None:
        second.gate.context.get_ready()

    second.on_events(wake)
    found = ended(second, batch["id"])
    assert found["status"] == "completed"
    assert found["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
    answers = lines(second, found["output_file_id"])
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(200))
    assert before <= {answer["id"] for answer in answers}
    second.assert_drained()


def test_a_full_queue_delays_a_batch_and_requests_go_first(serve_tiny: Serve, tmp_path: Path) -> None:
    server = serve_tiny({"max_num_seqs": 2}, batch_dir=str(tmp_path / "batches"), max_num_queued_reqs=4)
    batch = begin(server, upload(server, requests(100))["id"])
    eventually(lambda: server.loop.stats().num_live > 0)
    while server.http.get(f"/v1/batches/{batch['id']}").json()["status"] == "in_progress":
        assert server.post("/v1/chat/completions", chat("Me")).status_code in (200, 429)
    assert ended(server, batch["id"])["request_counts"] == {"total": 100, "completed": 100, "failed": 0}


def test_who_has_another_key_sees_nothing(serve_tiny: Serve, tmp_path: Path) -> None:
    keys = "key-one-1,key-two-2"
    server = serve_tiny(batch_dir=str(tmp_path / "batches"), api_key=keys)
    one, two = ({"authorization": f"Bearer {key}"} for key in keys.split(","))
    file = upload(server, requests(1), **one)
    batch = begin(server, file["id"], **one)
    path = f"/v1/batches/{batch['id']}"
    eventually(lambda: server.http.get(path, headers=one).json()["status"] == "completed")
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", f"/v1/batches/{batch['id']}"):
        assert server.http.get(path, headers=one).status_code == 200
        assert server.http.get(path, headers=two).status_code == 404
        assert server.http.get(path).status_code == 401
    assert server.http.get("/v1/files", headers=two).json()["data"] == []
    assert server.http.delete(f"/v1/files/{file['id']}", headers=two).status_code == 404


NAMES = ["..", "file-1", "%2e%2e%2fx", "file-" + "0" * 32, "batch-" + "0" * 32, "x" * 9000]
ROUTES = [
    ("GET", "/v1/files/NAME"),
    ("GET", "/v1/files/NAME/content"),
    ("DELETE", "/v1/files/NAME"),
    ("GET", "/v1/batches/NAME"),
    ("POST", "/v1/batches/NAME/cancel"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_never_a_path(batch_server: LiveServer, name: str) -> None:
    for method, path in ROUTES:
        assert batch_server.http.request(method, path.replace("NAME", name)).status_code in (404, 405)


def test_files_of_a_batch_are_no_batches(batch_server: LiveServer) -> None:
    file = upload(batch_server, requests(1))
    assert file["filename"] == "a.jsonl" or "/" in file["filename"]
    assert batch_server.http.get(f"/v1/batches/{file['id']}").status_code == 404
    batch = begin(batch_server, file["id"])
    assert batch_server.http.get(f"/v1/files/{batch['id']}").status_code == 404
    ended(batch_server, batch["id"])


def test_what_cannot_be_a_batch_fails_with_the_reason(batch_server: LiveServer) -> None:
    found = ended(batch_server, begin(batch_server, upload(batch_server, b"no\nno\n")["id"])["id"])
    assert found["status"] == "failed"
    assert "line 1" in found["errors"]["data"][0]["message"]


def test_bounds(batch_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_FILES", 1)
    upload(batch_server, b"x")
    answer = batch_server.http.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_many_files")
    monkeypatch.setattr(store, "KEPT_S", -1)
    time.sleep(1.1)
    assert batch_server.http.get("/v1/files").json()["data"] == []


def test_without_a_folder_the_option_is_named(live: LiveServer) -> None:
    for method, path in [("GET", "/v1/files"), ("POST", "/v1/files"), ("POST", "/v1/batches"), *ROUTES]:
        answer = live.http.request(method, path)
        assert answer.status_code == 404
        assert "--batch-dir" in answer.json()["error"]["message"]
    with pytest.raises(ConfigError, match="batch_dir"):
        ServerConfig(batch_dir="x", replicas=2)
    with pytest.raises(ConfigError, match="batch_dir"):
        store.Store(Path("/dev/null/x"))


FORM = {"content-type": "multipart/form-data; boundary=y"}
FORMS: list[tuple[dict[str, Any], int]] = [
    ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, 400),
    ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, 400),
    ({"files": {"file": b"x"}}, 400),
    ({"json": {"file": "x"}}, 415),
    ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400),
    ({"content": b"x", "headers": FORM}, 400),
    ({"content": b"--y\r\n\r\n\r\n--y--", "headers": FORM}, 400),
]


@pytest.mark.parametrize(("form", "status"), FORMS)
def test_a_form_that_is_none(batch_server: LiveServer, form: dict[str, Any], status: int) -> None:
    answer = batch_server.http.post("/v1/files", **form)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ('; filename="größe.jsonl"', "größe.jsonl"),
        ("; filename*=unicode_escape''%5Cud800", "file"),
        ("; filename*=a%00b''x", "file"),
        ("; filename=plain.jsonl", "plain.jsonl"),
    ],
)
def test_a_file_s_name_is_utf8(batch_server: LiveServer, head: str, name: str) -> None:
    form = (
        '--y\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--y\r\nContent-Disposition: '
    )
    form += (
        f'form-data; name="file"{head}\r\nContent-Type: text/plain; name="z"\r\n\r\nx\r\n\r\ny\r\n--y--\r\n'
    )
    answer = batch_server.http.post("/v1/files", content=form.encode(), headers=FORM)
    assert (answer.status_code, answer.json()["filename"]) == (200, name)
    assert batch_server.http.get(f"/v1/files/{answer.json()['id']}/content").content == b"x\r\n\r\ny"


HOSTILE = [
    b'--y\r\ncontent-disposition: form-data; name="file"; a="' + b";" * 2**20 + b'"\r\n\r\n\r\n--y--',
    b"".join(b'--y\r\ncontent-disposition: form-data; name="%d"\r\n\r\n\r\n' % n for n in range(10**5))
    + b"--y--",
]


@pytest.mark.parametrize("form", HOSTILE)
def test_a_hostile_form_is_refused_at_once(batch_server: LiveServer, form: bytes) -> None:
    begun = time.monotonic()
    assert batch_server.http.post("/v1/files", content=form, headers=FORM).status_code == 400
    assert time.monotonic() - begun < 10


def test_lists_honour_what_they_are_asked_for(batch_server: LiveServer) -> None:
    ids = [upload(batch_server, b"x")["id"] for _ in range(3)]

    def listed(**query: str) -> list[str]:
        return [one["id"] for one in batch_server.http.get("/v1/files", params=query).json()["data"]]

    newest = listed()
    assert set(newest) == set(ids)
    assert listed(order="asc") == newest[::-1]
    assert listed(after=newest[0]) == newest[1:]
    assert listed(after=newest[1], order="asc") == newest[:1]
    assert listed(purpose="batch") == newest
    assert listed(purpose="batch_output") == []
    # A page that began anew would never end.
    for query in ({"after": "file-gone"}, {"order": "up"}, {"limit": "0"}):
        answer = batch_server.http.get("/v1/files", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, *query)


def test_batches_that_are_over_make_room_and_files_bound_answers(
    batch_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_BATCHES", 1)
    file = upload(batch_server, requests(1))["id"]
    first = begin(batch_server, file)
    ended(batch_server, first["id"])
    monkeypatch.setattr(store, "MAX_BYTES", 1)
    second = ended(batch_server, begin(batch_server, file)["id"])
    assert batch_server.http.get(f"/v1/batches/{first['id']}").status_code == 404
    assert second["status"] == "failed"
    assert "delete some" in second["errors"]["data"][0]["message"]


def test_an_error_does_not_tell_the_folder(batch_server: LiveServer, tmp_path: Path) -> None:
    file = upload(batch_server, requests(1))
    (tmp_path / "batches" / f"{file['id']}.data").unlink()
    assert batch_server.http.get(f"/v1/files/{file['id']}/content").status_code == 404
    found = ended(batch_server, begin(batch_server, file["id"])["id"])
    assert found["status"] == "failed"
    assert str(tmp_path) not in json.dumps(found)


def test_thousands_of_answers_are_taken_up_in_a_moment(tmp_path: Path) -> None:
    kept = store.Store(tmp_path / "batches")
    batch = kept.add_batch(
        "", {"endpoint": "/v1/completions", "input_file_id": "", "completion_window": "24h"}
    )
    line = (
        json.dumps({"id": "a", "custom_id": "b", "response": None, "error": None, "pad": "x" * 2000}) + "\n"
    )
    path = kept.path(f"{batch.id}.out")
    # The last line was written halfway, or all but its end.
    for rest in (line[:1000], line.rstrip("\n").replace('"b"', '"c"')):
        path.write_text(line * 20_000 + rest)
        tracemalloc.start()
        try:
            begun = time.monotonic()
            assert Runner(kept, None)._answered(batch) == {"b"}  # type: ignore[arg-type]
            assert time.monotonic() - begun < 5
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()
        assert path.stat().st_size == 20_000 * len(line)


HEADS = [
    b"",
    b'content-disposition: form-data; name="file"',
    b"content-disposition: x; name*=u''%ff",
    b"content-disposition: x; name=file; filename*=x'y'%ff",
    b"\xff:",
]
FIXTURES = [HealthCheck.function_scoped_fixture]


@pytest.mark.parametrize("limit", ["000099" + "9" * 5000, "00009999999", "0", "10001"])
def test_a_page_is_never_longer_than_it_may_be(batch_server: LiveServer, limit: str) -> None:
    assert batch_server.http.get("/v1/files", params={"limit": limit}).status_code == 400


@settings(max_examples=100, deadline=None, suppress_health_check=FIXTURES, database=None)
@given(content=st.binary(max_size=60), head=st.sampled_from(HEADS), query=st.text(max_size=8))
def test_random_forms_and_queries(batch_server: LiveServer, content: bytes, head: bytes, query: str) -> None:
    http = batch_server.http
    purpose = b'--y\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body = purpose + b"--y\r\n" + head + b"\r\n\r\n" + content + b"\r\n--y--\r\n"
    assert http.post("/v1/files", content=body, headers=FORM).status_code < 500
    assert http.get("/v1/files", params={"limit": query, "after": query}).status_code < 500
    headers = {"content-type": "application/json"}
    assert http.post("/v1/batches", content=content, headers=headers).status_code < 500
