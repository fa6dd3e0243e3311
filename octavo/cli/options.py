"""Options that only the command line has, and the spelling of options that take more than one word."""

import dataclasses
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from octavo.bench_client.options import LoadOptions
from octavo.cli import groups
from octavo.cli.groups import grouped
from octavo.config import DType, EngineConfig
from octavo.errors import ConfigError
from octavo.install_hint import install_extra
from octavo.json_file import read_file
from octavo.sampling_params import (
    CHAT_DEFAULTS,
    DEFAULTED,
    MAX_GRAMMAR_BYTES,
    SamplingParams,
    StructuredOutput,
)
from octavo.server.config import ServerConfig

_POSITIVE = Parameter(validator=Number(gte=1))
_NOT_NEGATIVE = Parameter(validator=Number(gte=0))


@grouped(groups.ENGINE)
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions(EngineConfig):
    """Engine options with short flags. See EngineConfig."""

    tensor_parallel_size: Annotated[int, Parameter(alias="-tp")] = 1


def read_logit_bias(hint: object, tokens: Sequence[Token]) -> dict[int, object]:
    """Read any number of ID=VALUE, ID=VALUE,ID=VALUE... or JSON objects; SamplingParams checks the range.

    Raises:
        ValueError: a token is none of these, a value is not a number, or an id occurs twice.
    """
    pairs: list[tuple[str, object]] = []
    for token in tokens:
        if token.value.lstrip().startswith("{"):
            pairs += json.loads(token.value, object_pairs_hook=list)
        else:
            pairs += [_read_pair(text) for text in token.value.split(",")]
    for token_id, value in pairs:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"the bias of token {token_id} must be a number, got {value!r}")
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
    """Return the strings in an environment variable: those of a JSON list, or its whole text."""
    try:
        listed = json.loads(value)
    except ValueError:
        return [value]
    return listed if isinstance(listed, list) and all(isinstance(item, str) for item in listed) else [value]


def read_text_file(hint: object, tokens: Sequence[Token]) -> str:
    """Read the file that an option names.

    Raises:
        FileFormatError: it cannot be read, or is too large.
        ValueError: it is not UTF-8 text.
    """
    return read_file(Path(tokens[0].value), MAX_GRAMMAR_BYTES).decode()


_FILE = Parameter(converter=read_text_file, n_tokens=1, accepts_keys=False, metavar="FILE")


@grouped(groups.STRUCTURED)
@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOptions(StructuredOutput):
    """The required form of the output; at most one is given. See StructuredOutput.

    Attributes:
        json_schema: file with a JSON schema: the output is JSON that is valid under it.
        json_object: the output is a JSON object.
        regex: the output matches this regular expression as a whole.
        choice: the output is one of these texts; may be repeated.
        grammar: file with a Lark grammar that the output follows.
    """

    json_schema: Annotated[str | None, _FILE] = None
    json_object: Annotated[bool, Parameter(negative="")] = False
    regex: str | None = None
    choice: Annotated[Sequence[str] | None, Parameter(negative="", env_var_split=split_strings)] = None
    grammar: Annotated[str | None, _FILE] = None


