"""`serve run` with a configuration file: replicas come with requests and go without them."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray_helpers import KEY, NEEDS_RAY, environment, write_options

pytestmark = [NEEDS_RAY, pytest.mark.timeout(400)]
CONFIG = Path(__file__).parents[2] / "deploy" / "serve.yaml"
QUICK = {
    "target_ongoing_requests": 2,
    "upscale_delay_s": 1,
    "downscale_delay_s": 3,
    "look_back_period_s": 2,
    "metrics_interval_s": 0.5,
}
VARIABLES = {
    "OCTAVO_LOAD_FORMAT": "dummy",
    "OCTAVO_DEVICE": "cpu",
    "OCTAVO_NUM_BLOCKS": "2048",
    "OCTAVO_REPLICAS": "2",
    "OCTAVO_API_KEY": KEY,
    "OCTAVO_SERVED_MODEL_NAME": "tiny",
}
LONG = {"prompt": [5, 6], "max_tokens": 3500, "ignore_eos": True, "stream": True, "return_token_ids": True}


CHECK = "import sys, yaml; from ray.serve.schema import ServeDeploySchema as Schema; " + (
    "print(len(Schema.model_validate(yaml.safe_load(sys.stdin)).applications))"
)


def test_ray_knows_the_fields_of_both_files() -> None:
    service = yaml.safe_load((CONFIG.parent / "kubernetes" / "rayservice.yaml").read_text())
    for text in (CONFIG.read_text(), service["spec"]["serveConfigV2"]):
        command = [sys.executable, "-c", CHECK]
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment())
        assert done.stdout == "1\n", done.stderr[-2000:]


def eventually(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.2)


def num_replicas() -> int:
    """Processes of replicas on this machine, by the title that Ray gives them."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        # Any process may end at any time.
        with suppress(FileNotFoundError, ProcessLookupError):
            found += b"ray::ServeReplica:octavo:octavo" in (process / "cmdline").read_bytes()
    return found


def wait_until_ready(client: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the server is healthy; fail with its log when it has ended."""

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        with suppress(httpx.HTTPError):
            return client.get("/health").status_code == 200
        return False

    eventually(is_ready, 150)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of `serve run` on deploy/serve.yaml with another model and short periods."""
    write_options(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["runtime_env"]["env_vars"] = {"OCTAVO_MODEL": str(tmp_path), **VARIABLES}
    application["deployments"][0]["autoscaling_config"] |= QUICK
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "serve.yaml"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
    key = {"Authorization": f"Bearer {KEY}"}
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=key)
    try:
        wait_until_ready(client, process, tmp_path / "log")
        yield client
    finally:
        client.close()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
            log.close()


def test_replicas_follow_the_requests_under_way(served: httpx.Client) -> None:
    assert served.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert num_replicas() == 1
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            with served.stream("POST", "/v1/completions", json=LONG) as answer:
                for _ in answer.iter_lines():
                    if is_over.is_set():
                        break

    with ExitStack() as stack:
        stack.callback(is_over.set)
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(is_over.set)
        eventually(lambda: num_replicas() == 2, 60)
        names: set[str] = set()

        def both_answer() -> bool:
            body = {"prompt": [7, 8], "max_tokens": 1}
            names.add(served.post("/v1/completions", json=body).headers["x-octavo-replica"])
            return len(names) == 2

        eventually(both_answer, 90)
    eventually(lambda: num_replicas() == 1, 90)
    assert served.get("/health").json()["status"] == "ready"
