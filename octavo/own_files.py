"""Checks, on the descriptor that is read, that nobody else could have written a trusted file.

A file is the user's own if it belongs to the user or to root, and nobody else may write to it. Links to a
file that a user hands over are followed if they are the user's own, too: anybody may make one in /tmp.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import ConfigError

MAX_KEY_FILE_BYTES = 1 << 20
_MAX_LINKS = 40


def foreign_because(path: Path | str, status: os.stat_result) -> str | None:
    """Return why a file or folder is not the user's own, with what to do; None: it is."""
    # An image's files may be root's, which may replace anything anyway.
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {status.st_uid}, not to you; chown it, or remove it"
    if status.st_mode & 0o022:
        return f"{path} can be changed by other users; run: chmod go-w {path}"
    return None


def make_own_folder(path: Path) -> None:
    """Make a folder for the user alone, or check the one that is there. Its own name may not be a link.

    Raises:
        OSError: it cannot be made or opened.
        ConfigError: it is a link or a file, or others own it or can change it.
    """
    # The mode holds even where the umask would let the group write.
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with opened_own(path, os.O_DIRECTORY):
        pass


@contextmanager
def opened_own(path: Path, flags: int = 0) -> Iterator[int]:
    """Open a file or folder for reading, and give its descriptor, if it is the user's own and no link.

    Args:
        path: of it.
        flags: further ones: os.O_DIRECTORY for a folder.

    Raises:
        OSError: it cannot be opened.
        ConfigError: it is a link or of another kind, or others own it or can change it.
    """
    try:
        # O_NONBLOCK: nobody may write to a pipe that was put there.
        wanted = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | flags
        descriptor = os.open(path, wanted)
    except OSError as error:
        if error.errno == errno.ENOTDIR and flags & os.O_DIRECTORY and os.path.lexists(path):
            raise ConfigError(f"{path} is a link or a file; remove it") from error
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, which can be changed by other users; remove it") from error
        raise
    try:
        status = os.fstat(descriptor)
        is_right = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
        reason = (
            foreign_because(path, status) if is_right(status.st_mode) else f"{path} is no file; remove it"
        )
        if reason is not None:
            raise ConfigError(reason)
        yield descriptor
    finally:
        os.close(descriptor)


def read_own_file(path: Path, what: str, max_bytes: int) -> str:
    """Read a text file that decides what a command does, without a byte order mark.

    Args:
        path: the file.
        what: its name in messages.
        max_bytes: larger files are refused.

    Raises:
        ConfigError: it cannot be read, is no file, is too large, or others own it or can change it.
        UnicodeDecodeError: it is not UTF-8.
    """
    return _read(path, what, max_bytes, os.O_NONBLOCK, is_secret=False)


def read_key_lines(path: Path) -> list[str]:
    """Return the keys in a file or pipe: one a line, without empty lines and lines that begin with #.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, others own it, or others can read or change it.
    """
    what = f"api_key_file {path}"
    try:
        text = _read(path, what, MAX_KEY_FILE_BYTES, 0, is_secret=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} cannot be read: {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def check_secret(path: Path, what: str) -> None:
    """Check a file with a secret that a library will read, such as a private key.

    Raises:
        ConfigError: as read_key_lines.
    """
    try:
        _check_links(path, what)
        _check_file(path, what, os.stat(path), is_secret=True)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from error


def _read(path: Path, what: str, max_bytes: int, flags: int, *, is_secret: bool) -> str:
    try:
        _check_links(path, what)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            _check_file(path, what, os.fstat(descriptor), is_secret=is_secret)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{what} must hold at most {max_bytes} bytes")
    return data.decode("utf-8-sig")


def _check_file(path: Path, what: str, status: os.stat_result, *, is_secret: bool) -> None:
    mode = status.st_mode
    if not stat.S_ISREG(mode) and not (is_secret and stat.S_ISFIFO(mode)):
        raise ConfigError(
            f"{what} must be a file, got a {'folder' if stat.S_ISDIR(mode) else 'device or pipe'}"
        )
    reason = foreign_because(path, status)
    if reason is not None:
        raise ConfigError(f"{what} is not trusted: {reason}")
    if is_secret and mode & stat.S_IROTH:
        raise ConfigError(f"{what} can be read by every user of this machine; run: chmod o-r {path}")


def _check_links(path: Path, what: str) -> None:
    """Refuse a path whose last part is a link of another user."""
    for _ in range(_MAX_LINKS):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            # The link of an open pipe leads to no name.
            return
        if not stat.S_ISLNK(status.st_mode):
            return
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{what} is not trusted: the link {path} belongs to user {status.st_uid}")
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
