"""`octavo serve --replicas 2`: prefixes have a home, and a replica's death is nobody else's."""

import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from held_bodies import MAX_BODY_BYTES, assert_nobody_waits
from http_helpers import LiveServer, eventually, free_port, start_process
from tiny_chat import write_model

from octavo.errors import ConfigError
from octavo.server.replicas.parent import named_gpus, share_of

TEXT = "/v1/completions"
OPTIONS = {"num_blocks": 512, "block_size": 16}
LONG = {"prompt": [5, 6], "max_tokens": 3000, "ignore_eos": True, "stream": True}


class Served:
    """`octavo serve --replicas 2` in processes of its own."""

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        port = free_port()
        command = ["serve", str(model), "--load-format", "dummy"]
        command += ["--replicas", "2", "--port", str(port), "--num-blocks", str(OPTIONS["num_blocks"])]
        command += ["--block-size", str(OPTIONS["block_size"]), *options]
        command += ["--max-body-bytes", str(MAX_BODY_BYTES)]
        self.process = start_process(command, folder)
        self.slow = folder / "slow"
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def wait_until_ready(self) -> "Served":
        assert self.process.stdout is not None
        assert "by 2 replicas, ready after" in self.process.stdout.readline()
        self._pids = self._children()
        return self

    def health(self) -> dict:
        return self.http.get("/health").json()

    def num_ready(self) -> int:
        return sum(replica["state"] == "ready" for replica in self.health()["replicas"])

    def _children(self) -> list[int]:
        """Process ids of replicas, in the order in which they started: the parent forks the front first."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in task.read_text().split()][1:]

    def pid_of(self, replica: int) -> int:
        """Return the process id of a replica; one that was restarted since the last call has the new one."""
        children = self._children()
        new = (pid for pid in children if pid not in self._pids)
        self._pids = [pid if pid in children else next(new) for pid in self._pids]
        return self._pids[replica]

    def samples(self, name: str) -> dict[str, float]:
        """Return a metric by replica."""
        found = re.findall(
            rf'^{name}{{replica="(\d)".*}} (\S+)$', self.http.get("/metrics").text, re.MULTILINE
        )
        return {replica: float(value) for replica, value in found}

    def is_idle(self) -> bool:
        return all(
            replica["running"] + replica["waiting"] + replica["open_requests"] == 0
            for replica in self.health()["replicas"]
        )

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()
            self.http.close()


@pytest.fixture(scope="module")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("replicas"), max_model_len=4096)


@pytest.fixture(scope="module")
def served(roomy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(roomy_folder, tmp_path_factory.mktemp("cwd"))
    try:
        yield served.wait_until_ready()
    finally:
        served.close()


def documents() -> list[str]:
    words = ("the", "block", "of", "a", "tree", "holds", "keys", "values", "sequence", "prefix")
    return [" ".join(random.Random(number).choices(words, k=100)) for number in range(16)]


def ask(post: Callable[..., httpx.Response], salt: str) -> tuple[float, dict[int, set[str]]]:
    """Ask 4 questions about each of 16 documents; return the hit rate, and who answered by document.

    Nothing that was asked with another salt is hit.
    """
    found: dict[int, set[str]] = {number: set() for number in range(16)}
    counts = [0, 0]
    lock = threading.Lock()

    def one(number: int, text: str, question: int) -> None:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": f"Question {question}?"}]
        body = {"messages": messages, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
        answer = post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        with lock:
            found[number].add(answer.headers.get("x-octavo-replica", ""))
            counts[0] += usage["prompt_tokens_details"]["cached_tokens"]
            counts[1] += usage["prompt_tokens"]

    with ThreadPoolExecutor(4) as pool:
        for question in range(4):
            for task in [pool.submit(one, *item, question) for item in enumerate(documents())]:
                task.result()
    return counts[0] / counts[1], found


def test_documents_have_one_home_each_and_hits_are_those_of_one_engine(
    served: Served, roomy_folder: Path, serve_tiny: Callable[..., LiveServer]
) -> None:
    options = {**OPTIONS, "num_blocks": 2 * OPTIONS["num_blocks"], "model": str(roomy_folder)}
    alone = serve_tiny(options)
    expected, _ = ask(alone.http.post, "alone")
    assert expected > 0.6
    # A replica that a busy machine keeps from reporting for seconds loses what it is asked meanwhile.
    for attempt in range(3):
        rate, homes = ask(served.http.post, f"attempt {attempt}")
        num_split = sum(len(home) > 1 for home in homes.values())
        fewest = min(sum(home == {name} for home in homes.values()) for name in "01")
        if rate > expected - 0.02 and num_split <= 1 and fewest >= 3:
            return
    raise AssertionError(f"hit rate {rate}, one engine's {expected}; who answered: {homes}")


def test_metrics_have_the_label_replica(served: Served) -> None:
    assert set(served.samples("vllm:num_requests_running")) == {"0", "1"}
    assert set(served.samples("octavo:router_replica_ready").values()) == {1.0}
    text = served.http.get("/metrics").text
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))


def test_the_page_and_other_routes_are_answered_and_replicas_can_be_watched(served: Served) -> None:
    assert "Octavo" in served.http.get("/").text
    assert served.http.get("/v1/models").json()["data"]
    assert served.http.get("/nowhere").status_code == 404
    for path in ("/octavo/report", "/octavo%2Freport"):
        assert served.http.get(path, headers={"x-octavo-marks": ""}).status_code == 404
    assert served.http.post(TEXT, json={"prompt": [5], "max_tokens": "x"}).status_code == 400
    assert served.http.post(TEXT, content=b"{").status_code == 415
    with served.http.stream("GET", "/live?replica=1") as answer:
        assert (answer.headers["x-octavo-replica"], answer.headers["x-octavo-replicas"]) == ("1", "2")
        assert json.loads(next(answer.iter_lines()).removeprefix("data: "))["state"] == "ready"
    assert served.http.get("/live?replica=7").status_code == 404
    assert served.http.get("/ready").status_code == 200


def test_the_front_lets_nobody_in_whom_a_server_would_not(served: Served) -> None:
    """Before it reads a body, and with the headers that every answer has."""
    with socket.create_connection(
        (served.http.base_url.host, served.http.base_url.port or 0), 60
    ) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    body = {"prompt": [5], "max_tokens": 1}
    assert served.http.post(TEXT, json=body, headers={"Host": "evil.example"}).status_code == 403
    assert served.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    for page in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
        assert served.http.get("/live", headers=page).status_code == 403
        assert served.http.post(TEXT, json=body, headers=page).status_code == 403
    own = {"Sec-Fetch-Site": "same-origin", "Origin": str(served.http.base_url).rstrip("/")}
    assert served.http.post(TEXT, json=body, headers=own).status_code == 200
    # A client cannot write what the front tells replicas.
    told = {"x-octavo-client": "1.2.3.4", "x-octavo-marks": "AAAA"}
    assert served.http.post(TEXT, json=body, headers=told).status_code == 200
    refused = served.http.post("/v1/messages", content=b"{", headers={"X-Request-Id": "mine"})
    assert (refused.status_code, refused.headers["request-id"], refused.json()["type"]) == (
        415,
        "mine",
        "error",
    )
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answer = served.http.post("/v1/messages", json=messages, headers={"X-Request-Id": "mine"})
    assert answer.headers.get_list("request-id") == answer.headers.get_list("x-request-id") == ["mine"]


def test_unfinished_bodies_keep_nobody_out(served: Served) -> None:
    assert set(assert_nobody_waits(served.http.base_url.port or 0, "", "")) == {429}


def test_a_client_that_leaves_takes_its_request_along(served: Served) -> None:
    served.slow.touch()
    with served.http.stream("POST", TEXT, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert not served.is_idle()
    eventually(served.is_idle)
    served.slow.unlink()


def test_a_replica_that_is_killed_ends_its_streams_and_comes_back(served: Served) -> None:
    def stream(prompt: int) -> tuple[str, list[str]]:
        body = {**LONG, "prompt": [prompt] * 300, "max_tokens": 600}
        with served.http.stream("POST", TEXT, json=body) as answer:
            lines = []
            for line in answer.iter_lines():
                lines += [line] * bool(line)
                if len(lines) == 1:
                    begun.release()
            return answer.headers["x-octavo-replica"], lines

    begun = threading.Semaphore(0)
    # One that the front does not take for ready gets no stream.
    eventually(lambda: served.num_ready() == 2, 60)
    served.slow.touch()
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(stream, prompt) for prompt in (5, 6, 7, 8)]
        for _ in tasks:
            assert begun.acquire(timeout=60)
        os.kill(served.pid_of(0), signal.SIGKILL)
        # Somebody else takes what comes meanwhile.
        assert served.http.post(TEXT, json={"prompt": [9], "max_tokens": 2}).status_code == 200
        served.slow.unlink()
        ended = [task.result() for task in tasks]
    assert {replica for replica, _ in ended} == {"0", "1"}
    for replica, lines in ended:
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        if replica == "0":
            assert last["error"]["code"] == "replica_died"
        else:
            assert last["choices"][0]["finish_reason"] == "length"
    eventually(lambda: served.num_ready() == 2, 60)
    assert served.samples("octavo:engine_restarts_total") == {"0": 1.0, "1": 0.0}


def test_a_replica_that_is_stopped_keeps_no_request(served: Served) -> None:
    """Streams that have begun end with an error; what has no token yet is answered by the other replica."""
    eventually(lambda: served.num_ready() == 2, 60)
    served.slow.touch()
    begun: queue.Queue[str] = queue.Queue()
    is_over = threading.Event()

    def stream(prompt: int) -> tuple[str, list[str]]:
        with served.http.stream("POST", TEXT, json={**LONG, "prompt": [prompt] * 200}) as answer:
            lines, name = [], answer.headers["x-octavo-replica"]
            for line in answer.iter_lines():
                if not lines:
                    begun.put(name)
                lines += [line] * bool(line)
                if is_over.is_set() and name != stopped:
                    break
            return name, lines

    def late(number: int) -> httpx.Response:
        api = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")[number % 4]
        said = {"messages": [{"role": "user", "content": f"Question {number}"}], "max_tokens": 4}
        body = {
            "/v1/completions": {"prompt": [number + 9] * 40, "max_tokens": 4},
            "/v1/responses": {"input": f"Question {number}", "max_output_tokens": 4},
        }.get(api, said)
        return served.http.post(api, json={**body, "stream": number >= 4})

    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(stream, prompt) for prompt in (15, 16, 17, 18)]
        stopped, *_ = [begun.get(timeout=60) for _ in streams]
        pid = served.pid_of(int(stopped))
        os.kill(pid, signal.SIGSTOP)
        try:
            is_over.set()
            served.slow.unlink()
            answers = [pool.submit(late, number) for number in range(8)]
            # Scrapes leave it out as well.
            assert pool.submit(served.http.get, "/metrics").result().status_code == 200
            ended = [lines for name, lines in (task.result() for task in streams) if name == stopped]
            assert ended
            for lines in ended:
                assert lines[-1] == "data: [DONE]"
                assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "replica_died"
            for task in answers:
                answer = task.result()
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-octavo-replica"] != stopped
                assert "replica_died" not in answer.text
            assert {replica["state"] for replica in served.health()["replicas"]} == {"down", "ready"}
            retries = re.search(r"^octavo:router_retries_total (\S+)", served.http.get("/metrics").text, re.M)
            assert retries is not None
            assert float(retries[1]) > 0
        finally:
            os.kill(pid, signal.SIGCONT)
    eventually(lambda: served.num_ready() == 2, 60)
    eventually(served.is_idle)


@pytest.mark.slow
def test_a_request_that_has_no_answer_yet_is_sent_to_another_replica(served: Served) -> None:
    body = {**LONG, "stream": False, "max_tokens": 1500}
    served.slow.touch()
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(served.http.post, TEXT, json=body)
        eventually(lambda: any(replica["running"] for replica in served.health()["replicas"]))
        (name,) = (replica["replica"] for replica in served.health()["replicas"] if replica["running"])
        os.kill(served.pid_of(int(name)), signal.SIGKILL)
        served.slow.unlink()
        answer = task.result()
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1500
    assert answer.headers["x-octavo-replica"] == str(1 - int(name))
    eventually(lambda: served.num_ready() == 2, 60)


def test_sigterm_lets_streams_end_and_leaves_nothing(served: Served) -> None:
    body = {**LONG, "max_tokens": 300}
    pids = [served.pid_of(0), served.pid_of(1)]
    served.slow.touch()
    with served.http.stream("POST", TEXT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        served.process.terminate()
        eventually(lambda: served.http.get("/ready").status_code == 503)
        refused = served.http.post(TEXT, json={"prompt": [5], "max_tokens": 1})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        served.slow.unlink()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    _, errors = served.process.communicate(timeout=60)
    assert served.process.returncode == 0, errors
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def raise_family(folder: Path, code: int) -> tuple[int, str]:
    """Raise a family of replicas that end with an exit code; return its own, and what it said."""
    program = f"""
