"""Admits requests before a byte of their bodies is read, in a server and in the front of replicas."""

import hashlib
import hmac
import ipaddress
import random
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import msgspec

from octavo.server.api.structs import RequestId
from octavo.server.api_errors import ApiError
from octavo.server.config import ServerConfig

Scope = MutableMapping[str, Any]
Headers = Mapping[bytes, bytes]

_OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready"})
# The page's files, which are the same for everybody.
_PAGE = "/page/"
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
# If one of these came twice, a proxy and this server could believe different ones.
_ONCE = (
    b"host",
    b"authorization",
    b"x-api-key",
    b"content-type",
    b"content-length",
    b"origin",
    b"sec-fetch-site",
)
# Methods that change nothing.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class KeyRing:
    """The keys that clients may send: only their digests are kept, and comparing takes constant time."""

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
        # There is no early exit, so the time says nothing about which key was close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if any(matches) else None


def isolated_salt(holder: bytes, cache_salt: str) -> str:
    """Return a cache salt that requests with other keys cannot have, whichever salt they send."""
    return hmac.new(holder, cache_salt.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"octavo api key\0" + key).digest()


class Door:
    """Lets requests in by their host, the page they come from, and their key.

    Raises:
        ConfigError: the keys cannot be read.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._keys = KeyRing(config.read_keys())
        self._open_paths = _OPEN_PATHS | ({"/metrics"} if config.public_metrics else set())
        self._named_hosts = {host.lower() for host in config.allowed_hosts}
        self._hosts = _LOCAL_HOSTS | {config.host.lower()} | self._named_hosts
        # Without a key, a page in a browser could reach a local server under its own name (DNS rebinding).
        self._checks_host = config.is_local and not self._keys and "*" not in self._named_hosts
        # The system's own random numbers (uuid4) would give the interpreter to another thread for each.
        self._ids = random.Random()

    def check(self, scope: Scope, path: str, headers: Headers) -> None:
        """Let a request in, and note in its scope who sent it.

        Args:
            scope: gets octavo.request_id, the client's or a new one; octavo.holder, the digest of its key or
                None; and octavo.sender, the key or address whose requests share resources.
            path: without the prefix of all routes.
            headers: the scope's headers, by names in lower case.

        Raises:
            ApiError: 400 a header that may come once came twice, 401 no valid key, 403 another server's name,
                or a foreign page.
        """
        scope["octavo.request_id"] = self._request_id(headers.get(b"x-request-id"))
        scope["octavo.holder"] = None
        if len(headers) < len(scope["headers"]):
            _check_once([name for name, _ in scope["headers"]])
        if self._checks_host and _host(headers.get(b"host", b"")) not in self._hosts:
            raise ApiError(
                403, "this server does not answer to that Host; see allowed_hosts", code="wrong_host"
            )
        self._check_page(scope, path, headers)
        if self._keys:
            scope["octavo.holder"] = self._keys.holder(headers)
            if scope["octavo.holder"] is None and not self._is_open(path):
                raise _no_key()
        scope["octavo.sender"] = scope["octavo.holder"] or _address(scope)

    def _check_page(self, scope: Scope, path: str, headers: Headers) -> None:
        """Refuse what browsers let pages of other origins send without seeing the answer.

        Where there are keys, a page that sends one was given it. /live is for our own page only.

        Raises:
            ApiError: 403.
        """
        changes = scope["method"] not in _SAFE_METHODS and not self._keys
        if (changes or path == "/live") and self._is_foreign(headers):
            raise ApiError(
                403, "this is not for pages of another origin; see allowed_hosts", code="foreign_page"
            )

    def _is_foreign(self, headers: Headers) -> bool:
        """Return whether a page that is neither ours nor named in allowed_hosts sent a request."""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site in (b"same-origin", b"none") or (site is None and origin is None):
            return False
        where = (origin or b"").partition(b"://")[2].lower()
        # Older browsers do not send Sec-Fetch-Site.
        if site is None and where == headers.get(b"host", b"").lower():
            return False
        return "*" not in self._named_hosts and _host(where) not in self._named_hosts

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(_PAGE)

    def _request_id(self, sent: bytes | None) -> str:
        """Return the client's id if it is one, else a new one."""
        if sent is not None:
            with suppress(UnicodeDecodeError, msgspec.ValidationError):
                return msgspec.convert(sent.decode("ascii"), RequestId)
        return f"{self._ids.getrandbits(128):032x}"


def _check_once(names: list[bytes]) -> None:
    for name in _ONCE:
        if names.count(name) > 1:
            text = f"expected the header {name.decode()} once, got it {names.count(name)} times"
            raise ApiError(400, text, code="repeated_header")


def _no_key() -> ApiError:
    return ApiError(
        401,
        "expected a valid API key in the header Authorization: Bearer KEY, or x-api-key: KEY",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _address(scope: Scope) -> bytes:
    """Return a client's address; for IPv6 its network, in which a client may have any number of addresses."""
    text = str((scope.get("client") or ("",))[0])
    if ":" in text:
        with suppress(ValueError):
            address = ipaddress.IPv6Address(text.partition("%")[0])
            return str(address.ipv4_mapped).encode() if address.ipv4_mapped else address.packed[:8]
    return text.encode()


def _host(header: bytes) -> str:
    """Return the host of a Host header, without its port."""
    text = header.decode("latin-1").lower()
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    return text.partition(":")[0]
