"""API keys: only their digests are kept, and comparing takes the same time for every key."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping


class KeyRing:
    """The keys that clients may send."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holder(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the digest of the key that a request's headers have, or None if they have none of ours.

        Args:
            headers: by names in lower case: Authorization ("Bearer KEY") counts, or else X-Api-Key.
        """
        key = headers.get(b"x-api-key", b"")
        if b"authorization" in headers:
            scheme, _, key = headers[b"authorization"].partition(b" ")
            if scheme.lower() != b"bearer":
                return None
        digest = _digest(key.strip())
        # No early exit: how long it takes says nothing about which key came near.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if any(matches) else None


def isolated_salt(holder: bytes, cache_salt: str) -> str:
    """Return a cache salt that no other key's requests have, whatever they send themselves."""
    return hmac.new(holder, cache_salt.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"octavo api key\0" + key).digest()
