"""Networks: what a model is, where its weights come from, and the decoder built from both."""

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.loader import load_decoder
from octavo.models.parameters import kv_bytes_per_token, num_parameters, parameter_shapes

__all__ = [
    "Decoder",
    "ModelConfig",
    "kv_bytes_per_token",
    "load_decoder",
    "num_parameters",
    "parameter_shapes",
]
