"""Checked access to the fields of a config.json."""

import sys
from collections.abc import Mapping, Set

from octavo.errors import FileFormatError, UnsupportedModelError, refuse_unknown

_MAX_INTEGER = 2**31


def words(*lines: str) -> frozenset[str]:
    """Return the words of some lines: names of fields."""
    return frozenset(" ".join(lines).split())


class ConfigFields:
    """A mapping whose fields are checked for type and range as they are read.

    A key that is absent or null has its family's default; a key without a default is required.
    """

    def __init__(self, fields: Mapping[str, object], defaults: Mapping[str, object], *, where: str) -> None:
        """Wrap a mapping.

        Args:
            fields: as parsed from JSON; not copied, never written.
            defaults: of keys that are absent.
            where: name for messages, such as "config.json".
        """
        self._fields = fields
        self._defaults = defaults
        self.where = where

    def get(self, name: str, default: object = None) -> object:
        """Return the field as it is if present (even null), else its family's default, else `default`."""
        return self._fields.get(name, self._defaults.get(name, default))

    def integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER
    ) -> int:
        """Return an integer in [minimum, maximum]."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(name, f"an integer in [{minimum}, {maximum}]", value)
        return value

    def number(self, name: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """Return a finite number above `minimum`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number", value)
        # An integer may be larger than any float.
        if not minimum < value <= sys.float_info.max:
            raise self.error(name, f"a finite number above {minimum:g}", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a finite positive number, or None where the field is null or absent."""
        return None if self.get(name) is None else self.number(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def mapping(self, name: str) -> Mapping[str, object]:
        """Return an object; empty where the field is null or absent, and the family has no default."""
        value = self.get(name)
        value = self._defaults.get(name) if value is None else value
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(name, "an object", value)
        return value

    def require_neutral(self, neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse fields that would change the network in a way Octavo does not support.

        Args:
            neutral: key -> values that change nothing, besides null.

        Raises:
            UnsupportedModelError: names the key and its value.
        """
        for name, values in neutral.items():
            value = self._fields.get(name)
            if value is not None and value not in values:
                raise UnsupportedModelError(f"{self.where}: {name} = {value!r} is not supported")

    def require_known(self, names: Set[str]) -> None:
        """Refuse fields that are none of the names.

        Raises:
            UnsupportedModelError: names the first one, and the nearest that is known.
        """
        refuse_unknown(UnsupportedModelError, f"{self.where}: unknown field", self._fields, names)

    def require_one_of(self, name: str, values: tuple[object, ...]) -> None:
        """Refuse a field that is none of the values; null is one only where None is.

        Raises:
            UnsupportedModelError: names the field, its value and the supported ones.
        """
        value = self.get(name)
        if not any(value is each or (type(value) is type(each) and value == each) for each in values):
            names = ", ".join(repr(each) for each in values if each is not None)
            raise UnsupportedModelError(
                f"{self.where}: {name} = {value!r} is not supported; supported: {names}"
            )

    def error(self, name: str, expected: str, value: object) -> FileFormatError:
        """Return the error for a field that is not what was expected."""
        return FileFormatError(f"{self.where}: {name} must be {expected}, got {value!r}")

    def _value(self, name: str, default: object) -> object:
        value = self.get(name)
        if value is None:
            value = self._defaults.get(name, default)
        if value is None:
            raise FileFormatError(f"{self.where}: {name} is missing")
        return value
