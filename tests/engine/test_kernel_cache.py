"""The folder of compiled kernels: checked before it is used."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from triton import knobs
from triton.runtime.cache import CacheManager, get_cache_manager

from octavo.engine.gpu.kernel_cache import KernelCache, sources_digest
from octavo.errors import ConfigError


@pytest.fixture(autouse=True)
def kept_folder() -> object:
    folder, manager = knobs.cache.dir, knobs.cache.manager_class
    yield
    knobs.cache.dir, knobs.cache.manager_class = folder, manager


def test_a_new_folder_is_made_for_its_owner_alone_and_used(tmp_path: Path) -> None:
    cache = KernelCache(str(tmp_path / "deep" / "kernels"))
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert knobs.cache.dir == str(cache.folder)
    (cache.folder / "kernel").write_bytes(b"12345")
    assert cache.num_bytes == 5


def test_files_that_vanish_while_they_are_counted_do_not_count(tmp_path: Path) -> None:
    """Triton removes its temporary files while another process starts."""
    cache = KernelCache(str(tmp_path))
    (tmp_path / "kernel").write_bytes(b"12345")
    (tmp_path / "tmp.pid_1").symlink_to(tmp_path / "gone")
    assert cache.num_bytes == 5


def test_the_default_is_what_triton_was_told(tmp_path: Path) -> None:
    knobs.cache.dir = str(tmp_path)
    assert KernelCache(None).folder == tmp_path


def test_else_it_is_beside_the_kernels_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the umask lets the group write, Triton's own folder would be refused."""
    knobs.cache.dir = knobs.cache.get_triton_dir("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    previous = os.umask(0o002)
    try:
        folder = KernelCache(None).folder
    finally:
        os.umask(previous)
    assert folder == tmp_path / "home" / "octavo" / "triton"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kernels").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="kernels is a link or a file; remove it"):
        KernelCache(str(tmp_path / "kernels"))


@pytest.fixture
def manager(tmp_path: Path) -> Callable[[], CacheManager]:
    """What Triton asks for a kernel's files."""
    KernelCache(str(tmp_path / "kernels"))
    return lambda: get_cache_manager("00ff")


def store(manager: CacheManager) -> str:
    path = manager.put(b"code", "kernel.cubin")
    manager.put_group("kernel.json", {"kernel.cubin": path})
    return path


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077, 0o000])
def test_kernels_are_found_again_whatever_the_umask(manager: Callable[[], CacheManager], umask: int) -> None:
    previous = os.umask(umask)
    try:
        path = store(manager())
    finally:
        os.umask(previous)
    assert manager().get_file("kernel.cubin") == path
    assert manager().get_group("kernel.json") == {"kernel.cubin": path}
    assert not any(entry.stat().st_mode & 0o022 for entry in Path(path).parents[1].rglob("*"))


def by_anybody(path: Path) -> None:
    path.chmod(0o666)


def by_the_group(path: Path) -> None:
    path.chmod(0o620)


def a_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def another_users(path: Path) -> None:
    os.chown(path, 12345, 12345)


PLANTED = [by_anybody, by_the_group, a_link, a_pipe, *([another_users] if os.geteuid() == 0 else [])]


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("name", ["kernel.cubin", "__grp__kernel.json"])
def test_files_that_others_could_have_written_are_compiled_again(
    manager: Callable[[], CacheManager], name: str, plant: Callable[[Path], None]
) -> None:
    path = Path(store(manager()))
    plant(path.with_name(name))
    assert manager().get_group("kernel.json") is None
    if name == "kernel.cubin":
        assert manager().get_file(name) is None
    if plant is not a_pipe:
        # As Triton does then: the new files take the place of the old ones.
        store(manager())
        assert manager().get_group("kernel.json") == {"kernel.cubin": str(path)}


def test_a_group_leads_nowhere_else(manager: Callable[[], CacheManager], tmp_path: Path) -> None:
    store(manager())
    (tmp_path / "planted").write_bytes(b"code")
    manager().put_group("kernel.json", {"kernel.cubin": str(tmp_path / "planted")})
    assert manager().get_group("kernel.json") is None


@pytest.mark.parametrize("plant", [lambda path: path.chmod(0o777), a_link])
def test_a_kernels_folder_that_others_could_have_filled_is_refused(
    manager: Callable[[], CacheManager], plant: Callable[[Path], None]
) -> None:
    plant(Path(store(manager())).parent)
    with pytest.raises(ConfigError, match=r"can be changed by other users|is a link"):
        manager()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=r"others could put kernels .* kernel_cache_dir"):
        KernelCache(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        KernelCache(str(tmp_path))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        KernelCache(str(tmp_path / "file" / "kernels"))


def test_a_job_is_complete_once_it_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: "a GPU")
    cache = KernelCache(str(tmp_path))
    assert not cache.is_complete(("shape", 1))
    cache.note_complete(("shape", 1))
    assert cache.is_complete(("shape", 1))
    assert not cache.is_complete(("shape", 2))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: "another GPU")
    assert not cache.is_complete(("shape", 1))


def test_sources_have_a_digest() -> None:
    assert len(sources_digest()) == 16
    assert int(sources_digest(), 16) >= 0


def test_a_library_that_another_process_stored_is_not_replaced(tmp_path: Path) -> None:
    """CPython would take the next library with the old one's inode for this one."""
    KernelCache(str(tmp_path))
    cache = get_cache_manager("a" * 64)
    path = Path(cache.put(b"first", "launcher.so"))
    inode = path.stat().st_ino
    assert cache.put(b"second", "launcher.so") == str(path)
    assert (path.stat().st_ino, path.read_bytes()) == (inode, b"first")
    assert [each.name for each in path.parent.iterdir() if ".so" in each.name] == ["launcher.so"]
    assert Path(cache.put(b"other", "kernel.json")).read_bytes() == b"other"
    assert Path(cache.put(b"newer", "kernel.json")).read_bytes() == b"newer"


def test_a_library_that_others_could_have_written_is_replaced(tmp_path: Path) -> None:
    KernelCache(str(tmp_path))
    cache = get_cache_manager("b" * 64)
    path = Path(cache.put(b"theirs", "launcher.so"))
    path.chmod(0o777)
    assert not cache.has_file("launcher.so")
    assert Path(cache.put(b"ours", "launcher.so")).read_bytes() == b"ours"
    assert path.stat().st_mode & 0o777 == 0o755 & path.stat().st_mode
