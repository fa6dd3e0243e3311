"""The folder of compiled kernels: checked before it is used."""

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from triton import knobs

from octavo.engine.gpu.kernel_cache import KernelCache, sources_digest
from octavo.errors import ConfigError


@pytest.fixture(autouse=True)
def kept_folder() -> object:
    folder = knobs.cache.dir
    yield
    knobs.cache.dir = folder


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


def test_the_default_is_tritons(tmp_path: Path) -> None:
    knobs.cache.dir = str(tmp_path)
    assert KernelCache(None).folder == tmp_path


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"others could put kernels .* kernel_cache_dir"):
        KernelCache(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(ConfigError, match="owner 12345"):
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
