"""Keeps answers and conversations in memory, where the server was told to: so many bytes, for so long."""

import contextlib
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import msgspec

from octavo.server.api_errors import ApiError, refused

OPTION = "octavo serve --response-store-mib keeps them"

Items = tuple[dict[str, Any], ...]


class Kept(NamedTuple):
    """An answer, or a conversation.

    Attributes:
        body: what a client that asks for it gets.
        given: the items that the answer's request gave; those of a conversation.
        items: the conversation up to the end of the answer.
    """

    body: dict[str, Any]
    given: Items
    items: Items


class _Entry(NamedTuple):
    kept: Kept
    num_bytes: int
    expires_s: float


class ResponseStore:
    """What is kept, for each key of the API apart; the oldest goes first. Any thread may use it."""

    def __init__(self, max_bytes: int, lifetime_s: float) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[bytes | None, str], _Entry] = OrderedDict()
        # Holders and bytes of each item, by its identity.
        self._held: dict[int, tuple[int, int]] = {}
        self._num_bytes = 0

    def put(self, holder: bytes | None, kept: Kept) -> None:
        """Keep something by the id in its body, instead of what was kept by it."""
        key = holder, str(kept.body["id"])
        num_bytes = len(msgspec.json.encode(kept.body))
        with self._lock:
            for item in kept.items:
                self._hold(item)
            self._drop(key)
            self._entries[key] = _Entry(kept, num_bytes, time.monotonic() + self._lifetime_s)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def get(self, holder: bytes | None, name: str) -> Kept:
        """Return what is kept for a holder of a key by an id.

        Raises:
            ApiError: 404, nothing is.
        """
        with self._lock:
            self._expire()
            found = self._entries.get((holder, name))
        if found is None:
            text = f"nothing is kept by the id {name[:200]!r}, or not any more"
            raise ApiError(404, text, param="id", code="not_found")
        return found.kept

    def items(self, holder: bytes | None, names: Set[str]) -> dict[str, dict[str, Any]]:
        """Return items by their ids, the newest of each, in one pass; those that are not kept are missing."""
        with self._lock:
            self._expire()
            kept = [entry.kept for key, entry in self._entries.items() if key[0] == holder]
        found: dict[str, dict[str, Any]] = {}
        for one in reversed(kept):
            if len(found) == len(names):
                break
            for item in one.items:
                if item["id"] in names:
                    found.setdefault(item["id"], item)
        return found

    def remove(self, holder: bytes | None, name: str) -> None:
        """Forget something. Raises as `get`."""
        self.get(holder, name)
        with self._lock:
            self._drop((holder, name))

    def _expire(self) -> None:
        now = time.monotonic()
        while self._entries and next(iter(self._entries.values())).expires_s < now:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[bytes | None, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
            for item in entry.kept.items:
                self._release(item)

    def _hold(self, item: dict[str, Any]) -> None:
        """Count an item once, however many answers share it; it stays as long as the last of them."""
        number, size = self._held.get(id(item)) or (0, len(msgspec.json.encode(item)))
        self._held[id(item)] = number + 1, size
        self._num_bytes += 0 if number else size

    def _release(self, item: dict[str, Any]) -> None:
        number, size = self._held.pop(id(item))
        if number > 1:
            self._held[id(item)] = number - 1, size
        else:
            self._num_bytes -= size


class Memory:
    """What one request of /v1/responses takes from a store, and brings there."""

    def __init__(self, store: ResponseStore, holder: bytes | None) -> None:
        self._store = store
        self._holder = holder
        self._before = self._given = Items()
        self._conversation: str | None = None
        self._previous: str | None = None
        self._keeps = True

    def recall(self, body: bytes) -> bytes:
        """Return a body with the items that it refers to. What is wrong with it is found when it is decoded.

        Raises:
            ApiError: nothing is kept by an id.
        """
        try:
            fields = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            return body
        if not isinstance(fields, dict):
            return body
        self._keeps = fields.pop("store", None) is not False
        self._refer(fields.pop("previous_response_id", None), fields.pop("conversation", None))
        given = fields.get("input")
        if isinstance(given, str):
            given = [{"type": "message", "role": "user", "content": given}]
        if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
            return msgspec.json.encode(fields)
        self._given = tuple(with_id(item) for item in self._resolved(given))
        fields["input"] = [*self._before, *self._given]
        return msgspec.json.encode(fields)

    def _refer(self, previous: object, conversation: object) -> None:
        if isinstance(conversation, dict):
            conversation = conversation.get("id")
        for field, value in (("previous_response_id", previous), ("conversation", conversation)):
            if value is not None and not isinstance(value, str):
                raise refused(field, f"must be an id, got {type(value).__name__}")
        if previous is not None and conversation is not None:
            raise refused("conversation", "and previous_response_id contradict each other; give one of them")
        name = previous or conversation
        if isinstance(name, str):
            kept, kind = (
                self._store.get(self._holder, name),
                "conversation" if previous is None else "response",
            )
            if kept.body["object"] != kind:
                raise ApiError(
                    404, f"there is no {kind} by the id {name[:200]!r}", param="id", code="not_found"
                )
            self._before = kept.items
        self._previous = previous if isinstance(previous, str) else None
        self._conversation = conversation if isinstance(conversation, str) else None

    def _resolved(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        ids = [item.get("id") if item.get("type") == "item_reference" else None for item in items]
        found = self._store.items(self._holder, {name for name in ids if isinstance(name, str)})
        return [
            found.get(name, item) if isinstance(name, str) else item
            for name, item in zip(ids, items, strict=True)
        ]

    def note(self) -> dict[str, Any]:
        """Return the fields by which an answer says what it goes on with."""
        conversation = None if self._conversation is None else {"id": self._conversation}
        return {"store": self._keeps, "previous_response_id": self._previous, "conversation": conversation}

    def keep(self, answer: msgspec.Struct) -> None:
        """Keep a finished answer, and add it to its conversation if that is still there."""
        body: dict[str, Any] = msgspec.to_builtins(answer)
        output = tuple(body["output"])
        if self._conversation is not None:
            # It may be gone since the answer began: deleted, expired, or pushed out. The answer stands.
            with contextlib.suppress(ApiError):
                grow(self._store, self._holder, self._conversation, (*self._given, *output))
        if self._keeps:
            self._store.put(self._holder, Kept(body, self._given, (*self._before, *self._given, *output)))


def grow(store: ResponseStore, holder: bytes | None, name: str, items: Items) -> None:
    """Add items to the end of a conversation. Raises as ResponseStore.get."""
    kept = store.get(holder, name)
    held = (*kept.items, *items)
    store.put(holder, Kept(kept.body, held, held))


def with_id(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item that has an id."""
    if isinstance(item.get("id"), str):
        return item
    return {**item, "id": f"{str(item.get('type', 'item'))[:40]}-{uuid.uuid4().hex}"}


def page(items: Items, *, after: str | None, limit: int, newest_first: bool) -> dict[str, Any]:
    """Return a part of a list of items, as OpenAI's API does."""
    ordered: Iterator[dict[str, Any]] = reversed(items) if newest_first else iter(items)
    if after is not None:
        for item in ordered:
            if item["id"] == after:
                break
    shown = [item for item, _ in zip(ordered, range(limit + 1), strict=False)]
    has_more, shown = len(shown) > limit, shown[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return {"object": "list", "data": shown, "has_more": has_more, "first_id": None, "last_id": None, **ends}
