"""Shell commands for error messages: they install what is missing into the Python that runs this."""

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit


def pip_command(*arguments: str) -> str:
    """Return a shell command that installs something into this Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def install_extra(extra: str) -> str:
    """Return a shell command that adds an extra of Octavo, from where this Octavo came."""
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return pip_command("-e", f"{checkout}[{extra}]")
    origin = _origin()
    if origin is None or origin.exists():
        return pip_command(f"{origin or 'octavo'}[{extra}]")
    return f"{pip_command(f'.[{extra}]')}, in a checkout of Octavo"


def _origin() -> Path | None:
    """Return the folder or wheel from which pip has installed Octavo; None if a package index had it.

    A copy that nobody installed has no metadata, and came from a folder that is not known.

    Source: "Recording the Direct URL Origin of installed distributions" in the packaging specifications.
    """
    try:
        text = metadata.distribution("octavo").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return Path("unknown", "folder")
    url = urlsplit(json.loads(text)["url"]) if text else None
    return Path(unquote(url.path)) if url is not None and url.scheme == "file" else None
