"""How a checkpoint embeds or classifies: read from config.json, GGUF, and what sentence-transformers writes.

modules.json                        Transformer, Pooling and perhaps Normalize, in this order
1_Pooling/config.json               whose hidden states are read
config_sentence_transformers.json   texts that begin queries and documents
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

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
# Kinds of pooling, as versions of sentence-transformers and GGUF files call those that are supported.
_TOKENS = {
    **dict.fromkeys(("pooling_mode_lasttoken", "lasttoken", 3), "last"),
    **dict.fromkeys(("pooling_mode_mean_tokens", "mean", 1), "mean"),
}
_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_BY_PROBLEM: Mapping[object, Activation] = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
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
    model = ModelConfig.from_hf(config)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    fields = ConfigFields(config, {}, where="config.json")
    if name.endswith("ForSequenceClassification"):
        if task in ("generate", "embed"):
            raise ConfigError(f'task={task!r} contradicts {name}, which classifies; use task="auto"')
        if fields.get("classifier_from_token") is None:
            return replace(model, pooling=_classifier(fields, model))
    if task == "rerank" or (task == "auto" and fields.get("classifier_from_token") is not None):
        return replace(model, pooling=_reranker(fields, model, source))
    if task == "generate" and not name.endswith("Model"):
        return model
    found = _gguf_tokens(source) if source.gguf is not None else _is_sentence_transformer(source.path)
    if task == "generate":
        raise ConfigError(f'task="generate" contradicts {name}, which has no LM head; use task="auto"')
    if task == "embed" or found or name.endswith("Model"):
        return replace(model, pooling=_embedder(fields, model, source))
    return model


def _embedder(fields: ConfigFields, model: ModelConfig, source: ModelSource) -> Pooling:
    dimensions = fields.get("matryoshka_dimensions")
    if dimensions is not None and not (
        isinstance(dimensions, list) and all(isinstance(size, int) and size > 0 for size in dimensions)
    ):
        raise fields.error("matryoshka_dimensions", "a list of positive integers", dimensions)
    pooling = Pooling(
        task="embed",
        size=model.hidden_size,
        is_matryoshka=fields.boolean("is_matryoshka") or bool(dimensions),
        dimensions=tuple(dimensions or ()),
    )
    if source.gguf is not None:
        return replace(pooling, tokens=_gguf_tokens(source) or "last")
    found = read_json_fields(source.path / "config_sentence_transformers.json", _Prompts, _MAX_BYTES)
    if found.default_prompt_name is not None and found.default_prompt_name not in found.prompts:
        raise FileFormatError(
            f"{source.path}: default_prompt_name {found.default_prompt_name!r} is no prompt"
        )
    pooling = replace(pooling, prompts=tuple(found.prompts.items()), default_prompt=found.default_prompt_name)
    return _with_modules(pooling, source.path) if _is_sentence_transformer(source.path) else pooling


def _is_sentence_transformer(folder: Path) -> bool:
    return is_present(folder / "modules.json")


def _with_modules(pooling: Pooling, folder: Path) -> Pooling:
    path = folder / "modules.json"
    try:
        modules = msgspec.json.decode(read_file(path, _MAX_BYTES), type=list[_Module])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path}: {error}") from error
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{path}: the modules {', '.join(kinds)} are not supported; supported: Transformer, Pooling and "
            "perhaps Normalize"
        )
    place = folder / Path(modules[1].path).name / "config.json"
    found = read_json_object(place, _MAX_BYTES)
    names = [name for name, value in found.items() if name.startswith("pooling_mode_") and value is True]
    names += [str(found["pooling_mode"])] if "pooling_mode" in found else []
    if len(names) != 1 or names[0] not in _TOKENS:
        raise _no_such_pooling(str(place), " and ".join(names))
    pooling = replace(pooling, tokens=_TOKENS[names[0]], normalises=kinds[-1] == "Normalize")
    if (
        pooling.tokens == "mean"
        and found.get("include_prompt") is False
        and any(dict(pooling.prompts).values())
    ):
        raise UnsupportedModelError(f"{place}: include_prompt = false is not supported")
    return pooling


def _gguf_tokens(source: ModelSource) -> str | None:
    """Return whose states a GGUF file says are read; None: it does not say that it embeds."""
    assert source.gguf is not None
    found = (
        source.gguf.metadata.get(f"{source.gguf.metadata.get('general.architecture')}.pooling_type") or None
    )
    if found is not None and found not in _TOKENS:
        raise _no_such_pooling(source.name, str(found))
    return None if found is None else _TOKENS[found]


def _no_such_pooling(where: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}: pooling by {found or 'nothing'} is not supported; supported: the "
        "last token's state, and the mean of all"
    )


def _classifier(fields: ConfigFields, model: ModelConfig) -> Pooling:
    names = fields.mapping("id2label")
    size = len(names) or fields.integer("num_labels", 2, maximum=2**20)
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(size))
    of_pairs = fields.mapping("sentence_transformers").get("activation_fn")
    found = str(of_pairs or fields.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
    if found and found not in _ACTIVATIONS:
        raise UnsupportedModelError(f"config.json: the activation {found} of labels is not supported")
    usual = "sigmoid" if size == 1 else _BY_PROBLEM.get(fields.get("problem_type"), "softmax")
    if fields.get("problem_type") == "regression":
        usual = "none"
    return Pooling(
        task="classify",
        size=size,
        labels=labels,
        activation=_ACTIVATIONS[found] if found else usual,
        is_qwen3_pair=size == 1 and model.architecture.startswith("Qwen3"),
    )


def _reranker(fields: ConfigFields, model: ModelConfig, source: ModelSource) -> Pooling:
    """A checkpoint that generates text: the relevance of a document is how likely yes is, and not no."""
    tokens = fields.get("classifier_from_token") or ["no", "yes"]
    if (
        not isinstance(tokens, list)
        or len(tokens) != 2
        or not all(isinstance(piece, str) for piece in tokens)
    ):
        raise fields.error("classifier_from_token", "two tokens, such as no and yes", tokens)
    if not model.architecture.startswith("Qwen3") or model.final_softcap:
        raise UnsupportedModelError(
            f"reranking by two tokens is supported for Qwen3, not for {model.architecture}"
        )
    tokenizer = load_tokenizer(source)
    ids = [] if tokenizer is None else [tokenizer.encode(piece, add_special_tokens=False) for piece in tokens]
    if [len(found) for found in ids] != [1, 1]:
        raise UnsupportedModelError(
            f"{source.path}: reranking needs a tokenizer in which {tokens} are one token each"
        )
    return Pooling(
        task="classify",
        size=1,
        labels=(str(tokens[1]),),
        activation="sigmoid",
        token_ids=(ids[0][0], ids[1][0]),
        is_qwen3_pair=True,
    )
