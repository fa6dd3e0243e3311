"""Which build of PyTorch `make demo` takes, on a machine with or without a GPU, an index or a network."""

import importlib.util
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "deploy" / "install_torch.py"
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
MACHINE = platform.machine()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, on Linux without a GPU."""
    spec = importlib.util.spec_from_file_location("install_torch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.delenv("http_proxy", raising=False)
    return module


@pytest.fixture
def index(install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The page of torch on an index of builds for CPUs."""
    page = tmp_path / "torch" / "index.html"
    page.parent.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(install, "CPU_INDEX", f"http://127.0.0.1:{server.server_port}")
        yield page
        server.shutdown()


def wheel(version: str, tag: str = TAG, machine: str = MACHINE, label: str = "%2Bcpu") -> str:
    name = f"torch-{version}{label}-{tag}-{tag}-manylinux_2_28_{machine}.whl"
    return f'<a href="/whl/cpu/{name}#sha256=0">{name}</a>'


def test_a_cpu_gets_pytorchs_build_for_cpus(
    install: ModuleType, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("%2Bcpu", "+cpu", ""):
        index.write_text(wheel("2.12.0") + wheel("2.13.0", label=label))
        assert install.choose_index("2.13.0") == install.CPU_INDEX
        said = capsys.readouterr().out
        assert said.startswith("octavo: PyTorch 2.13.0 for CPUs, as there is no NVIDIA GPU, from http://")
        assert "GB to download" in said


@pytest.mark.parametrize(
    "page",
    ["", wheel("2.13.01"), wheel("2.12.0"), wheel("2.13.0", tag="cp399"), wheel("2.13.0", machine="s390x")],
)
def test_an_index_without_the_pinned_build_is_named_and_left(
    page: str, install: ModuleType, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index.write_text(page)
    assert install.choose_index("2.13.0") == "default"
    said = capsys.readouterr().out
    assert f"has no 2.13.0 for {TAG} on {MACHINE}" in said
    assert "TORCH_INDEX=URL" in said


def test_an_index_that_cannot_be_reached_is_left_loudly_and_soon(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "LOOK_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        ports = [silent.getsockname()[1], refusing.getsockname()[1]]
        for address in [*(f"127.0.0.1:{port}" for port in ports), "no-such-host.invalid"]:
            monkeypatch.setattr(install, "CPU_INDEX", f"http://{address}")
            start = time.monotonic()
            assert install.choose_index("2.13.0") == "default"
            assert time.monotonic() - start < 60
            said = capsys.readouterr().out
            assert f"NOTE: http://{address}" in said
            assert "cannot be reached" in said
            assert "5.6 GB on disk" in said


def test_gpus_and_other_systems_get_what_pip_takes_by_itself(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "why_not", lambda *args: pytest.fail("nothing is looked up"))
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: True)
    assert install.choose_index("2.13.0") == "default"
    assert "with CUDA, as there is an NVIDIA GPU" in capsys.readouterr().out
    monkeypatch.setattr(install.sys, "platform", "darwin")
    assert install.choose_index("2.13.0") == "default"


@pytest.mark.parametrize("index", ["auto", "default", "http://127.0.0.1:9/whl/cu130"])
def test_what_is_installed_stays_whatever_the_index(index: str) -> None:
    """pip would look at the network all the same where the pin has moved; here it is not even asked."""
    done = subprocess.run([sys.executable, SCRIPT, index], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_torch_comes_from_pytorchs_index(install: ModuleType) -> None:
    arguments = install.pip_arguments("http://127.0.0.1:9/whl/cpu")
    assert arguments[-4:] == ["--no-deps", "--index-url", "http://127.0.0.1:9/whl/cpu", "torch"]
    assert "--extra-index-url" not in arguments
    assert "--index-url" not in install.pip_arguments("default")


def test_an_index_that_the_user_names_is_taken_or_fails(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install, "installed_version", lambda: "2.12.0+cpu")
    monkeypatch.setattr(install.sys, "argv", ["install_torch.py", "http://127.0.0.1:9/own"])
    assert install.main() == 1
    assert "from http://127.0.0.1:9/own, as TORCH_INDEX says" in capsys.readouterr().out
    assert ran == [[sys.executable, "-m", "pip", *install.pip_arguments("http://127.0.0.1:9/own")]]
