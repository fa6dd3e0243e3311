"""The most recently used of some texts, within a number of bytes."""

import sys
import threading
from collections import OrderedDict


class TextCache:
    """Texts by the bytes that they were made of. Safe to share between threads.

    Args:
        max_bytes: of keys and texts together; the least recently used are dropped beyond it. What takes
            more than a quarter of it by itself is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> str | None:
        """The text of a key, or None."""
        with self._lock:
            if key not in self._texts:
                return None
            self._texts.move_to_end(key)
            return self._texts[key]

    def put(self, key: bytes, text: str) -> None:
        """Keep the text of a key."""
        with self._lock:
            if key in self._texts or _num_bytes(key, text) > self._max_bytes // 4:
                return
            self._texts[key] = text
            self._num_bytes += _num_bytes(key, text)
            while self._texts and self._num_bytes > self._max_bytes:
                self._num_bytes -= _num_bytes(*self._texts.popitem(last=False))


def _num_bytes(key: bytes, text: str) -> int:
    return sys.getsizeof(key) + sys.getsizeof(text)
