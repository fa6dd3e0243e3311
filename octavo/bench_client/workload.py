"""Prompts to send, and when: the same ones for the same seed, on any machine."""

import itertools
import math
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from octavo.bench_client.options import LoadOptions
from octavo.errors import ConfigError
from octavo.json_file import without_mark

_FIRST_ID = 100
# Short, common words are about one token each in most vocabularies.
_WORDS = (  # noqa: SIM905
    "time way day man world life hand part child eye woman place work week case point company number group "
    "problem fact be have do say get make go know take see come think look want give use find tell ask seem "
    "feel try leave call good new first last long great little own other old right big high small large next"
).split()


class Prompt(Struct, forbid_unknown_fields=True, kw_only=True):
    """The prompt of one request.

    Attributes:
        prompt: text or token ids; None for a chat.
        messages: those of a chat; None for a completion.
        max_tokens: output tokens.
    """

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def make_prompts(options: LoadOptions, num: int, seed: int) -> list[Prompt]:
    """Return prompts, from the file if there is one, else random ones.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no prompt for the endpoint.
    """
    rng = Random(seed)
    if options.prompts_file is not None:
        prompts = _read_file(Path(options.prompts_file), options.endpoint == "chat")
        return [
            msgspec.structs.replace(prompt, max_tokens=prompt.max_tokens or _length(rng, options.output_len))
            for prompt in itertools.islice(itertools.cycle(prompts), num)
        ]
    prefixes = [_ids(rng, options, options.prefix_len) for _ in range(options.num_prefixes)]
    made = []
    for number in range(num):
        own = _ids(rng, options, _length(rng, options.input_len))
        made.append(
            _prompt(options, prefixes[number % len(prefixes)] + own, _length(rng, options.output_len))
        )
    return made


def arrival_times(options: LoadOptions) -> list[float]:
    """Return when each request is due, seconds after the first may be sent: gamma-distributed gaps."""
    if math.isinf(options.request_rate):
        return [0.0] * options.num_prompts
    rng = Random(f"times {options.seed}")
    scale = 1 / (options.request_rate * options.burstiness)
    gaps = (rng.gammavariate(options.burstiness, scale) for _ in range(options.num_prompts))
    return list(itertools.accumulate(gaps))


def _prompt(options: LoadOptions, ids: list[int], max_tokens: int) -> Prompt:
    if options.endpoint == "completions" and options.prompt_kind == "ids":
        return Prompt(prompt=ids, max_tokens=max_tokens)
    text = " ".join(_WORDS[token_id % len(_WORDS)] for token_id in ids)
    if options.endpoint == "completions":
        return Prompt(prompt=text, max_tokens=max_tokens)
    return Prompt(messages=[{"role": "user", "content": text}], max_tokens=max_tokens)


def _ids(rng: Random, options: LoadOptions, num: int) -> list[int]:
    return [rng.randrange(_FIRST_ID, options.vocab_size) for _ in range(num)]


def _length(rng: Random, lengths: tuple[int, ...]) -> int:
    return rng.randint(lengths[0], lengths[-1])


def _read_file(path: Path, is_chat: bool) -> list[Prompt]:
    try:
        lines = without_mark(path.read_bytes()).splitlines()
    except OSError as error:
        raise ConfigError(f"prompts_file {path} cannot be read: {error.strerror}") from error
    prompts = [
        _read_line(line, f"{path}, line {number}", is_chat) for number, line in enumerate(lines, 1) if line
    ]
    if not prompts:
        raise ConfigError(f"prompts_file {path} holds no prompts")
    return prompts


def _read_line(line: bytes, where: str, is_chat: bool) -> Prompt:
    try:
        prompt = msgspec.json.decode(line, type=Prompt)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"prompts_file {where}: {error}") from error
    unexpected, expected = ("prompt", "messages") if is_chat else ("messages", "prompt")
    if getattr(prompt, expected) is None or getattr(prompt, unexpected) is not None:
        raise ConfigError(
            f'prompts_file {where}: expected "{expected}" and no "{unexpected}" for this endpoint'
        )
    if prompt.max_tokens is not None and prompt.max_tokens < 1:
        raise ConfigError(f"prompts_file {where}: max_tokens must be at least 1, got {prompt.max_tokens}")
    return prompt
