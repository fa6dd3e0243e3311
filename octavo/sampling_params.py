"""Sampling parameters, validated once, at construction."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import SamplingParamsError, refuse_unknown

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
# Temperatures below this are greedy, as in vLLM.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to continue one prompt. Field names follow vLLM's.

    Attributes:
        n: completions per prompt; they share the prompt's KV blocks (fork).
        temperature: divides the logits; below 1e-5 sampling is greedy: it takes the most likely token.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1]; at least one token.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        repetition_penalty: above 1 discourages tokens of the prompt and the output, below 1 favours them; in
            (0, 100] (Keskar et al., 2019).
        presence_penalty: subtracted from the logit of every token already generated, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        seed: fixes the request's random numbers, which then depend only on the seed and the position. Alone,
            in any batch and after preemption the tokens are the same up to rounding: another batch size may
            sum in another order, which changes a token once in thousands of completions. With the engine's
            deterministic=True (NVIDIA GPUs) they are exactly the same.
        max_tokens: upper bound of generated tokens; None means up to the model's context.
        min_tokens: no stop string, stop id or EOS ends the output before this many tokens.
        stop: strings that end the output; the text is cut before the first one found.
        stop_token_ids: token ids that end the output, beside the model's own EOS ids.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: continue past the model's EOS.
        logprobs: return the log-probabilities of the k most likely tokens and of the sampled one at every
            output token, k from 0 to 20; None: return none. They are the model's own, before penalties,
            temperature and filters.
        prompt_logprobs: the same for every prompt token after the first. The whole prompt is then computed:
            cached blocks hold no logits.
        logit_bias: token id -> value in [-100, 100] added to its logit.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False returns token ids only.

    Raises:
        SamplingParamsError: a value is out of range; the message names it, the range and the value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > {self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingParamsError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", self._checked_stop())
        object.__setattr__(self, "stop_token_ids", self._checked_stop_token_ids())
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", self._checked_logit_bias())

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken, without sampling."""
        return self.temperature < MIN_TEMPERATURE

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> "SamplingParams":
        """Build from a mapping; an unknown name is refused with the nearest valid one."""
        valid = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(SamplingParamsError, "unknown sampling parameter", fields, valid)
        return cls(**fields)  # type: ignore[arg-type]

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop, "strings")
        if len(stop) > MAX_STOP_STRINGS:
            raise SamplingParamsError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
        for string in stop:
            if not isinstance(string, str) or not string:
                raise SamplingParamsError(f"stop must hold non-empty strings, got {string!r}")
            if any("\ud800" <= character <= "\udfff" for character in string):
                raise SamplingParamsError(f"stop must hold valid Unicode, got a lone surrogate in {string!r}")
        if stop and not self.detokenize:
            raise SamplingParamsError("stop strings need detokenize=True; use stop_token_ids instead")
        return stop

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        token_ids = _listed("stop_token_ids", self.stop_token_ids, "token ids")
        for token_id in token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)
        return token_ids

    def _checked_logit_bias(self) -> dict[int, float]:
        if not isinstance(self.logit_bias, Mapping):
            raise SamplingParamsError(
                f"logit_bias must map token ids to numbers, such as {{5: -100}}, got {self.logit_bias!r}"
            )
        for token_id, value in self.logit_bias.items():
            _integer("logit_bias keys", token_id, 0, 2**31 - 1)
            _number(f"logit_bias[{token_id}]", value, -100.0, 100.0)
        return dict(self.logit_bias)


def _listed(name: str, value: object, of: str) -> tuple[Any, ...]:
    """Return a list's items; None is empty. Text, bytes and mappings are iterable too, and refused."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise SamplingParamsError(f"{name} must be a list of {of}, got {value!r}")
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SamplingParamsError(f"{name} must be an integer in [{low}, {high}], got {value!r}")


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
        or (open_low and value == low)
    ):
        raise SamplingParamsError(
            f"{name} must be a number in {'(' if open_low else '['}{low:g}, {high:g}], got {value!r}"
        )
