"""Files and batches on disk, within bounds. Names on disk are made here; none comes from a client.

FOLDER/file-32 digits.json      what is known of a file, and who sent it
       file-32 digits.data      its content
       batch-32 digits.json     a batch
"""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from octavo.errors import ConfigError
from octavo.own_files import make_own_folder
from octavo.server.api_errors import ApiError

MAX_FILES, MAX_BATCHES, MAX_BYTES = 1000, 1000, 4 << 30
# Files and batches are removed after this time, in seconds.
KEPT_S = 30 * 24 * 3600
_ID = re.compile(r"(?:file|batch)-[0-9a-f]{32}")

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]


class FileObject(Struct, kw_only=True):
    """A file, as OpenAI describes it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class Counts(Struct):
    """How many requests a batch has, and how they went."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Struct, kw_only=True):
    """A batch, as OpenAI describes it."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None
    errors: dict[str, Any] | None = None

    def turn(self, status: Status) -> None:
        """Note that it has a status from now on."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


class Kept(Struct):
    """A file or batch on disk, and the digest of the key of its sender, who alone sees it."""

    holder: str
    file: FileObject | None = None
    batch: BatchObject | None = None

    @property
    def created_at(self) -> int:
        found = self.file or self.batch
        return 0 if found is None else found.created_at


class Key(NamedTuple):
    """What a list remembers of a file or a batch. It sorts by age."""

    created_at: int
    id: str
    holder: str


Found = TypeVar("Found", FileObject, BatchObject)


class Store:
    """The folder. Its methods block for a disk's time.

    Raises:
        ConfigError: the folder cannot be made, or is another user's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            make_own_folder(folder)
        except OSError as error:
            raise ConfigError(f"batch_dir must be a folder of your own, got {folder}: {error}") from error

    def upload(self, holder: str, filename: str, content: bytes) -> FileObject:
        """Keep a file of a client's.

        Raises:
            ApiError: 413, there are too many or they are too large.
        """
        self.check_room(len(content))
        path = self.path(_new_id("file"))
        path.write_bytes(content)
        return self.adopt(holder, filename, "batch", path)

    def check_room(self, num_bytes: int = 0) -> None:
        """Check that there is room for one more file of a size. Raises as `upload`."""
        sizes = [one.file.bytes for one in self._all("file") if one.file is not None]
        if len(sizes) >= MAX_FILES or sum(sizes) + num_bytes > MAX_BYTES:
            text = f"the server keeps at most {MAX_FILES} files of {MAX_BYTES} bytes in all; delete some"
            raise ApiError(413, text, code="too_many_files")

    def adopt(self, holder: str, filename: str, purpose: str, path: Path) -> FileObject:
        """Keep a file that is in the folder already."""
        now = int(time.time())
        file = FileObject(
            id=_new_id("file"),
            bytes=path.stat().st_size,
            created_at=now,
            expires_at=now + KEPT_S,
            filename=filename[:255],
            purpose=purpose,
        )
        os.replace(path, self.path(file.id))
        self._write(file.id, Kept(holder, file=file))
        return file

    def add_batch(self, holder: str, batch: dict[str, Any]) -> BatchObject:
        """Keep a new batch.

        Raises:
            ApiError: 429, there are too many that are not over.
        """
        num_kept = len(self.keys(BatchObject, lambda _, one: True))
        if num_kept >= MAX_BATCHES:
            # Nobody can delete a batch, so the oldest one that is over makes room.
            over = self.keys(BatchObject, lambda _, one: one.is_over)
            if not over:
                text = f"the server keeps at most {MAX_BATCHES} batches"
                raise ApiError(429, text, code="too_many_batches")
            self.remove(over[-1].id)
        now = int(time.time())
        found = BatchObject(id=_new_id("batch"), created_at=now, expires_at=now + 24 * 3600, **batch)
        self.save(holder, found)
        return found

    def save(self, holder: str, batch: BatchObject) -> None:
        """Write what has changed in a batch."""
        self._write(batch.id, Kept(holder, batch=batch))

    def get(self, holder: str, name: str, kind: type[Found]) -> Found:
        """Return a file or a batch of a sender.

        Raises:
            ApiError: 404.
        """
        kept = self._read(name) if _ID.fullmatch(name) else None
        found = None if kept is None or kept.holder != holder else kept.file or kept.batch
        if not isinstance(found, kind):
            raise ApiError(404, f"there is no {kind.__name__[:-6].lower()} {name[:100]!r}", code="not_found")
        return found

    def keys(self, kind: type[Found], is_wanted: Callable[[str, Found], bool]) -> list[Key]:
        """Return the keys of the files or batches that are wanted, the newest first.

        Only one file or batch is in memory at a time: threads that each decode a thousand would never give
        their memory back.

        Args:
            kind: what to list.
            is_wanted: gets the sender, and a file or a batch.
        """
        found = list[Key]()
        for kept in self._all(kind.__name__[:-6].lower()):
            one = kept.file or kept.batch
            if isinstance(one, kind) and is_wanted(kept.holder, one):
                found.append(Key(one.created_at, one.id, kept.holder))
        return sorted(found, reverse=True)

    def described(self, holder: str, names: Sequence[str], kind: type[Found]) -> list[Found]:
        """Return a sender's files or batches by their names, without those that have just been removed."""
        kept = [self._read(name) for name in names]
        found = [one.file or one.batch for one in kept if one is not None and one.holder == holder]
        return [one for one in found if isinstance(one, kind)]

    def path(self, name: str) -> Path:
        """Return the path of a file's content; `name` is an id of ours."""
        return self._folder / f"{name}.data"

    def remove(self, name: str) -> None:
        """Remove a file or a batch, by an id of ours. Idempotent."""
        for end in (".json", ".data", ".out.data", ".err.data"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._folder}/{name}{end}")

    def _described(self, name: str) -> str:
        # This is text, as a Path interns its name. After some 40,000 names Python builds its table of
        # interned texts anew, which takes megabytes that stay with the thread that happens to do it.
        return f"{self._folder}/{name}.json"

    def _all(self, prefix: str) -> Iterator[Kept]:
        """Yield what is kept, and remove what is too old."""
        for file in os.listdir(self._folder):
            name, end = os.path.splitext(file)
            is_one = end == ".json" and name.startswith(prefix) and _ID.fullmatch(name)
            kept = self._read(name) if is_one else None
            if kept is not None and kept.created_at + KEPT_S < time.time():
                self.remove(name)
            elif kept is not None:
                yield kept

    def _read(self, name: str) -> Kept | None:
        try:
            with open(self._described(name), "rb") as file:
                return msgspec.json.decode(file.read(), type=Kept)
        except (OSError, msgspec.MsgspecError):
            # Another request may have removed it; a file that is none of ours is none.
            return None

    def _write(self, name: str, kept: Kept) -> None:
        path = self._described(name)
        beside = f"{path}.{secrets.token_hex(4)}"
        with open(beside, "wb") as file:
            file.write(msgspec.json.encode(kept))
        os.replace(beside, path)


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"
