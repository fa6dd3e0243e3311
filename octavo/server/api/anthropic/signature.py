"""The signature of a block of thinking: shows that the text is whole, or carries it where none is wanted.

It is no secret, as a client may send any thinking. What a damaged one carries is left out.
"""

import hmac
from base64 import b64decode, b64encode

_KEY, _MARK_BYTES = b"octavo thinking 1", 32


def signed(thinking: str, *, carries: bool) -> str:
    """Return the signature of a text; it carries the text if the client wants none."""
    text = thinking.encode("utf-8", "surrogatepass")
    return b64encode(hmac.digest(_KEY, text, "sha256") + (text if carries else b"")).decode()


def carried(signature: str) -> str:
    """Return the text that a signature carries; empty if there is none, or it is damaged or not ours."""
    try:
        sealed = b64decode(signature, validate=True)
        mark, text = sealed[:_MARK_BYTES], sealed[_MARK_BYTES:]
        return text.decode() if hmac.compare_digest(mark, hmac.digest(_KEY, text, "sha256")) else ""
    except ValueError:
        return ""
