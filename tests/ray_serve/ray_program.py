"""What programs that run Ray share: a cluster of this process, clients, and waiting."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import ray
from ray import serve
from ray_helpers import KEY

COMPLETIONS = "/v1/completions"


@contextmanager
def cluster(app: serve.Application) -> Iterator[httpx.Client]:
    """Serve an application on a cluster of this machine; yield a client with a key."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # More cores than there are: a new replica may start while an old one ends.
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deploy(app)
    key = {"Authorization": f"Bearer {KEY}"}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=key) as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(app: serve.Application) -> None:
    """Serve an application, or another version of it; return when it is ready."""
    serve.run(app, name="octavo", route_prefix="/")


def num_running() -> int:
    """Return how many replicas Ray says are running."""
    return serve.status().applications["octavo"].deployments["octavo"].replica_states.get("RUNNING", 0)


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


def lines_of(answer: httpx.Response) -> Iterator[str]:
    """Yield lines of a stream that are not empty."""
    return (line for line in answer.iter_lines() if line)


def event(line: str) -> dict[str, Any]:
    """Return an event's data."""
    return json.loads(line.removeprefix("data: "))
