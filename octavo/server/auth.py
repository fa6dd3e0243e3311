"""API keys: only their digests are kept, and comparing takes the same time for every key."""

import hashlib
import hmac
from collections.abc import Iterable


class KeyRing:
    """The keys that clients may send."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holder(self, authorization: bytes | None) -> bytes | None:
        """Return the digest of the key in an Authorization header ("Bearer KEY"), or None if it is no key."""
        scheme, _, key = (authorization or b"").partition(b" ")
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
