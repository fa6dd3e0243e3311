"""What was decided about one model on one rank, before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.config import EngineConfig
from octavo.engine.memory.weights import WeightGroup
from octavo.models import ModelConfig, num_parameters
from octavo.parallel import TensorParallel

# Bytes on the host for a block whose contents can be found again, and for one that is only handed out.
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
        kv_bytes_per_token: KV cache bytes of one token over all layers.
        block_size: tokens per block.
        num_blocks: blocks of the KV cache.
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
    kv_bytes_per_token: int
    block_size: int
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
        """What of it stays quantised, by kind; see QuantisedWeight."""
        kinds = dict.fromkeys(group.kind for group in self.weights if group.kind is not None)
        return {
            kind: int(sum(group.num_bytes for group in self.weights if group.kind == kind)) for kind in kinds
        }

    @property
    def num_kv_tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.num_kv_tokens * self.kv_bytes_per_token

    @property
    def table_bytes(self) -> int:
        """Memory of block tables, on the host: int32, and a step gathers its rows into another table."""
        return self.max_num_seqs * (2 * 4 * self.max_blocks + _ROW_BYTES)

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
        """Memory of the device that the engine will have taken at its busiest; a CPU's is the host's."""
        on_device = self.weight_bytes + self.kv_bytes + self.working_bytes
        return on_device + (self.host_bytes if self.device.type == "cpu" else 0)

    @property
    def max_blocks(self) -> int:
        """Blocks of a sequence of max_model_len."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_full_sequences(self) -> float:
        """How many sequences of max_model_len fit at once."""
        return self.num_kv_tokens / self.max_model_len


def gib(num_bytes: float) -> str:
    """Format bytes for people."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 2**20:
        digits = 1 if num_bytes < 10 * 2**20 else 0
        return f"{num_bytes / 2**20:.{digits}f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB"
