"""Sampling parameters, validated once, at construction."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from octavo.errors import SamplingParamsError, StructuredOutputError, refuse_unknown

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
# Temperatures below this are greedy, as in vLLM.
MIN_TEMPERATURE = 1e-5
MAX_GRAMMAR_BYTES = 64 * 2**10
"""Most bytes of a JSON schema, a regex, a Lark grammar, or all choices together."""
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 1024
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that a model's makers may recommend values for."""
CHAT_DEFAULTS: Mapping[str, float] = MappingProxyType({"temperature": 0.6, "top_p": 0.95})
"""Defaults of a chat with one user, where neither the user nor the model gives a value."""
_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutput:
    """The required form of the whole output. Exactly one field is set.

    Attributes:
        json_schema: JSON that is valid under this schema: a mapping, True, or JSON text, as which it is kept.
        json_object: any JSON object.
        regex: text that matches this regular expression of Rust's regex crate, from its first character to
            its last; no look-around, no back-references.
        choice: one of these texts.
        grammar: text of this grammar in llguidance's dialect of Lark.

    Raises:
        StructuredOutputError: a field is of the wrong type or too large, or not exactly one is set.
    """

    json_schema: Mapping[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise StructuredOutputError(f"json_object must be True or False, got {self.json_object!r}")
        given = [name for name in _KINDS if self._is_given(name)]
        if len(given) != 1:
            raise StructuredOutputError(
                f"structured output needs exactly one of {', '.join(_KINDS)}, got {given or 'none'}"
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choice(self.choice))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _grammar_text(name, getattr(self, name))

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in _KINDS if self._is_given(name))

    def _is_given(self, name: str) -> bool:
        # A schema may be false: nothing is valid.
        value = getattr(self, name)
        return value is not None and (value is not False or name == "json_schema")

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> "StructuredOutput":
        """Build from a mapping; an unknown name is refused with the nearest valid one."""
        refuse_unknown(StructuredOutputError, "unknown field of structured output", fields, _KINDS)
        return cls(**fields)  # type: ignore[arg-type]


def _schema_text(schema: object) -> str:
    """Return a JSON schema as JSON text, its size and depth checked."""
    try:
        if isinstance(schema, str):
            text, schema = schema, json.loads(_grammar_text("json_schema", schema))
        else:
            text = _grammar_text("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, StructuredOutputError):
            raise
        raise StructuredOutputError(f"json_schema must be valid JSON: {error}") from error
    if isinstance(schema, bool):
        return json.dumps(schema)
    if not isinstance(schema, Mapping):
        raise StructuredOutputError(f"json_schema must be an object, true or false, got {text[:80]}")
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise StructuredOutputError(f"json_schema must be at most {MAX_SCHEMA_DEPTH} levels deep")
        values = [value.values() if isinstance(value, Mapping) else value for value in level]
        level = [item for items in values for item in items if isinstance(item, Mapping | list | tuple)]
    return text


def _checked_choice(choice: object) -> tuple[str, ...]:
    choices = _listed("choice", choice, "strings", StructuredOutputError)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise StructuredOutputError(f"choice must hold 1 to {MAX_CHOICES} strings, got {len(choices)}")
    for text in choices:
        if not isinstance(text, str) or not text:
            raise StructuredOutputError(f"choice must hold non-empty strings, got {text!r}")
    _grammar_text("choice", "".join(choices))
    return choices


def _grammar_text(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise StructuredOutputError(f"{name} must be a string, got {text!r}")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise StructuredOutputError(f"{name} must be valid Unicode, got a lone surrogate") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise StructuredOutputError(f"{name} must be at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}")
    return text


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
        seed: fixes the request's random numbers, which then depend only on the seed and the position; -1 is
            None, as in vLLM. Alone, in any batch and after preemption the tokens are the same up to rounding:
            another batch size may sum in another order, which changes a token once in thousands of
            completions. With the engine's deterministic=True (NVIDIA GPUs) they are exactly the same.
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
        structured: what the whole output must be: JSON, one of some texts, text of a grammar. The output ends
            where nothing can follow, even before min_tokens; EOS comes only where it may end; max_tokens may
            cut it. Needs the extra `octavo[structured]`.

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
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if type(self.seed) is int and self.seed == -1:
            object.__setattr__(self, "seed", None)
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
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise SamplingParamsError(f"structured must be a StructuredOutput, got {self.structured!r}")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken, without sampling."""
        return self.temperature < MIN_TEMPERATURE

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> "SamplingParams":
        """Build from a mapping, `structured` too; an unknown name is refused with the nearest valid one."""
        valid = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(SamplingParamsError, "unknown sampling parameter", fields, valid)
        structured = fields.get("structured")
        if isinstance(structured, Mapping):
            fields = {**fields, "structured": StructuredOutput.from_dict(structured)}
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


def _listed(
    name: str, value: object, of: str, error: type[SamplingParamsError] = SamplingParamsError
) -> tuple[Any, ...]:
    """Return a list's items; None is empty. Text, bytes and mappings are iterable too, and refused."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise error(f"{name} must be a list of {of}, got {value!r}")
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
