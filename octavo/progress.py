"""Progress bars. rich is imported only when a bar is shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], None]
"""Takes (what is being done, how much of it is done, how much there is)."""


@contextmanager
def progress_bar(description: str, *, enabled: bool) -> Iterator[Report]:
    """Show a progress bar on standard error if enabled; yield the function that moves it."""
    if not enabled:
        yield lambda what, completed, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda what, completed, total: bar.update(
            task, description=what, completed=completed, total=total
        )
