"""Options of the HTTP server.

Like EngineConfig, one frozen dataclass gives flags, OCTAVO_... variables and keys of octavo.toml.
"""

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from octavo.errors import ConfigError
from octavo.own_files import read_key_lines

ToolCallParser = Literal[
    "auto", "none", "hermes", "qwen3_coder", "glm45", "minimax", "gemma4", "llama3_json", "mistral",
    "harmony", "response_template",
]  # fmt: skip
ReasoningParser = Literal["auto", "none", "think", "gemma4", "harmony", "response_template"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Options of the server: where it listens, who may call it, and how much it takes.

    Attributes:
        host: address to bind. The default is reached from this machine only.
        port: TCP port.
        uds: path of a unix socket to bind instead of host and port.
        ssl_certfile: PEM certificate chain; with ssl_keyfile the server speaks HTTPS (TLS 1.3).
        ssl_keyfile: PEM private key.
        root_path: prefix of all routes behind a proxy that does not strip it, such as /llm.
        served_model_name: the name that clients give as `model`. Default: the model's.
        api_key: keys that clients may send, separated by commas. Only from OCTAVO_API_KEY or a file that
            --config names: every user of a machine sees the flags of every command.
        api_key_file: a file with one key per line; empty lines and lines that begin with # do not count. It
            is refused if every user of the machine can read it, or others than you and root can change it.
        insecure: bind a public address without a key.
        public_metrics: let /metrics be read without a key.
        allowed_hosts: further Host headers to answer to when there is no key; * allows any.
        cache_isolation: "key" keeps the prefix caches of different API keys apart.
        max_num_queued_reqs: completions that may wait for admission; further requests get 429.
        max_num_queued_tokens: prompt tokens that may wait for admission; likewise.
        max_body_bytes: largest request body.
        max_body_values: most JSON values in a body, counted by its commas; longer prompts of token ids need
            more.
        body_timeout_s: how long a client may take to send a body.
        min_body_bytes_per_s: least speed of a body, judged over windows of 10 s; 0: no limit.
        queue_timeout_s: how long a request may wait for admission; 0: for ever.
        write_timeout_s: how long a client may leave a streamed event unread.
        sse_keep_alive_s: idle time after which a stream gets a comment; 0: never.
        shutdown_timeout: seconds that running requests get after SIGTERM; 0 aborts them.
        tool_call_parser: how the model writes tool calls. "auto" detects it from the model's response
            template or chat template.
        reasoning_parser: how the model marks its reasoning; "auto" detects it likewise.
        canonical_prompts: put what clients change in every request, without a meaning, into one form, so that
            the prefix cache finds the rest.
        response_store_mib: MiB of memory for answers of /v1/responses and for conversations, so that clients
            may refer to them; the oldest go first. 0: nothing is kept. Needs replicas 1.
        response_store_s: seconds after which they are forgotten.
        step_deadline_s: seconds after which a step counts as hung: its requests fail.
        replicas: number of engines behind one address, each in a process and on a GPU of its own (on
            a CPU they share its cores); each request goes where most of its prompt is cached. A replica that
            dies is started again, as often as max_restarts allows.
        restart: start the server again, in a new process, when its engine dies. Leave it off where something
            else does that, such as systemd or Kubernetes.
        max_restarts: most restarts within restart_window_s; after one death more the command fails.
        restart_window_s: seconds after which a death no longer counts.
        access_log: log method, path, status and duration of each request; never a body or a key. Requests to
            /health, /ping, /ready and /metrics are logged only if they fail.
        log_format: "json" writes each line of the log as a JSON object.
        log_prompt_excerpts: when a conversation stops hitting the prefix cache, log some words of it around
            the first difference; else only numbers.
        otlp_traces_endpoint: URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces, that
            gets a span for each request: never a prompt, never an answer. The server connects to nothing
            else. Needs octavo[otel].
        batch_dir: a folder for files and batches of clients (/v1/files, /v1/batches); without it there are
            none. Not with several replicas.

    Raises:
        ConfigError: an option is out of range, or a public address would be open to everybody.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    root_path: str = ""
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    insecure: bool = False
    public_metrics: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cache_isolation: Literal["none", "key"] = "none"
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 1_000_000
    max_body_bytes: int = 8 << 20
    max_body_values: int = 200_000
    body_timeout_s: float = 30.0
    min_body_bytes_per_s: int = 4096
    queue_timeout_s: float = 60.0
    write_timeout_s: float = 120.0
    sse_keep_alive_s: float = 15.0
    shutdown_timeout: float = 30.0
    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    canonical_prompts: bool = True
    response_store_mib: int = 0
    response_store_s: float = 3600.0
    step_deadline_s: float = 120.0
    replicas: int = 1
    restart: bool = False
    max_restarts: int = 5
    restart_window_s: float = 600.0
    access_log: bool = False
    log_format: Literal["text", "json"] = "text"
    log_prompt_excerpts: bool = False
    otlp_traces_endpoint: str | None = None
    batch_dir: str | None = None

    def __post_init__(self) -> None:
        _in_range("port", self.port, 0, 65535)
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_body_bytes", "max_body_values"):
            _in_range(name, getattr(self, name), 1, 2**40)
        _in_range("min_body_bytes_per_s", self.min_body_bytes_per_s, 0, 2**40)
        _in_range("max_restarts", self.max_restarts, 0, 1000)
        _in_range("replicas", self.replicas, 1, 256)
        _in_range("response_store_mib", self.response_store_mib, 0, 2**20)
        if self.response_store_mib and self.replicas > 1:
            raise ConfigError("response_store_mib needs replicas 1: each replica would keep its own answers")
        _in_range("response_store_s", self.response_store_s, 1e-3, 1e9)
        for name in ("body_timeout_s", "write_timeout_s", "step_deadline_s", "restart_window_s"):
            _in_range(name, getattr(self, name), 1e-3, 1e6)
        for name in ("queue_timeout_s", "sse_keep_alive_s", "shutdown_timeout"):
            _in_range(name, getattr(self, name), 0, 1e6)
        _one_of("tool_call_parser", self.tool_call_parser, get_args(ToolCallParser))
        _one_of("reasoning_parser", self.reasoning_parser, get_args(ReasoningParser))
        if self.batch_dir is not None and self.replicas > 1:
            raise ConfigError("batch_dir needs replicas=1: only one process may run the batches of a folder")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile must be given together")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_traces_endpoint must begin with http:// or https://, got {endpoint!r}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must begin with / and not end with it, got {self.root_path!r}")
        if not (self.has_keys or self.insecure or self.is_local):
            raise ConfigError(
                f"host {self.host} is reached from other machines, so clients need a key: give api_key_file "
                "or OCTAVO_API_KEY, or say insecure to let everybody in"
            )

    @property
    def has_keys(self) -> bool:
        """True if clients must send a key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def is_local(self) -> bool:
        """True if only this machine reaches the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def read_keys(self) -> list[str]:
        """Return all keys.

        Raises:
            ConfigError: the file cannot be read, others can read it, there is no key in it, or a key is too
                short to be one.
        """
        keys = [key.strip() for key in (self.api_key or "").split(",")]
        if self.api_key_file is not None:
            keys += read_key_lines(Path(self.api_key_file))
        keys = [key for key in keys if key]
        if self.has_keys and not keys:
            raise ConfigError("expected at least one API key, got none; write one key per line")
        for key in keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"an API key must be 8 or more printable ASCII characters without spaces, got {len(key)} "
                    "characters"
                )
        return keys


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} must be one of {', '.join(valid)}, got {value!r}")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}")
