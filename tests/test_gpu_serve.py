"""The GPU's serving benchmark on a tiny model and a CPU, beside a server that looks like vLLM's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
# One token each 2 ms, to whoever asks.
FAKE_SERVER = """
    import argparse, asyncio, json, pathlib
    from aiohttp import web
    parser = argparse.ArgumentParser()
    for name in ("model", "port", "host", "load-format", "dtype", "max-model-len", "gpu-memory-utilization"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--disable-log-stats", action="store_true")
    arguments = parser.parse_args()
    assert (pathlib.Path(arguments.model) / "tokenizer.json").is_file()
    def data(fields):
        return b"data: " + json.dumps(fields).encode() + b"\\n\\n"
    async def complete(request):
        body = await request.json()
        assert body["model"] == arguments.model
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0.002)
            await response.write(data({"choices": [{"text": "a"}]}))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        await response.write(data({"choices": [], "usage": usage}) + b"data: [DONE]\\n\\n")
        return response
    async def models(request):
        return web.json_response({"data": [{"id": arguments.model}]})
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    web.run_app(app, host=arguments.host, port=int(arguments.port), print=None)
    """


@pytest.mark.slow
def test_the_script_on_a_tiny_model(tmp_path: Path) -> None:
    folder = tmp_path / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for package in (tmp_path / "vllm", folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "api_server.py").write_text(dedent(FAKE_SERVER))
    options = "--model tiny --workloads single --streams 1 2 --rate 40 --seconds 0.2 --prompt-len 4 8"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_serve.py"), *options.split()]
    command += ["--output-len", "4", "--repeat", "1", "--processes", "2", "--peer", "vllm"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert len(report["engine_alone"]["output_tokens_per_s"]["single"]) == 1
    assert set(report["servers"]) == {"Octavo", "vLLM"}, ran.stderr
    for server in report["servers"].values():
        assert list(server["loads"]) == ["single", "1 streams", "2 streams", "40 requests/s"]
        requests = {name: (run["completed"], run["failed"]) for name, (run,) in server["loads"].items()}
        assert requests == {
            "single": (1, 0),
            "1 streams": (2, 0),
            "2 streams": (4, 0),
            "40 requests/s": (8, 0),
        }
        for name, (run,) in server["loads"].items():
            assert run["total_output_tokens"] == run["completed"] * (256 if name == "single" else 4)
            assert run["median_ttft_ms"] > 0
    assert "| 40 requests/s | vLLM |" in ran.stdout
