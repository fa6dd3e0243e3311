"""Other projects' clients against live servers, in the environments that `make client-test` makes.

    python tests/server/clients/run.py [--environments build/clients] [--only NAME ...] [--save MACHINE]

A client is a file with_NAME.py, which gets the URL of a server and a folder with the tiny model's tokenizer.
Its last line says what it did; its exit code says whether it worked.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "stress"))

from server_process import ROOT, SMOLLM2, ServerProcess  # noqa: E402
from stress_report import make_parser, report  # noqa: E402
from support.common import table  # noqa: E402
from tiny_chat import write_model  # noqa: E402

# Client, package, environment, model.
CLIENTS = (
    ("langchain", "langchain-openai", "apps", SMOLLM2),
    ("litellm", "litellm", "apps", SMOLLM2),
    ("llm", "llm", "apps", SMOLLM2),
    ("lm_eval", "lm-eval", "apps", None),
    ("guidellm", "guidellm", "guidellm", None),
    ("aiperf", "aiperf", "aiperf", None),
)
OPTIONS = ("--num-blocks", "512", "--served-model-name", "octavo")
TIMEOUT_S = 240
_VERSION = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "clients")
    parser.add_argument("--only", nargs="+", choices=[name for name, *_ in CLIENTS])
    arguments = parser.parse_args()
    rows, failures = [], []
    for name, package, environment, model in CLIENTS:
        if arguments.only and name not in arguments.only:
            continue
        python = arguments.environments.absolute() / environment / "bin" / "python"
        version = _output([str(python), "-c", _VERSION, package]).strip()
        begun = time.monotonic()
        outcome, detail, left = _run(python, name, model)
        rows.append([package, version, outcome, f"{time.monotonic() - begun:.0f}", detail])
        print(name, outcome, detail, flush=True)
        if outcome != "ok":
            failures.append(f"{name}: {detail}")
        failures += [f"{name}: left {left}"] if left else []
    print(table(["client", "version", "outcome", "s", "what it did"], rows))
    return report("clients", {"rows": rows, "failures": failures}, arguments)


def _run(python: Path, name: str, model: str | None) -> tuple[str, str, dict[str, float]]:
    """Run a client against a server of its own; return the outcome, its last line, and what is left."""
    with ServerProcess(*OPTIONS, model=model) as server, tempfile.TemporaryDirectory() as folder:
        tokenizer = write_model(Path(folder))
        config = tokenizer / "tokenizer_config.json"
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config.write_text(json.dumps(json.loads(config.read_text()) | kind))
        command = [str(python), str(HERE / f"with_{name}.py"), server.url, folder]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "hangs", f"no end after {TIMEOUT_S} s", server.leftovers()
        if done.returncode != 0:
            print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
            return "fails", (done.stderr.strip().splitlines() or ["no message"])[-1][:200], server.leftovers()
        return "ok", done.stdout.strip().splitlines()[-1], server.leftovers()


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
