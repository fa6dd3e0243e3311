"""The compile cache: what is trusted, what is refused, and what a machine without a compiler is told."""

import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.attention.cpu.c_calls import ATTENTION
from octavo.kernels.c import compiler as cpu_compile
from octavo.kernels.c.compiler import (
    KernelUnavailableError,
    Library,
    cache_folder,
    load_library,
    openmp_library,
)


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octavo"


@pytest.fixture
def instant_compiler(monkeypatch):
    """Instead of compiling, write what the fake compiler was asked for; loading is recorded."""
    commands, loaded = [], []

    def run(command):
        commands.append(command)
        if "-o" in command:
            Path(command[-1]).write_bytes(b"library")
        return "#define __VERSION__ 1"

    monkeypatch.setattr(cpu_compile, "_run", run)
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    return commands, loaded


def test_a_private_folder_is_made_and_the_library_is_reused(cache_home, instant_compiler):
    commands, loaded = instant_compiler
    load_library(ATTENTION)
    assert cache_home.stat().st_mode & 0o777 == 0o700
    compilations = len(commands)
    load_library(ATTENTION)
    assert len(commands) == compilations, "no compiler is needed"
    assert loaded[0] == loaded[1]
    assert os.listdir(cache_home) == [Path(loaded[0]).name], "no work folder stays behind"


def test_another_compiler_or_cpu_is_another_library(cache_home, instant_compiler, monkeypatch):
    _, loaded = instant_compiler
    load_library(ATTENTION)
    monkeypatch.setenv("CC", "another-compiler")
    load_library(ATTENTION)
    assert loaded[0] != loaded[1]


CPUINFO = "processor\t: 0\ncpu MHz\t\t: {mhz}\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\nflags\t\t: {mhz}\n"


def test_the_cpu_is_told_by_its_features_not_by_its_clock(
    cache_home, instant_compiler, monkeypatch, tmp_path
):
    """Machines that share a home folder must not run each other's code."""
    _, loaded = instant_compiler
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu_compile, "_CPUINFO", cpuinfo)
    for mhz, flags in ((2400, "avx2"), (3100, "avx2"), (2400, "avx512f")):
        cpuinfo.write_text(CPUINFO.format(mhz=mhz, flags=flags))
        load_library(ATTENTION)
    assert loaded[0] == loaded[1] != loaded[2]


