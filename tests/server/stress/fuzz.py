"""Random requests, by schemathesis over /openapi.json and hypothesis: no status above 499, nothing left.

schemathesis runs in an environment of its own (make fuzz-server).

    python tests/server/stress/fuzz.py [--schemathesis PATH] [--cases 5000] [--bodies 10000] [--save MACHINE]
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_process import ROOT, ServerProcess
from stress_report import make_parser, report
from wild_bodies import PATHS, bodies

# schemathesis ends after so long, as some of what it draws asks for hundreds of answers.
MAX_SCHEMA_S = 400
ANSWERS = "octavo:http_responses_total"
# Context of 64 tokens: a request without max_tokens then ends soon.
OPTIONS = ("--num-blocks", "512", "--max-model-len", "64")
KEEPS = ("--response-store-mib", "1", "--batch-dir")
# Routes that only a model that embeds answers.
POOLED = "embed|classify|pooling|score|rerank"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--schemathesis", type=Path, default=ROOT / "build" / "clients" / "fuzz" / "bin" / "schemathesis"
    )
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--bodies", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ServerProcess(*OPTIONS, *KEEPS, folder) as server:
        figures = measure(server, arguments.schemathesis, arguments.cases, arguments.bodies)
    with ServerProcess(*OPTIONS, "--task", "embed") as server:
        options = ("--include-path-regex", POOLED)
        cases, failures = by_schema(server, arguments.schemathesis, arguments.cases // 5, *options)
        failures += left_by(server)
    figures |= {"cases_embedding": cases, "failures": figures["failures"] + failures}
    return report("fuzz", figures, arguments)


def measure(server: ServerProcess, schemathesis: Path, num_cases: int, num_bodies: int) -> dict[str, Any]:
    """Send all; return counts and failures."""
    begun = time.monotonic()
    cases, failures = by_schema(server, schemathesis, num_cases)
    schema_s = time.monotonic() - begun
    statuses = by_hypothesis(server, num_bodies)
    failures += [f"{count} bodies had status {status}" for status, count in statuses.items() if status >= 500]
    failures += left_by(server)
    return {
        "cases_by_schema": cases,
        "schema_s": schema_s,
        "bodies": statuses.total(),
        "bodies_s": time.monotonic() - begun - schema_s,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "failures": failures,
    }


def left_by(server: ServerProcess) -> list[str]:
    """Return what is wrong with a server that should have nothing to do."""
    failures = [f"left: {left}" for left in [server.leftovers()] if left]
    return failures + (["the server has ended"] if server.process.poll() is not None else [])


def by_schema(
    server: ServerProcess, schemathesis: Path, num_cases: int, *options: str
) -> tuple[int, list[str]]:
    """Run schemathesis with further options; return the cases it made, and its failures."""
    command = [str(schemathesis.absolute()), "run", f"{server.url}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--continue-on-failure", "--no-color"]
    command += ["--max-examples", str(num_cases // _num_operations(server) + 1), *options]
    command += ["--phases", "examples,coverage,fuzzing", "--generation-database", "none", "--seed", "1"]
    command += ["--suppress-health-check", "all", "--request-timeout", "30"]
    command += ["--max-time", str(MAX_SCHEMA_S)]
    before = server.metrics().get(ANSWERS, 0)
    # It leaves a folder where it runs.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    cases = int(server.metrics()[ANSWERS] - before)
    failures = [] if done.returncode == 0 else [f"schemathesis: {done.stdout[-3000:]} {done.stderr[-500:]}"]
    return cases, failures + ([f"only {cases} cases"] if cases < num_cases else [])


def _num_operations(server: ServerProcess) -> int:
    with urllib.request.urlopen(f"{server.url}/openapi.json", timeout=30) as answer:
        return sum(map(len, json.load(answer)["paths"].values()))


def by_hypothesis(server: ServerProcess, num_bodies: int) -> Counter[int]:
    """Send random bodies; return how many had which status."""
    statuses: Counter[int] = Counter()

    @settings(max_examples=num_bodies, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(path=st.sampled_from(PATHS), body=bodies())
    def send(path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                answer.read()
                statuses[answer.status] += 1
        except urllib.error.HTTPError as error:
            error.read()
            statuses[error.code] += 1

    send()
    return statuses


if __name__ == "__main__":
    sys.exit(main())
