"""Models: their configuration, their weights, and the decoder built from both."""

from octavo.models.decoder import Decoder
from octavo.models.generation_config import SamplingDefaults, read_sampling_defaults
from octavo.models.loader import check_kv_scales, load_decoder
from octavo.models.model_config import ModelConfig
from octavo.models.parameters import (
    num_active_parameters,
    num_parameters,
    parameter_shapes,
)
from octavo.models.pooling_config import read_model
from octavo.models.source import (
    ModelSource,
    load_tokenizer,
    open_weights,
    read_config,
    resolve_model,
    stored_matrices,
)
from octavo.models.weights import WeightSource

__all__ = [
    "Decoder",
    "ModelConfig",
    "ModelSource",
    "SamplingDefaults",
    "WeightSource",
    "check_kv_scales",
    "load_decoder",
    "load_tokenizer",
    "num_active_parameters",
    "num_parameters",
    "open_weights",
    "parameter_shapes",
    "read_config",
    "read_model",
    "read_sampling_defaults",
    "resolve_model",
    "stored_matrices",
]
