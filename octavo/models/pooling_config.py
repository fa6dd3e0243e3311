"""How a checkpoint embeds or classifies, as config.json, GGUF metadata and sentence-transformers' files say.

modules.json                        Transformer, Pooling and perhaps Normalize, in this order
1_Pooling/config.json               whose hidden states are read
config_sentence_transformers.json   texts that begin queries and documents
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from octavo.config import Task
from octavo.errors import ConfigError, FileFormatError, UnsupportedModelError
from octavo.json_file import is_present, read_file, read_json_fields, read_json_object
from octavo.models.config_fields import ConfigFields
from octavo.models.model_config import ModelConfig
from octavo.models.source import ModelSource, load_tokenizer, read_config
from octavo.pooling import Activation, Pooling

_MAX_BYTES = 2**20
# Whose states are read, as versions of sentence-transformers and GGUF files call it.
_TOKENS: Mapping[object, Literal["last", "mean"]] = {
    **dict.fromkeys(("pooling_mode_lasttoken", "lasttoken", 3), "last"),
    **dict.fromkeys(("pooling_mode_mean_tokens", "mean", 1), "mean"),
}
_ACTIVATIONS: Mapping[object, Activation] = {
    **dict.fromkeys(("Identity", "regression"), "none"),
    **dict.fromkeys(("Sigmoid", "multi_label_classification"), "sigmoid"),
    "Softmax": "softmax",
}


class _Module(Struct):
    path: str
    type: str


class _Prompts(Struct):
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


def read_model(source: ModelSource, task: Task = "auto") -> ModelConfig:
    """Return a model's network, and how it embeds or classifies if that is its task.

    Args:
        source: of the model.
        task: see EngineConfig.

    Raises:
        ConfigError: the checkpoint is for another task.
        UnsupportedModelError: the network, or the way in which it pools, is not supported.
        FileFormatError: a file is damaged.
    """
    config = read_config(source)
    model, fields = ModelConfig.from_hf(config), ConfigFields(config, {}, where="config.json")
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    classifies, has_no_head = name.endswith("ForSequenceClassification"), name.endswith("Model")
    if (task == "generate" and (classifies or has_no_head)) or (task == "embed" and classifies):
        raise ConfigError(f'task={task!r} contradicts {name} in config.json; use task="auto"')
    if task == "generate":
        return model
    compares_tokens = fields.get("classifier_from_token") is not None
    if task != "embed" and (compares_tokens or (task == "rerank" and not classifies)):
        return replace(model, pooling=_reranker(fields, model, source))
    if classifies:
        return replace(model, pooling=_classifier(fields, model))
    if task == "embed" or has_no_head or is_present(source.path / "modules.json") or _gguf_mode(source):
        return replace(model, pooling=_embedder(fields, model, source))
    return model


def _embedder(fields: ConfigFields, model: ModelConfig, source: ModelSource) -> Pooling:
    sizes = fields.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise fields.error("matryoshka_dimensions", "a list of positive integers", sizes)
    pooling = Pooling(
        task="embed",
        size=model.hidden_size,
        is_matryoshka=fields.boolean("is_matryoshka") or bool(sizes),
        dimensions=tuple(sizes),
    )
    if source.gguf is not None:
        return replace(pooling, tokens=_tokens(_gguf_mode(source) or 3, source.path))
    found = read_json_fields(source.path / "config_sentence_transformers.json", _Prompts, _MAX_BYTES)
    if found.default_prompt_name not in (None, *found.prompts):
        raise FileFormatError(f"{source.path}: there is no prompt {found.default_prompt_name!r}, its default")
    pooling = replace(pooling, prompts=tuple(found.prompts.items()), default_prompt=found.default_prompt_name)
    return _with_modules(pooling, source.path) if is_present(source.path / "modules.json") else pooling


def _with_modules(pooling: Pooling, folder: Path) -> Pooling:
    path = folder / "modules.json"
    try:
        modules = msgspec.json.decode(read_file(path, _MAX_BYTES), type=list[_Module])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path}: {error}") from error
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        found = ", ".join(kinds)
        raise UnsupportedModelError(
            f"{path}: expected Transformer, Pooling and perhaps Normalize, got {found}"
        )
    path = folder / Path(modules[1].path).name / "config.json"
    config = read_json_object(path, _MAX_BYTES)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    tokens = _tokens(config.get("pooling_mode") or " and ".join(modes), path)
    if tokens == "mean" and config.get("include_prompt") is False:
        raise UnsupportedModelError(f"{path}: include_prompt = false is not supported")
    return replace(pooling, tokens=tokens, normalises=kinds[-1] == "Normalize")


def _tokens(mode: object, path: Path) -> Literal["last", "mean"]:
    found = _TOKENS.get(mode) if isinstance(mode, str | int) else None
    if found is None:
        raise UnsupportedModelError(f"{path}: expected pooling of the last token or the mean, got {mode!r}")
    return found


def _gguf_mode(source: ModelSource) -> object:
    metadata = {} if source.gguf is None else source.gguf.metadata
    return metadata.get(f"{metadata.get('general.architecture')}.pooling_type")


def _classifier(fields: ConfigFields, model: ModelConfig) -> Pooling:
    names = fields.mapping("id2label")
    size = len(names) or fields.integer("num_labels", 2, maximum=2**20)
    of_pairs = fields.mapping("sentence_transformers").get("activation_fn")
    module = of_pairs or fields.get("sbert_ce_default_activation_function")
    kind = str(fields.get("problem_type") if module is None else module).rpartition(".")[2]
    if module is not None and kind not in _ACTIVATIONS:
        raise UnsupportedModelError(f"config.json: the activation {module} of labels is not supported")
    return Pooling(
        task="classify",
        size=size,
        labels=tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(size)),
        activation=_ACTIVATIONS.get(kind, "sigmoid" if size == 1 else "softmax"),
        is_qwen3_pair=size == 1 and model.architecture.startswith("Qwen3"),
    )


def _reranker(fields: ConfigFields, model: ModelConfig, source: ModelSource) -> Pooling:
    """Return how a checkpoint that generates text ranks: by how likely it says yes, and not no."""
    pieces = fields.get("classifier_from_token") or ["no", "yes"]
    if not model.architecture.startswith("Qwen3"):
        raise UnsupportedModelError(f"{model.architecture} cannot rerank; networks of Qwen3 can")
    tokenizer = load_tokenizer(source)
    if tokenizer is None or not isinstance(pieces, list):
        raise fields.error("classifier_from_token", "two pieces of a tokenizer", pieces)
    ids = [tokenizer.encode(str(piece), add_special_tokens=False) for piece in pieces]
    if [len(found) for found in ids] != [1, 1]:
        raise fields.error("classifier_from_token", "two pieces that are one token each", pieces)
    return Pooling(
        task="classify",
        size=1,
        labels=(str(pieces[1]),),
        activation="sigmoid",
        token_ids=(ids[0][0], ids[1][0]),
        is_qwen3_pair=True,
    )
