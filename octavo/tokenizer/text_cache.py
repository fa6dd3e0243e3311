"""An LRU cache of texts, bounded in bytes."""

import sys
import threading
from collections import OrderedDict


class TextCache:
    """Keeps texts by the bytes they were made from. Threads may share it.

    Args:
        max_bytes: limit for keys and texts together. An entry above a quarter of it is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> str | None:
        """Return the text of a key, or None."""
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
