"""Options of the load on a server, checked before anything is sent."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from octavo.errors import ConfigError
from octavo.own_files import read_key_lines

Endpoint = Literal["completions", "chat"]
METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Requests to a server with OpenAI's API, and when they are sent.

    Attributes:
        base_url: where the server is, with or without /v1 at its end.
        served_model_name: the name to give as `model`. Default: the first one that the server lists.
        endpoint: completions or chat.
        prompt_kind: random token ids, or random words, about one token each. Chats always have words.
        prompts_file: a file with one JSON object per line to send instead: "prompt" (text or ids) or
            "messages", and, if it is to differ from output_len, "max_tokens". Taken in turns.
        num_prompts: requests to send.
        input_len: prompt tokens of each request after the prefix: a number, or the least and the most.
        output_len: tokens to generate: a number, or the least and the most.
        prefix_len: prompt tokens before them that requests of one group share.
        num_prefixes: how many different prefixes there are; requests take them in turns.
        vocab_size: random ids are drawn below it, from 100 on.
        request_rate: requests per second; infinite: none waits for its time.
        burstiness: shape of the gamma distribution of the gaps between requests: 1 for a Poisson process,
            less for bursts, more for an even pace.
        max_concurrency: requests in flight at a time; later ones wait for a place. Default: any number.
        processes: processes of the client; requests take them in turns, and each has its part of
            max_concurrency.
        ignore_eos: have the server generate all output_len tokens; not every server knows it.
        temperature: sampling temperature.
        seed: of lengths, prompts and times.
        warmup: requests sent one after the other before anything is measured.
        timeout: seconds that a request may take.
        goodput: limits in milliseconds, such as ttft:200 tpot:50 e2el:5000: requests per second that keep
            all of them are counted.
        api_key: the server's keys, of which the first is sent as a bearer token. Only from OCTAVO_API_KEY,
            OPENAI_API_KEY or a file that --config names: every user of a machine sees the flags of every
            command.
        api_key_file: a file with the server's keys, one per line, of which the first is sent.
    """

    base_url: str = "http://127.0.0.1:8000"
    served_model_name: str | None = None
    endpoint: Endpoint = "completions"
    prompt_kind: Literal["ids", "words"] = "ids"
    prompts_file: str | None = None
    num_prompts: int = 100
    input_len: tuple[int, ...] = (128,)
    output_len: tuple[int, ...] = (64,)
    prefix_len: int = 0
    num_prefixes: int = 1
    vocab_size: int = 10_000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    processes: int = 1
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0
    warmup: int = 0
    timeout: float = 600.0
    goodput: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must begin with http:// or https://, got {self.base_url!r}")
        for name in ("num_prompts", "num_prefixes"):
            _at_least(name, getattr(self, name), 1)
        for name in ("prefix_len", "warmup"):
            _at_least(name, getattr(self, name), 0)
        _at_least("vocab_size", self.vocab_size, 101)
        if self.max_concurrency is not None:
            _at_least("max_concurrency", self.max_concurrency, 1)
        most = min(self.num_prompts, self.max_concurrency or self.num_prompts)
        if not 1 <= self.processes <= most:
            why = "at most one for each request in flight"
            raise ConfigError(f"processes must be in [1, {most}], {why}, got {self.processes}")
        for name in ("input_len", "output_len"):
            lengths = getattr(self, name)
            if not 1 <= len(lengths) <= 2 or lengths[0] < 1 or lengths[-1] < lengths[0]:
                raise ConfigError(f"{name} must be a number, or the least and the most, got {list(lengths)}")
        for name in ("request_rate", "burstiness", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if not 0 <= self.temperature <= 100:
            raise ConfigError(f"temperature must be in [0, 100], got {self.temperature!r}")
        _ = self.limits_ms

    @property
    def url(self) -> str:
        """The server without /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def limits_ms(self) -> dict[str, float]:
        """The limits of goodput, by metric.

        Raises:
            ConfigError: a limit is not METRIC:MS.
        """
        limits: dict[str, float] = {}
        for text in self.goodput:
            name, _, number = text.partition(":")
            try:
                limit = float(number)
            except ValueError:
                limit = 0.0
            if name not in METRICS or not limit > 0:
                raise ConfigError(f"goodput must be {', '.join(METRICS)}, each with :MS, got {text!r}")
            limits[name] = limit
        return limits

    def read_key(self) -> str | None:
        """Return the key to send, if there is one.

        Raises:
            ConfigError: the file cannot be read or is empty.
        """
        if self.api_key_file is None:
            # A server may have several keys, any of which will do.
            return (self.api_key or "").split(",")[0].strip() or os.environ.get("OPENAI_API_KEY") or None
        keys = read_key_lines(Path(self.api_key_file))
        if not keys:
            raise ConfigError(f"api_key_file {self.api_key_file} holds no key")
        return keys[0]


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
