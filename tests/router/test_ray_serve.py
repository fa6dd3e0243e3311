"""`octavo.ray:app` on Ray Serve: two replicas of a tiny model. `make ray-test` installs Ray and runs it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import TINY_LLAMA

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs octavo[ray]")

OPTIONS = """
model = "."
load_format = "dummy"
num_blocks = 2048
block_size = 16
device = "cpu"
[serve]
replicas = 2
api_key = "a-long-enough-key"
served_model_name = "tiny"
"""
# A process of its own: Ray leaves threads and warnings behind.
PROGRAM = """
import json, sys, time
import httpx, ray
from ray import serve

ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
port = int(sys.argv[1])
serve.start(http_options={"host": "127.0.0.1", "port": port})
from octavo.ray import app
serve.run(app, name="octavo", route_prefix="/")

key = {"Authorization": "Bearer a-long-enough-key"}
client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, headers=key)
found = {"model": client.get("/v1/models").json()["data"][0]["id"]}
found["without_key"] = httpx.post(str(client.base_url) + "/v1/completions", json={}).status_code
found["no_json"] = client.post("/v1/completions", content=b"x").status_code
found["health"] = client.get("/health").json()["status"]

def ask(document, question):
    prompt = [5 + document] * 320 + [30 + question] * 3
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    return client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

found["cached"] = [[ask(document, question) for document in range(8)] for question in range(3)]

def loads():
    return [client.get("/load").json()["server_load"] for _ in range(8)]

body = {"prompt": [5, 6], "max_tokens": 450, "ignore_eos": True, "stream": True}
with client.stream("POST", "/v1/completions", json=body) as answer:
    lines = [line for line in answer.iter_lines() if line]
found["last"], found["kind"] = lines[-1], answer.headers["content-type"]
# One for each replica, as others go where there is less to do.
# Without a tokenizer there is no text: with ids, each token is an event.
long = {**body, "max_tokens": 4000, "return_token_ids": True}
# What a replica told of the stream before is old by then.
time.sleep(3)
with client.stream("POST", "/v1/completions", json=long) as one:
    # An iterator that is dropped closes its stream.
    lines = one.iter_lines()
    next(lines)
    with client.stream("POST", "/v1/completions", json={**long, "prompt": [7, 8]}) as other:
        others = other.iter_lines()
        next(others)
        found["during"] = min(loads())
deadline = time.monotonic() + 5
while max(loads()) and time.monotonic() < deadline:
    time.sleep(0.1)
found["after"] = max(loads())
print(json.dumps(found))
serve.shutdown()
ray.shutdown()
"""


def test_documents_stay_together_and_requests_end_with_their_clients(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY_LLAMA, "max_position_embeddings": 4096}))
    (tmp_path / "octavo.toml").write_text(OPTIONS.replace('"."', json.dumps(str(tmp_path))))
    path = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "8791"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert (found["model"], found["health"]) == ("tiny", "ready")
    assert (found["without_key"], found["no_json"]) == (401, 415)
    first, *later = found["cached"]
    assert first == [0] * 8
    assert later == [[320] * 8] * 2
    assert (found["last"], found["kind"].split(";")[0]) == ("data: [DONE]", "text/event-stream")
    assert (found["during"], found["after"]) == (1, 0)
