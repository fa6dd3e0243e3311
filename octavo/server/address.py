"""Where a server is reached, and whether that address is free."""

import socket
from pathlib import Path

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig


def url_of(config: ServerConfig) -> str:
    """Return where a server is reached."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{host}:{config.port}{config.root_path}"


def check_address(config: ServerConfig) -> None:
    """Check that the address is free, before a model is loaded.

    Raises:
        ConfigError: it is not, or it is not this machine's.
    """
    if config.uds is not None:
        if Path(config.uds).exists():
            raise ConfigError(f"uds {config.uds} is there already; remove it if no server uses it")
        return
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
    except OSError as error:
        raise ConfigError(
            f"host {config.host}, port {config.port} cannot be bound: {error.strerror or error}"
        ) from error
