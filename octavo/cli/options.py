"""Options that only the command line has, and how it spells those that no single word can say."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from octavo.config import DType
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams


def read_logit_bias(hint: object, tokens: Sequence[Token]) -> dict[int, object]:
    """Read ID=VALUE, several with commas between them, or a JSON object; any number of either.

    Raises:
        ValueError: it is neither, or an id is there twice. The values are for SamplingParams to check.
    """
    pairs: list[tuple[str, object]] = []
    for token in tokens:
        if token.value.lstrip().startswith("{"):
            pairs += json.loads(token.value, object_pairs_hook=list)
        else:
            pairs += [_read_pair(text) for text in token.value.split(",")]
    bias = {int(token_id): value for token_id, value in pairs}
    if len(bias) < len(pairs):
        raise ValueError(f"each token id may be there once, got {', '.join(id_ for id_, _ in pairs)}")
    return bias


def _read_pair(text: str) -> tuple[str, object]:
    token_id, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"expected ID=VALUE, such as 5=-100, got {text!r}")
    return token_id, float(value)


def split_strings(hint: object, value: str, delimiter: str | None = None) -> list[str]:
    """Return the strings in a variable: one with all its blanks, or those of a JSON list."""
    try:
        listed = json.loads(value)
    except ValueError:
        return [value]
    return listed if isinstance(listed, list) and all(isinstance(item, str) for item in listed) else [value]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateSampling(SamplingParams):
    """What `octavo generate` samples by. See SamplingParams."""

    max_tokens: int | None = 128
    stop: Annotated[str | Sequence[str] | None, Parameter(env_var_split=split_strings)] = ()
    logit_bias: Annotated[
        Mapping[int, float] | None,
        Parameter(
            converter=read_logit_bias,
            accepts_keys=False,
            n_tokens=-1,
            metavar="ID=VALUE",
            help="value in [-100, 100] added to the logit of the token with this id, any number of times; "
            'or a JSON object, such as {"5": -100, "7": 3.5}.',
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSampling(GenerateSampling):
    """What `octavo chat` samples by. See SamplingParams."""

    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int | None = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """A workload of random token ids, greedy, end-of-sequence ignored.

    Attributes:
        num_prompts: requests, all submitted at once.
        input_len: prompt tokens of each.
        output_len: generated tokens of each.
        shared_prefix_len: leading prompt tokens that all requests have in common.
        num_warmup: requests run before the measurement.
    """

    num_prompts: int = 16
    input_len: int = 128
    output_len: int = 64
    shared_prefix_len: int = 0
    num_warmup: int = 1

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.shared_prefix_len <= self.input_len:
            raise ConfigError(
                f"shared_prefix_len must be in [0, input_len = {self.input_len}], "
                f"got {self.shared_prefix_len}"
            )
        if self.num_warmup < 0:
            raise ConfigError(f"num_warmup must be at least 0, got {self.num_warmup}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBenchOptions:
    """Decode steps over sequences that have more and more of their context in common.

    Attributes:
        context_len: tokens of each sequence. Default: 4096 on a GPU, 1024 on a CPU.
        batch_sizes: sequences, a curve for each. Default: 1 8 64 256 512 on a GPU, 1 4 16 on a CPU.
        num_heads: query heads.
        num_kv_heads: heads of keys and values.
        head_dim: numbers of a head.
        block_size: tokens per KV block. Default: 64 on a GPU, 16 on a CPU.
        dtype: of queries and cache; auto is bfloat16 on a GPU, float32 on a CPU.
        device: auto takes a GPU when there is one.
        plot: draw the curves to this .png, .svg or .pdf file; needs matplotlib.
    """

    context_len: int | None = None
    batch_sizes: Annotated[tuple[int, ...] | None, Parameter(consume_multiple=True, negative="")] = None
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int | None = None
    dtype: DType = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    plot: str | None = None

    def __post_init__(self) -> None:
        for name in ("context_len", "block_size", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.batch_sizes is not None and any(size < 1 for size in self.batch_sizes):
            raise ConfigError(f"batch_sizes must be at least 1, got {self.batch_sizes}")
