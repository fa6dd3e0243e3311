"""How much memory is needed beside weights and KV cache, computed from shapes before anything is loaded."""

from dataclasses import replace

from octavo.attention import DeviceForest
from octavo.attention.cache import COPIED_BYTES
from octavo.models import ModelConfig
from octavo.models.experts.config import ExpertsConfig, expert_part
from octavo.parallel import TensorParallel, shard_heads, shard_range
from octavo.parallel.shared_memory import SHARED_BYTES

# cuBLAS keeps a workspace for each stream: the steps' own, and the one that graphs are captured on.
_WORKSPACE_BYTES = 2 * 32 * 2**20
GRAPH_BYTES = 2**29
"""What the driver keeps of some 200 CUDA graphs, and what PyTorch's pools leave unused."""
RANKS_BYTES = 2**29 + SHARED_BYTES
"""What NCCL's buffers may take on each of several GPUs, a guess, and the memory that they share."""
_FLOAT32 = _INT32 = 4
# Logits of prompts in float32, twice, and twice their sort keys, which are twice as large.
_RARE_BYTES = 6 * 32 * 2**20
# Factor by which steps on a CPU exceed their activations: freed memory is reused, but not given back.
_CPU_SLACK = 3
# Host bytes for a block whose contents can be found again, and for one that is only handed out.
_CACHED_BLOCK_BYTES, _BLOCK_BYTES = 800, 64
# Host bytes for each row of a block table.
_ROW_BYTES = 128


def rank_share(model: ModelConfig, parallel: TensorParallel) -> ModelConfig:
    """Return the shapes of what one rank holds of a network, as a network of its own.

    Raises:
        ConfigError: the ranks do not divide the network; see shard_heads and shard_range.
    """
    if parallel.size == 1:
        return model
    heads = shard_heads(model.num_heads, model.num_kv_heads, parallel)
    experts = model.experts
    if experts is not None:
        experts = replace(experts, size=len(expert_part(experts, parallel)))
    has_dense_layers = experts is None or not all(experts.layers)
    return replace(
        model,
        experts=experts,
        num_heads=len(heads.query),
        num_kv_heads=len(heads.kv),
        intermediate_size=(
            len(shard_range(model.intermediate_size, parallel, what="feed-forward columns"))
            if has_dense_layers
            else model.intermediate_size
        ),
        # Rows of embedding and LM head, padded to the same number on every rank.
        vocab_size=-(-model.vocab_size // parallel.size),
    )


def host_bytes(*, max_num_seqs: int, max_blocks: int, num_blocks: int, caches_prefixes: bool) -> int:
    """Return the bytes of block tables and of the blocks' bookkeeping, which are on the host.

    Args:
        max_num_seqs: rows of the tables.
        max_blocks: columns of the tables: blocks of the longest sequence.
        num_blocks: blocks of the KV cache.
        caches_prefixes: whether blocks are registered to be found again.
    """
    # A step gathers its rows of the table into another one.
    tables = max_num_seqs * (2 * _INT32 * max_blocks + _ROW_BYTES)
    return tables + num_blocks * (_CACHED_BLOCK_BYTES if caches_prefixes else _BLOCK_BYTES)


def unpacked_working_bytes(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes of the largest product's weight: packed weights become floats for many rows.

    The same room serves loading, when no step runs: the product's matrices take a byte a number while they
    are read, and once more when they are joined.

    Args:
        model: the network.
        itemsize: bytes of a float.
    """
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return itemsize * model.hidden_size * max(qkv, 2 * model.intermediate_size)


def cpu_working_bytes(model: ModelConfig, *, itemsize: int, max_num_tokens: int, max_num_seqs: int) -> int:
    """Return the most that steps on a CPU hold at one time, in bytes: activations and logits.

    Args:
        model: the network.
        itemsize: bytes of a number of an activation.
        max_num_tokens: most tokens of a step.
        max_num_seqs: most sequences of a step.
    """
    activations = _CPU_SLACK * max_num_tokens * _bytes_per_token(model, itemsize)
    # Float32 logits; log-probabilities, if all requests want them, of a copy; and slack.
    return activations + 4 * _FLOAT32 * min(max_num_seqs, max_num_tokens) * model.vocab_size


def gpu_working_bytes(
    model: ModelConfig,
    *,
    itemsize: int,
    max_num_tokens: int,
    max_num_seqs: int,
    max_blocks: int,
    share_prefixes: bool,
    deterministic: bool,
) -> int:
    """Return the most that steps on a GPU hold at one time, in bytes.

    Activations, logits, block tables, forest and workspaces.

    Args:
        model: the network.
        itemsize: bytes of a number of an activation.
        max_num_tokens: most tokens of a step.
        max_num_seqs: most sequences of a step.
        max_blocks: blocks of the longest sequence.
        share_prefixes: whether there is a forest, if not deterministic.
        deterministic: logits are float32, and there is no forest.
    """
    # Activations, and the buffer that steps with prompts leave their result in.
    token_bytes = _bytes_per_token(model, itemsize) + itemsize * model.hidden_size
    total = _WORKSPACE_BYTES + GRAPH_BYTES + max_num_tokens * token_bytes
    # Logits that are kept, and those in the graphs' pool, which all graphs share.
    is_float32 = deterministic or model.final_softcap != 0
    total += 2 * max_num_seqs * model.vocab_size * (_FLOAT32 if is_float32 else itemsize)
    total += rare_bytes(model.vocab_size, max_num_seqs)
    # Tables of the device's rows, and those that both kinds of graphs read.
    total += 3 * _INT32 * max_num_seqs * max_blocks
    if share_prefixes and not deterministic:
        total += DeviceForest.nbytes(
            max_num_seqs=max_num_seqs,
            max_num_tokens=max(max_num_seqs, max_num_tokens),
            num_heads=model.num_heads,
            head_dim=model.head_dim,
        )
    return total


def rare_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """Return the memory of a GPU for what few requests ask for: changes of logits, log-probabilities, forks.

    Args:
        vocab_size: V.
        max_num_seqs: most sequences of a step. A quarter of them may have penalties, and count their tokens.
    """
    counts = 2 * _FLOAT32 * vocab_size * (max_num_seqs // 4 + 1)
    return counts + _RARE_BYTES + COPIED_BYTES


def _bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes of one token's activations at the point where a layer holds most of them."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    # Queries, keys and values; the attention's result, its logsumexp; its projection back.
    attention = itemsize * (qkv + model.num_heads * model.head_dim) + _FLOAT32 * model.num_heads
    if model.has_sinks:
        # The float32 result that they join.
        attention += _FLOAT32 * model.num_heads * model.head_dim
    # [gate | up], and the activation of it.
    feed_forward = itemsize * 3 * model.intermediate_size
    if model.experts is not None:
        feed_forward = max(feed_forward, _expert_bytes_per_token(model, model.experts, itemsize))
    # Cosines and sines for each rope.
    rotations = len(model.ropes) * model.head_dim * _FLOAT32
    # The residual stream, and a block's output before it is added, or the normalised stream.
    return 2 * itemsize * model.hidden_size + rotations + max(attention, feed_forward)


def _expert_bytes_per_token(model: ModelConfig, experts: ExpertsConfig, itemsize: int) -> int:
    """Logits of the router; the rows of a token's experts, their [gate | up] and the results; the sum."""
    row_bytes = itemsize * (2 * experts.size + experts.size + model.hidden_size)
    return _FLOAT32 * (experts.number + model.hidden_size) + experts.num_chosen * (row_bytes + 4 * _INT32)