@pytest.mark.parametrize("text", [None, "processor\t: 0\nisa\t: rv64imafdc\n"])
def test_elsewhere_the_compiler_tells_the_cpu(cache_home, instant_compiler, monkeypatch, tmp_path, text):
    commands, _ = instant_compiler
    monkeypatch.setattr(cpu_compile, "_CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    load_library(ATTENTION)
    assert [command for command in commands if "-dM" in command]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(cache_home, instant_compiler, mode):
    cache_home.mkdir()
    cache_home.chmod(mode)
    with pytest.raises(KernelUnavailableError, match="can be changed by other users; run: chmod go-w"):
        load_library(ATTENTION)
    assert instant_compiler[1] == []


def test_a_folder_of_another_user_is_refused(cache_home, instant_compiler, monkeypatch):
    cache_home.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(cache_home, 54321, 54321)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(KernelUnavailableError, match="belongs to user"):
        load_library(ATTENTION)
    assert instant_compiler[1] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of root")
def test_files_of_root_are_used(cache_home, instant_compiler, monkeypatch):
    """As in an image that was built by root and runs as somebody else."""
    load_library(ATTENTION)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    load_library(ATTENTION)
    assert len(instant_compiler[1]) == 2


def test_a_folder_that_cannot_be_written_says_so(cache_home, instant_compiler, monkeypatch):
    def refuse(**_):
        raise PermissionError("Read-only file system")

    monkeypatch.setattr(cpu_compile.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(KernelUnavailableError, match=r"cannot be used .*Read-only file system"):
        load_library(ATTENTION)


def test_a_umask_for_groups_changes_nothing(cache_home, instant_compiler):
    """Where users have a group each, all their files may be written by the group."""
    previous = os.umask(0o002)
    try:
        load_library(ATTENTION)
        load_library(ATTENTION)
    finally:
        os.umask(previous)
    assert [path.stat().st_mode & 0o777 for path in (cache_home, *cache_home.iterdir())] == [0o700, 0o700]


@pytest.mark.parametrize("planted", ["pipe", "folder", "group"])
def test_what_is_no_file_of_our_own_is_not_loaded(cache_home, instant_compiler, planted):
    load_library(ATTENTION)
    library = cache_home / os.listdir(cache_home)[0]
    if planted == "group":
        library.chmod(0o720)
    else:
        library.unlink()
        (os.mkfifo if planted == "pipe" else os.mkdir)(library, 0o700)
    with pytest.raises(KernelUnavailableError, match=r"is no file; remove it|can be changed by other users"):
        load_library(ATTENTION)
    assert len(instant_compiler[1]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_library_of_another_user_is_not_loaded(cache_home, instant_compiler):
    load_library(ATTENTION)
    os.chown(cache_home / os.listdir(cache_home)[0], 12345, 12345)
    with pytest.raises(KernelUnavailableError, match="belongs to user 12345"):
        load_library(ATTENTION)
    assert len(instant_compiler[1]) == 1


def test_a_linked_folder_is_refused(cache_home, instant_compiler, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache_home.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KernelUnavailableError, match="is a link or a file; remove it"):
        load_library(ATTENTION)


@pytest.mark.parametrize("planted", ["writable", "link"])
def test_a_library_that_others_can_change_is_refused(cache_home, instant_compiler, planted):
    load_library(ATTENTION)
    library = cache_home / os.listdir(cache_home)[0]
    if planted == "writable":
        library.chmod(0o722)
    else:
        library.rename(cache_home / "moved")
        library.symlink_to(cache_home / "moved")
    with pytest.raises(KernelUnavailableError, match="can be changed by other users"):
        load_library(ATTENTION)
    assert len(instant_compiler[1]) == 1


def test_a_damaged_library_says_what_to_do(cache_home, instant_compiler, monkeypatch):
    load_library(ATTENTION)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home.parent))
    monkeypatch.setattr(cpu_compile, "_fingerprint", lambda *_: os.listdir(cache_home)[0][10:-3])
    with pytest.raises(KernelUnavailableError, match=r"does not load .*; delete it to compile again"):
        load_library(ATTENTION)


def test_a_relative_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/octavo")


def test_a_compiler_may_have_arguments(cache_home, monkeypatch, tmp_path):
    (tmp_path / "one.c").write_text("int one(void) { return ONE; }\n")
    one = Library("one", (tmp_path / "one.c",), ())
    monkeypatch.setenv("CC", f"env {os.environ.get('CC', 'cc')} -DONE=1")
    assert load_library(one).one() == 1
    (tmp_path / "one.c").write_text("int one(void) { return 2; }\n")
    monkeypatch.setenv("CC", "")
    assert load_library(one).one() == 2
    assert len(os.listdir(cache_home)) == 2


def test_a_failed_compilation_shows_the_compiler_message(cache_home, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(KernelUnavailableError, match="the C compiler failed: false"):
        load_library(ATTENTION)


SCRIPT = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
from octavo.attention import KVCache, available_impls, store_kv
from octavo.errors import ConfigError
cache = KVCache.allocate(num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8)
k = torch.ones(1, 1, 8)
for _ in range(3):
    store_kv(k, k, cache.layer(0), torch.tensor([5]))
assert torch.equal(cache.layer(0).k[1, 1], k[0])
print(available_impls("cpu", torch.float32)["c"])
try:
    store_kv(k, k, cache.layer(0), torch.tensor([5]), impl="c")
except ConfigError as error:
    print(error)
"""


def test_without_a_compiler_torch_takes_over_with_one_warning(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "CC": "cc"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    reason, refusal = done.stdout.splitlines()
    assert reason == "no C compiler 'cc' found; install gcc, or name another in $CC"
    assert refusal.startswith(f'attention impl "c" cannot run: {reason}')
    assert done.stderr.count("WARNING attention runs in PyTorch") == 1
    assert done.stderr.count("WARNING") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_without_a_compiler_what_was_compiled_before_is_used(tmp_path):
    """As in an image that octavo compile has filled, and that has no compiler when it runs."""
    script = "from octavo.attention.cpu import c_calls; print(c_calls.load_library(c_calls.ATTENTION)._name)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    command = [sys.executable, "-c", script]
    compiled = run(command, env=environment).stdout
    found = run(command, env={**environment, "PATH": str(tmp_path)}).stdout
    assert compiled == found
    assert str(tmp_path) in found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_openmp_runtime_in_the_process():
    """Two would spin against each other for the cores."""
    if openmp_library() is None:
        pytest.skip("torch brings no OpenMP runtime along")
    load_library(ATTENTION)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "omp" in Path(line.split()[-1]).name}) == 1
