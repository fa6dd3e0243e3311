"""The parts of a decoder: plain classes that hold tensors and are called with tensors; inference only."""

from octavo.gemm.gated import ACTIVATIONS, activate_and_multiply
from octavo.gemm.make_linear import make_invariant_linear, make_linear, make_quantised_linear
from octavo.layers.attention import AttentionLayer
from octavo.layers.block import BlockInput, BlockOutput
from octavo.layers.embedding import Embedding, LMHead, Pooler, vocabulary_shard
from octavo.layers.feed_forward import FeedForward
from octavo.layers.layer_options import LayerOptions
from octavo.layers.norm import HeadRMSNorm, RMSNorm, WideQKNorm
from octavo.layers.rope_scaling import RopeConfig, inverse_frequencies
from octavo.layers.rotary import Rotary, interleave_halves, rotate_
from octavo.layers.steps.make_step import make_step
from octavo.layers.steps.operator_step import AttentionStep

__all__ = [
    "ACTIVATIONS",
    "AttentionLayer",
    "AttentionStep",
    "BlockInput",
    "BlockOutput",
    "Embedding",
    "FeedForward",
    "HeadRMSNorm",
    "LMHead",
    "LayerOptions",
    "Pooler",
    "RMSNorm",
    "RopeConfig",
    "Rotary",
    "WideQKNorm",
    "activate_and_multiply",
    "interleave_halves",
    "inverse_frequencies",
    "make_invariant_linear",
    "make_linear",
    "make_quantised_linear",
    "make_step",
    "rotate_",
    "vocabulary_shard",
]
