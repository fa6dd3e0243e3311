"""The signature of a block of thinking: says that the text is whole, or carries it if the client wants none.

It is no secret. A client may send any thinking, signed or not; what a damaged signature carries is left out.
"""

import hmac
from base64 import b64decode, b64encode
from hashlib import sha256

_KEY = b"octavo thinking 1"


def signed(thinking: str, *, carries: bool) -> str:
    """Return the signature of a text.

    Args:
        thinking: the text.
        carries: the signature carries the text, too.
    """
    text = thinking.encode("utf-8", "surrogatepass")
    return b64encode(_mark(text) + (text if carries else b"")).decode()


def carried(signature: str) -> str:
    """Return the text that a signature carries; empty if it carries none, is damaged or not ours."""
    try:
        sealed = b64decode(signature, validate=True)
        mark, text = sealed[: sha256().digest_size], sealed[sha256().digest_size :]
        return text.decode() if hmac.compare_digest(mark, _mark(text)) else ""
    except ValueError:
        return ""


def _mark(text: bytes) -> bytes:
    return hmac.digest(_KEY, text, sha256)
