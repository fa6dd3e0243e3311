"""Fields that the quantization_configs of several formats have."""

import re

from octavo.errors import FileFormatError
from octavo.models.config_fields import ConfigFields


def read_block(fields: ConfigFields, name: str) -> tuple[int, int]:
    """Return the rows and columns of a tile that shares a scale.

    Raises:
        FileFormatError: the field is not two positive integers.
    """
    value = fields.get(name)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(each) is int and 0 < each < 2**20 for each in value)
    ):
        raise fields.error(name, "two positive integers, such as [128, 128]", value)
    return value[0], value[1]


def read_group_size(fields: ConfigFields) -> int:
    """Return group_size: columns, or -1 for all.

    Raises:
        FileFormatError: it is missing, or something else.
    """
    value = fields.get("group_size")
    return -1 if type(value) is int and value == -1 else fields.integer("group_size", maximum=2**20)


def check_patterns(fields: ConfigFields, name: str) -> None:
    """Check a list of layers that are, or are not, quantised: names, and patterns that begin with "re:".

    Which layers they are is seen from the types of their tensors.

    Raises:
        FileFormatError: it is not a list of strings, or a pattern does not compile.
    """
    value = fields.get(name)
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise fields.error(name, "a list of names of layers", value)
    for each in value:
        if each.startswith("re:"):
            try:
                re.compile(each.removeprefix("re:"))
            except re.error as error:
                raise FileFormatError(f"{fields.where}: {name}: {each!r} is no pattern: {error}") from error
