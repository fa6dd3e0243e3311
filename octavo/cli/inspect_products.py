"""`octavo inspect --products`: what multiplies each of a model's matrices, by numbers of rows, and why."""

import re
from collections.abc import Iterator

from octavo.config import EngineConfig
from octavo.engine.memory.products import PartProducts, part_products
from octavo.errors import ConfigError
from octavo.gemm.product import MANY
from octavo.models import ModelConfig, ModelSource, stored_matrices

# Least and most rows of the groups that are printed.
_GROUPS = ((1, 1), (2, 16), (17, 256), (257, MANY))
_GENERATION = re.compile(r"(\d{1,2})(?:\.(\d))?")


def read_generation(text: str) -> tuple[int, int]:
    """Return the compute capability of a GPU that is named "9" or "8.9".

    Raises:
        ConfigError: it is no generation that kernels run on.
    """
    match = _GENERATION.fullmatch(text)
    if match is None or not int(match[1]) >= 8:
        raise ConfigError(
            f"--generation must be a compute capability from 8 on, such as 8, 8.9, 9 or 10, got {text!r}"
        )
    return int(match[1]), int(match[2] or 0)


def print_products(
    source: ModelSource, config: EngineConfig, model: ModelConfig, generation: str | None
) -> None:
    """Print a line for each kind of matrices and group of rows that has a product of its own."""
    from rich.console import Console
    from rich.table import Table

    capability = None if generation is None else read_generation(generation)
    stored = stored_matrices(source, config.load_format)
    where = "here" if generation is None else f"on a GPU of compute capability {generation}"
    table = Table("part", "weight", "rows", "product", "why", title=f"products {where}")
    for part in part_products(config, model, stored, capability):
        name, weight = part.part, part.weight
        for rows, product, why in _lines(part):
            table.add_row(name, weight, rows, product, why)
            name = weight = ""
        table.add_section()
    Console().print(table)


def _lines(part: PartProducts) -> Iterator[tuple[str, str, str]]:
    """Yield rows, product and why: for each group of rows what it has, from the least on."""
    if len(part.rows) == 1:
        yield "all", part.rows[0].product, part.rows[0].why
        return
    for least, most in _GROUPS:
        for row in part.rows:
            first, last = max(least, row.rows[0]), min(most, row.rows[1])
            if first <= last:
                yield _span(first, last), row.product, row.why


def _span(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first} and more" if last == MANY else f"{first} to {last}"