@grouped(groups.SAMPLING)
@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateSampling(SamplingParams):
    """Sampling parameters of `octavo generate`. See SamplingParams.

    Attributes:
        temperature: divides the logits; below 1e-5 sampling is greedy. Default: the model's own, else 1.0.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1]. Default: the model's
            own, else 1.0.
        top_k: keep the k most likely tokens; 0 or -1 keeps all. Default: the model's own, else 0.
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1]. Default: the model's
            own, else 0.0.
        repetition_penalty: above 1 discourages tokens of the prompt and the output, below 1 favours them; in
            (0, 100]. Default: the model's own, else 1.0.
    """

    # None leaves it open: the model may recommend another value than 1.0.
    temperature: float | None = None  # type: ignore[assignment]
    top_p: float | None = None  # type: ignore[assignment]
    top_k: int | None = None  # type: ignore[assignment]
    min_p: float | None = None  # type: ignore[assignment]
    repetition_penalty: float | None = None  # type: ignore[assignment]
    structured: Annotated[StructuredOptions | None, Parameter(name="*")] = None
    # The engine's --seed seeds every request.
    seed: Annotated[int | None, Parameter(show=False)] = None
    max_tokens: int | None = 128
    stop: Annotated[str | Sequence[str] | None, Parameter(env_var_split=split_strings)] = ()
    logit_bias: Annotated[
        Mapping[int, float] | None,
        Parameter(
            converter=read_logit_bias,
            accepts_keys=False,
            n_tokens=-1,
            metavar="ID=VALUE",
            help="value in [-100, 100] to add to the logit of the token with this id; may be repeated. "
            'Or a JSON object, such as {"5": -100, "7": 3.5}.',
        ),
    ] = None

    def __post_init__(self) -> None:
        checked = self.completed({})
        for name in ("stop", "stop_token_ids", "logit_bias"):
            object.__setattr__(self, name, getattr(checked, name))

    def completed(self, defaults: Mapping[str, int | float]) -> SamplingParams:
        """Return these parameters, with defaults for those that are open.

        Raises:
            SamplingParamsError: a value is out of range.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingParams)}
        is_open = {name for name in DEFAULTED if fields[name] is None}
        chosen = {name: value for name, value in fields.items() if name not in is_open}
        return SamplingParams.from_dict({**self._otherwise(), **defaults, **chosen})

    def _otherwise(self) -> Mapping[str, float]:
        return {}


@grouped(groups.SAMPLING)
@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSampling(GenerateSampling):
    """Sampling parameters of `octavo chat`. See SamplingParams.

    Attributes:
        temperature: divides the logits; below 1e-5 sampling is greedy. Default: the model's own, else 0.6.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1]. Default: the model's
            own, else 0.95.
    """

    temperature: float | None = None  # type: ignore[assignment]
    top_p: float | None = None  # type: ignore[assignment]
    max_tokens: int | None = 512

    def _otherwise(self) -> Mapping[str, float]:
        return CHAT_DEFAULTS


def _read_secret(hint: object, tokens: Sequence[Token]) -> str:
    """Read a secret from anywhere but the command line, which every user of the machine can see.

    Raises:
        ValueError: it comes as a flag.
    """
    if tokens[0].source == "cli":
        raise ValueError(
            "keys come from --api-key-file, OCTAVO_API_KEY or a file that --config names: flags can be seen "
            "by others"
        )
    return tokens[0].value


@grouped(groups.SERVER)
@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(ServerConfig):
    """Options of `octavo serve`. See ServerConfig."""

    api_key: Annotated[str | None, Parameter(converter=_read_secret, n_tokens=1)] = field(
        default=None, repr=False
    )


@grouped(groups.THROUGHPUT)
@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """A workload of random token ids: greedy, EOS ignored.

    Attributes:
        num_prompts: requests, all submitted at once.
        input_len: prompt tokens of each, shared ones included.
        output_len: generated tokens of each.
        shared_prefix_len: leading prompt tokens that all requests share.
        num_warmup: requests run before the measurement.
    """

    num_prompts: Annotated[int, _POSITIVE] = 16
    input_len: Annotated[int, _POSITIVE] = 128
    output_len: Annotated[int, _POSITIVE] = 64
    shared_prefix_len: Annotated[int, _NOT_NEGATIVE] = 0
    num_warmup: Annotated[int, _NOT_NEGATIVE] = 1

    def __post_init__(self) -> None:
        if self.shared_prefix_len > self.input_len:
            raise ConfigError(
                f"shared_prefix_len must be at most input_len = {self.input_len}, "
                f"got {self.shared_prefix_len}"
            )


@grouped(groups.PREFIX)
@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBenchOptions:
    """Decode steps over sequences that share more and more of their context.

    Attributes:
        context_len: tokens of each sequence. Default: 4096 on a GPU, 1024 on a CPU.
        batch_sizes: numbers of sequences; one curve each. Default: 1 8 64 256 512 on a GPU, 1 4 16 on a CPU.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: head dimension.
        block_size: tokens per KV block. Default: 64 on a GPU, 16 on a CPU.
        dtype: type of queries and cache; auto is bfloat16 on a GPU, float32 on a CPU.
        device: "cpu", "cuda", "cuda:1"...; auto takes a GPU when there is one.
        plot: draw the curves to this .png, .svg or .pdf file; needs matplotlib.
    """

    context_len: Annotated[int | None, _POSITIVE] = None
    batch_sizes: Annotated[
        tuple[int, ...] | None, Parameter(consume_multiple=True, negative=""), _POSITIVE
    ] = None
    num_heads: Annotated[int, _POSITIVE] = 16
    num_kv_heads: Annotated[int, _POSITIVE] = 8
    head_dim: Annotated[int, _POSITIVE] = 128
    block_size: Annotated[int | None, _POSITIVE] = None
    dtype: DType = "auto"
    device: str = "auto"
    plot: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )


_NUMBERS = Parameter(consume_multiple=True, negative="")


@grouped(groups.LOAD)
@dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchOptions(LoadOptions):
    """Options of `octavo bench serve`. See LoadOptions.

    Attributes:
        json_file: write all figures to this file, too.
        plot: draw the times to this .png, .svg or .pdf file; needs matplotlib.
    """

    input_len: Annotated[tuple[int, ...], _NUMBERS] = (128,)
    output_len: Annotated[tuple[int, ...], _NUMBERS] = (64,)
    goodput: Annotated[tuple[str, ...], _NUMBERS] = ()
    api_key: Annotated[str | None, Parameter(converter=_read_secret, n_tokens=1)] = field(
        default=None, repr=False
    )
    json_file: str | None = None
    plot: str | None = None


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write such a file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"plot needs matplotlib, which is not installed; run: {install_extra('plot')}")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"plot must be a .png, .svg or .pdf file, got {str(path)!r}")
    check_folder("plot", path)


def check_folder(name: str, path: Path) -> None:
    """Check that a file's folder exists.

    Raises:
        ConfigError: it does not.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{name} must be in a folder that exists; there is no {str(path.parent)!r}")