import os, signal, sys
from octavo.server.config import ServerConfig
from octavo.server.replicas.parent import fork_replicas

role = fork_replicas(ServerConfig(replicas=3, max_restarts=2), "cpu", 1)
assert "torch" not in sys.modules
if role.replica is None:
    signal.pause()
os.write(1, b"started\\n")
sys.exit({code})
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(folder)},
    )
    assert not list(folder.iterdir())
    return found.returncode, found.stdout + found.stderr


def test_replicas_that_cannot_load_end_all_and_others_restart_a_few_times(tmp_path: Path) -> None:
    assert raise_family(tmp_path, 2)[0] == 2
    code, text = raise_family(tmp_path, 3)
    assert code == 1
    assert "the engine died 3 times" in text
    # Two of them twice; whoever is forked when the end comes may have said nothing yet.
    assert 3 <= text.count("started") <= 5


def test_each_replica_has_a_gpu_and_its_share_of_the_cores() -> None:
    found = [share_of("auto", index, 2, 1, ["3", "5"], 8) for index in range(2)]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in found] == ["3", "5"]
    assert share_of("cuda", 1, 2, 2, ["3", "5", "1", "0"], 8)["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert share_of("auto", 1, 3, 1, [], 8) == share_of("cpu", 0, 3, 1, ["0"], 8) == {"OMP_NUM_THREADS": "2"}
    with pytest.raises(ConfigError, match="replicas=2 of tensor_parallel_size=2 need 4 GPUs, there are 3"):
        share_of("cuda", 0, 2, 2, ["0", "1", "2"], 8)
    assert named_gpus(" 3, GPU-5e ,-1,0") == ["3", "GPU-5e"]
    assert named_gpus("") == named_gpus("-1") == named_gpus("none") == []
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='0,1,0' names a GPU twice"):
        named_gpus("0,1,0")
    with pytest.raises(ConfigError, match="device must be cuda or auto"):
        share_of("cuda:1", 0, 2, 1, ["0", "1"], 8)
