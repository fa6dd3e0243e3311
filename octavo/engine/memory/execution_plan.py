"""What was decided about one model on one rank before anything is loaded, and what its weights will take."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from octavo.config import EngineConfig
from octavo.forms.base import Storage
from octavo.gemm.cpu import int8
from octavo.gemm.cpu import mkl as packed
from octavo.kv import CacheLayout
from octavo.models import ModelConfig, num_parameters, parameter_shapes
from octavo.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights of one part of the network that have one form.

    Attributes:
        part: "embedding", "attention", "feed-forward", "experts", "LM head", "layer inputs", or "norms and
            others".
        form: as the checkpoint calls it, "Q4_K" or "4 bits in groups of 128", or a dtype.
        kind: that of QuantisedWeight; None: numbers of a dtype.
        num_bytes: what they take.
    """

    part: str
    form: str
    kind: str | None
    num_bytes: float


def weight_groups(
    model: ModelConfig,
    dtype: torch.dtype,
    kept: Mapping[str, Storage],
    quantization: str,
    device: torch.device,
) -> tuple[WeightGroup, ...]:
    """Return the weights of a rank's share, in the order in which they are loaded.

    Args:
        model: the rank's share of a network.
        dtype: of weights that are not quantised.
        kept: matrices that stay quantised; see kept_storage.
        quantization: see ExecutionPlan.
        device: of the weights.
    """
    plain = Storage("plain", dtype.itemsize, form=str(dtype).removeprefix("torch."))
    shapes, rounded = parameter_shapes(model), _ROUNDED.get(quantization)
    totals: dict[tuple[str, str, str | None], float] = {}
    for name, shape in shapes.items():
        storage = kept.get(name, plain)
        if name not in kept and rounded is not None and _is_rounded(quantization, name, shape):
            storage = rounded
        key = _part_of(name), storage.form, None if storage is plain else storage.kind
        totals[key] = totals.get(key, 0.0) + storage.nbytes(shape)
    if "lm_head.weight" not in shapes and _EMBEDDING not in kept and model.pooling is None:
        copy = None
        if rounded is _INT8:
            copy = _INT8
        elif rounded is None and _is_packed(dtype, device):
            copy = plain
        if copy is not None:
            key = "LM head", f"{copy.form}, a copy of the embedding", None if copy is plain else copy.kind
            totals[key] = copy.nbytes(shapes[_EMBEDDING])
    return tuple(WeightGroup(*key, num_bytes) for key, num_bytes in totals.items())


def dequantised_forms(stored: Mapping[str, Storage], kept: Mapping[str, Storage]) -> dict[str, int]:
    """Return how many matrices of each form become numbers of dtype while loading.

    Args:
        stored: matrices that the checkpoint stores quantised.
        kept: those that stay so.
    """
    forms: dict[str, int] = {}
    for name, storage in stored.items():
        if name not in kept:
            forms[storage.form] = forms.get(storage.form, 0) + 1
    return forms


_EMBEDDING = "model.embed_tokens.weight"
_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
_INT8 = Storage("int8", int8.BYTES_PER_NUMBER, form="int8")
_BF16 = Storage("bf16", 2, form="bfloat16")
# Quantization -> each matrix that it rounds.
_ROUNDED: Mapping[str, Storage] = MappingProxyType(
    {"bf16": _BF16, "mixed": _BF16, "mixed fp8": _BF16, "int8": _INT8}
)


def _is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrices of a dtype are copied to MKL's own layout, which may take more bytes."""
    return device.type == "cpu" and packed.unsupported_reason(torch.empty(0, dtype=dtype)) is None


