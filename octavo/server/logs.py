"""How `octavo serve` writes its log: lines of text, or of JSON."""

import json
import logging
import traceback

from octavo.server.config import ServerConfig

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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
        # ASCII: a line separator of another alphabet would look like the end of the line.
        return json.dumps(line)


def configure_logging(config: ServerConfig) -> None:
    """Write to the standard error what the options ask for."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else logging.Formatter(_TEXT))
    level = logging.INFO if config.access_log else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler])
    # The HTTP server's own lines say less than ours.
    logging.getLogger("_granian").setLevel(logging.ERROR)
