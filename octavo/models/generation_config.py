"""How a model's makers would sample from it: generation_config.json, or what a GGUF file says.

Source: vLLM (`--generation-config`) and SGLang take the same fields. As there, do_sample is not read: a file
that says false is not greedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.errors import ConfigError, FileFormatError, SamplingParamsError
from octavo.json_file import is_present, read_json_object
from octavo.models.source import ModelSource
from octavo.sampling_params import DEFAULTED, SamplingParams

NAME = "generation_config.json"
_MAX_BYTES = 2**20
# llama.cpp's penalties see only the latest tokens, so they are not the ones meant here.
_GGUF_FIELDS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for what a request leaves open.

    Attributes:
        values: by field of SamplingParams.
        path: of the file that they are from; None: there is none, or it says nothing.
    """

    values: Mapping[str, int | float] = field(default_factory=dict)
    path: Path | None = None

    def params(self, **fields: object) -> SamplingParams:
        """Return parameters of these values; `fields` are those that come first."""
        return SamplingParams.from_dict({**self.values, **fields})


def read_sampling_defaults(source: ModelSource, choice: str = "auto") -> SamplingDefaults:
    """Read a model's defaults of sampling.

    Args:
        source: of the model.
        choice: "auto": the model's own; "none": none; else a folder with a generation_config.json.

    Raises:
        ConfigError: there is no such folder, or nothing of that name in it.
        FileFormatError: the file is damaged, or a value is none that sampling takes.
    """
    if choice == "none":
        return SamplingDefaults()
    if choice == "auto" and source.gguf is not None:
        metadata = source.gguf.metadata
        found = {name: metadata.get(key) for name, key in _GGUF_FIELDS.items()}
        return _checked(found, source.path, _GGUF_FIELDS)
    path = (source.path if choice == "auto" else Path(choice)) / NAME
    if is_present(path):
        found = read_json_object(path, _MAX_BYTES)
        return _checked({name: found.get(name) for name in DEFAULTED}, path, {})
    if choice == "auto":
        return SamplingDefaults()
    raise ConfigError(
        f'generation_config must be "auto", "none" or a folder with a {NAME}, '
        f"got {choice!r}, where there is none"
    )


def _checked(found: Mapping[str, object], path: Path, keys: Mapping[str, str]) -> SamplingDefaults:
    """Return what a file says; null says nothing."""
    values = {name: value for name, value in found.items() if value is not None}
    for name, value in values.items():
        try:
            SamplingParams.from_dict({name: value})
        except SamplingParamsError as error:
            raise FileFormatError(
                f"{path}: {keys.get(name, name)}: {error}; mend the file, or set generation_config to none"
            ) from error
    return SamplingDefaults(values, path if values else None)  # type: ignore[arg-type]
