"""Drops from a body what asks for nothing: nulls of fields that need not be there, and of unknown ones."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect


def without_nulls(value: Any, kind: type[msgspec.Struct]) -> Any:
    """Return a decoded body without such nulls, in the structs within it, too.

    Args:
        value: JSON, decoded.
        kind: what it is to become.
    """
    return _pruned(value, _type_of(kind))


@lru_cache(maxsize=64)
def _type_of(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _pruned(value: Any, kind: inspect.Type) -> Any:
    if isinstance(kind, inspect.Metadata):
        return _pruned(value, kind.type)
    if isinstance(kind, inspect.UnionType):
        return _of_union(value, kind)
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        return _struct(value, {field.encode_name: field for field in kind.fields})
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        return [_pruned(item, kind.item_type) for item in value]
    return value


def _of_union(value: Any, kind: inspect.UnionType) -> Any:
    """Prune a value as the one type of a union that it can be, structs by their tags."""
    tags = {part.tag: part for part in kind.types if isinstance(part, inspect.StructType)}
    lists = [part for part in map(_bare, kind.types) if isinstance(part, inspect.ListType)]
    if isinstance(value, list) and lists:
        return _pruned(value, lists[0])
    if isinstance(value, dict) and tags:
        tag = value.get("type")
        return _pruned(value, tags.get(tag if isinstance(tag, str) else None) or next(iter(tags.values())))
    return value


def _takes_null(kind: inspect.Type) -> bool:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return any(isinstance(part, inspect.NoneType | inspect.AnyType) for part in kinds)


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _struct(value: Mapping[str, Any], fields: Mapping[str, inspect.Field]) -> dict[str, Any]:
    return {
        name: item if name not in fields else _pruned(item, fields[name].type)
        for name, item in value.items()
        if item is not None or (name in fields and (fields[name].required or _takes_null(fields[name].type)))
    }