def _is_rounded(quantization: str, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is the weight of a GEMM, or an embedding that may be an LM head, too."""
    if len(shape) != 2 or name.endswith("mlp.gate.weight"):
        return False
    return quantization != "int8" or name not in (_EMBEDDING, _LAYER_EMBEDDING)


def _part_of(name: str) -> str:
    if name == _EMBEDDING:
        return "embedding"
    if name == "lm_head.weight":
        return "LM head"
    if "per_layer" in name:
        return "layer inputs"
    if not name.endswith("_proj.weight"):
        return "norms and others"
    if ".experts." in name:
        return "experts"
    return "attention" if ".self_attn." in name else "feed-forward"


# Bytes on the host for a block that the prefix cache may find, and for one that it may not.
_CACHED_BLOCK_BYTES, _BLOCK_BYTES = 800, 64
# Bytes on the host for each row of a block table.
_ROW_BYTES = 128


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """An EngineConfig with every "auto" and None decided for one model on one device.

    Attributes:
        config: the engine options, as they were given.
        model: the network, whole.
        parallel: the rank whose share of weights, KV cache and activations is planned.
        device: where the model runs.
        dtype: of weights and activations.
        kv_dtype: of the KV cache.
        quantization: as users choose it, but "bf16", "mixed" or "mixed fp8" where "auto" or "fp8" means that
            on this CPU; see load_decoder.
        max_model_len: longest prompt + output, tokens.
        max_num_seqs: most sequences of a step.
        max_num_batched_tokens: token budget of a step.
        weights: the loaded weights, scales included.
        dequantised: forms of matrices that become numbers of dtype while loading, and how many they are.
        layout: groups of the cache's layers, on this rank.
        num_blocks: blocks of the KV cache, or pages, if there are several groups.
        working_bytes: most memory that steps need beside both.
        free_bytes: memory free on the device before loading; on a CPU, this rank's share of it.
    """

    config: EngineConfig
    model: ModelConfig
    parallel: TensorParallel
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    quantization: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weights: tuple[WeightGroup, ...]
    dequantised: Mapping[str, int]
    layout: CacheLayout
    num_blocks: int
    working_bytes: int
    free_bytes: int

    @property
    def shares_prefixes(self) -> bool:
        """Whether a step reads blocks that several of its sequences have in common once for all."""
        return self.config.share_prefixes and not self.config.deterministic

    @property
    def max_num_tokens(self) -> int:
        """Most tokens of a step: each of its sequences has one at least, whatever the budget."""
        return max(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, all ranks' together."""
        return num_parameters(self.model)

    @property
    def weight_bytes(self) -> int:
        """Memory of the loaded weights."""
        return int(sum(group.num_bytes for group in self.weights))

    @property
    def quantised_bytes(self) -> Mapping[str, int]:
        """The part of it that stays quantised, by kind; see QuantisedWeight."""
        kinds = dict.fromkeys(group.kind for group in self.weights if group.kind is not None)
        return {
            kind: int(sum(group.num_bytes for group in self.weights if group.kind == kind)) for kind in kinds
        }

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.layout.block_size

    @property
    def block_bytes(self) -> int:
        """KV cache bytes of a block over all layers, or of a page."""
        return self.layout.page_size * self.kv_dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes of a token over all layers, as long as all of them keep it."""
        return 2 * sum(layer.size for layer in self.layout.layers) * self.kv_dtype.itemsize

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of one sequence that the KV cache holds."""
        return self.layout.num_tokens(self.num_blocks)

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def most_blocks(self) -> int:
        """Blocks that all sequences take at most: with windows, and what a step adds before they slide."""
        sequences = self.max_num_seqs * self.layout.num_pages(self.max_model_len)
        return sequences + len(self.layout.windows) * -(-self.max_num_tokens // self.block_size)

    @property
    def table_bytes(self) -> int:
        """Memory of block tables, on the host: int32, and a step gathers its rows into another table."""
        return self.max_num_seqs * len(self.layout.groups) * (2 * 4 * self.table_columns + _ROW_BYTES)

    @property
    def host_bytes_per_block(self) -> int:
        """Memory of a block's bookkeeping, on the host."""
        return _CACHED_BLOCK_BYTES if self.config.enable_prefix_caching else _BLOCK_BYTES

    @property
    def host_bytes(self) -> int:
        """Memory of block tables and bookkeeping, on the host."""
        return self.table_bytes + self.num_blocks * self.host_bytes_per_block

    @property
    def total_bytes(self) -> int:
        """The most device memory that the engine will take; on a CPU this includes what the host needs."""
        on_device = self.weight_bytes + self.kv_bytes + self.working_bytes
        return on_device + (self.host_bytes if self.device.type == "cpu" else 0)

    @property
    def max_blocks(self) -> int:
        """Blocks of a sequence of max_model_len."""
        return -(-self.max_model_len // self.block_size)

    @property
    def table_columns(self) -> int:
        """Block ids of a row of a block table: a sequence has all blocks of its last page."""
        return self.max_blocks + self.layout.groups[0].blocks_per_page - 1

    @property
    def max_full_sequences(self) -> float:
        """How many sequences of max_model_len fit at once."""
        return self.num_blocks / self.layout.num_pages(self.max_model_len)


def gib(num_bytes: float) -> str:
    """Format bytes for people."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 2**20:
        digits = 1 if num_bytes < 10 * 2**20 else 0
        return f"{num_bytes / 2**20:.{digits}f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB"
