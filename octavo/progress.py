"""Progress bars. rich is imported only when a bar is shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(description: str, *, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error if enabled; yield a function that takes (completed, total)."""
    if not enabled:
        yield lambda completed, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda completed, total: bar.update(task, completed=completed, total=total)
