"""Prepares a server before its model is loaded: checks its address and certificate, sets up its log."""

import json
import logging
import os
import socket
import ssl
import traceback
from pathlib import Path

from octavo.errors import ConfigError
from octavo.own_files import check_secret
from octavo.server.config import ServerConfig

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def url_of(config: ServerConfig) -> str:
    """Return where a server is reached."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{host}:{config.port}{config.root_path}"


def check_address(config: ServerConfig) -> None:
    """Check the address and the certificate, before a model is loaded.

    Raises:
        ConfigError: the address is taken or not this machine's, or the certificate cannot be used.
    """
    _check_certificate(config)
    if config.uds is not None:
        _check_uds(config.uds)
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


def _check_uds(path: str) -> None:
    if Path(path).exists():
        raise ConfigError(f"uds {path} is there already; remove it if no server uses it")
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(path)
        os.unlink(path)
    except OSError as error:
        raise ConfigError(f"uds {path} cannot be bound: {error.strerror or error}") from error


def _check_certificate(config: ServerConfig) -> None:
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = Path(getattr(config, name))
        if not path.is_file():
            raise ConfigError(f"{name} {path} is no file")
    try:
        # No password: nobody is asked for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, password=""
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile} and ssl_keyfile {config.ssl_keyfile} cannot be used: "
            f"{getattr(error, 'reason', None) or error}"
        ) from error
    check_secret(Path(config.ssl_keyfile), f"ssl_keyfile {config.ssl_keyfile}")


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON: time (seconds since 1970), level, name, message and exception.

    A request's line has client, method, path, status, seconds and request_id, too.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": record.created,
            "level": record.levelname,
            "name": record.name,
            "message": record.getMessage(),
            **getattr(record, "octavo_fields", {}),
        }
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        # The line is ASCII: a line separator of another alphabet would look like its end.
        return json.dumps(line)


def configure_logging(config: ServerConfig) -> None:
    """Set up the log on standard error as the options ask."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else logging.Formatter(_TEXT))
    level = logging.INFO if config.access_log else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler])
    # The HTTP server's own lines say less than ours.
    logging.getLogger("_granian").setLevel(logging.ERROR)
