"""Progress bars: one small surface over rich, which is imported only when a bar is shown."""

from types import TracebackType
from typing import Protocol


class Progress(Protocol):
    """Something that can be told how far a job is."""

    def set(self, completed: int, total: int) -> None:
        """Report `completed` of `total`."""
        ...


class RichProgress:
    """A progress bar on standard error; does nothing unless enabled."""

    def __init__(self, description: str, *, enabled: bool) -> None:
        self._bar = None
        if enabled:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(description, total=None)

    def __enter__(self) -> "RichProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def set(self, completed: int, total: int) -> None:
        """Report `completed` of `total`."""
        if self._bar:
            self._bar.update(self._task, completed=completed, total=total)

    def set_task(self, description: str, completed: int, total: int) -> None:
        """Report `completed` of `total`, of what is under way now."""
        if self._bar:
            self._bar.update(self._task, description=description, completed=completed, total=total)
