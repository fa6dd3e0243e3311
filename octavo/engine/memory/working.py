"""How much memory is needed beside weights and KV cache, computed from shapes before anything is loaded."""

from dataclasses import replace

from octavo.attention import DeviceForest
from octavo.attention.cache import COPIED_BYTES
from octavo.engine.memory.execution_plan import ExecutionPlan
from octavo.models import ModelConfig
from octavo.models.experts.experts_config import ExpertsConfig, expert_part, names_expert_parallel
from octavo.parallel import TensorParallel, shard_range
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
SMALL_BYTES = 16 * 2**20
"""Segments of 2 MiB from which PyTorch serves up to 1 MiB, which it never takes from a larger one."""
# Factor by which steps on a CPU exceed their activations: freed memory is reused, but not given back.
_CPU_SLACK = 3


def rank_share(model: ModelConfig, parallel: TensorParallel, *, expert_parallel: bool) -> ModelConfig:
    """Return the shapes of what one rank holds of a network, as a network of its own.

    Raises:
        ConfigError: the ranks do not divide the network; see shard_heads and shard_range.
    """
    if expert_parallel:
        model = model.with_whole_experts(parallel)
    if parallel.size == 1:
        return model
    experts = model.experts
    if experts is not None:
        shared = shard_range(experts.shared_size, parallel, what="columns of shared experts")
        with names_expert_parallel(experts, parallel):
            experts = replace(experts, size=len(expert_part(experts, parallel)), shared_size=len(shared))
    has_dense_layers = experts is None or experts.is_beside_dense or not all(experts.layers)
    return replace(
        model,
        experts=experts,
        num_heads=model.num_heads // parallel.size,
        cache_layers=model.own_cache_layers(parallel),
        intermediate_size=(
            len(shard_range(model.intermediate_size, parallel, what="feed-forward columns"))
            if has_dense_layers
            else model.intermediate_size
        ),
        # Rows of embedding and LM head, padded to the same number on every rank.
        vocab_size=-(-model.vocab_size // parallel.size),
    )


def cpu_working_bytes(plan: ExecutionPlan, max_num_tokens: int) -> int:
    """Return the most bytes that steps on a CPU hold at one time: activations and logits.

    Args:
        plan: all but the memory of steps and the number of blocks.
        max_num_tokens: no step has more, whatever its budget.
    """
    num_tokens = min(plan.max_num_batched_tokens, max_num_tokens)
    share = rank_share(plan.model, plan.parallel, expert_parallel=plan.config.expert_parallel)
    activations = _CPU_SLACK * num_tokens * _bytes_per_token(share, plan.dtype.itemsize)
    # Float32 logits; log-probabilities, if all requests want them, of a copy; and slack.
    return activations + 4 * _FLOAT32 * min(plan.max_num_seqs, num_tokens) * plan.model.vocab_size


def gpu_working_bytes(plan: ExecutionPlan) -> int:
    """Return the most bytes that steps on a GPU hold at one time.

    Activations, logits, block tables, forest, workspaces, and memory by which ranks sum.

    Args:
        plan: all but the memory of steps and the number of blocks.
    """
    model, itemsize, num_seqs = plan.model, plan.dtype.itemsize, plan.max_num_seqs
    share = rank_share(model, plan.parallel, expert_parallel=plan.config.expert_parallel)
    # Activations, and the buffer that steps with prompts leave their result in.
    token_bytes = _bytes_per_token(share, itemsize) + itemsize * model.hidden_size
    total = _WORKSPACE_BYTES + GRAPH_BYTES + plan.max_num_tokens * token_bytes
    # Every rank has all logits: those that are kept, and those in the graphs' pool, which all graphs share.
    is_float32 = plan.config.deterministic or model.final_softcap != 0
    total += 2 * num_seqs * model.vocab_size * (_FLOAT32 if is_float32 else itemsize)
    total += rare_bytes(model.vocab_size, num_seqs) + SMALL_BYTES
    # Tables of the device's rows, and those that both kinds of graphs read.
    total += 3 * _INT32 * num_seqs * plan.table_columns * len(plan.layout.groups)
    if plan.shares_prefixes:
        # Groups of layers with equal heads share the memory of results.
        total += sum(
            DeviceForest.nbytes(
                max_num_seqs=num_seqs,
                max_num_tokens=plan.max_num_tokens,
                num_heads=share.num_heads,
                head_dim=head_dim,
            )
            for _, head_dim in {group.kind.shape for group in plan.layout.groups if group.layers}
        )
    if "blocks" in plan.quantised_bytes:
        total += _unpacked_bytes(share, itemsize)
    return total + (RANKS_BYTES if plan.parallel.size > 1 else 0)


def rare_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """Return the memory of a GPU for what few requests ask for: changes of logits, log-probabilities, forks.

    Args:
        vocab_size: V.
        max_num_seqs: most sequences of a step. A quarter of them may have penalties, and count their tokens.
    """
    counts = 2 * _FLOAT32 * vocab_size * (max_num_seqs // 4 + 1)
    return counts + _RARE_BYTES + COPIED_BYTES


def _unpacked_bytes(share: ModelConfig, itemsize: int) -> int:
    """Return the bytes of the largest product's weight: packed weights become floats for many rows.

    The same room serves loading, when no step runs: the product's matrices take a byte a number while they
    are read, and once more when they are joined.
    """
    widest = max(map(share.feed_forward_size, range(share.num_layers)))
    return itemsize * share.hidden_size * max(_qkv_size(share), 2 * widest)


def _bytes_per_token(share: ModelConfig, itemsize: int) -> int:
    """Return the bytes of one token's activations at the point where a layer holds most of them."""
    # Queries, keys and values; the attention's result, its logsumexp; its projection back.
    attention = itemsize * (_qkv_size(share) + share.num_heads * share.head_dim) + _FLOAT32 * share.num_heads
    if share.has_sinks:
        # Sinks are added to a float32 result.
        attention += _FLOAT32 * share.num_heads * share.head_dim
    # [gate | up], and the activation of it.
    feed_forward = itemsize * 3 * max(map(share.feed_forward_size, range(share.num_layers)))
    if share.experts is not None:
        feed_forward = max(feed_forward, _expert_bytes_per_token(share, share.experts, itemsize))
    if share.experts is not None and share.experts.is_beside_dense:
        # The feed-forward's result waits for that of the experts, and the router has a norm of its own.
        feed_forward += 2 * itemsize * share.hidden_size
    # Cosines and sines for each rope; queries that grow have their own.
    tables = zip(share.ropes, share.rope_head_dims, strict=True)
    rotations = sum((2 if rope.query_growth else 1) * head_dim for rope, head_dim in tables) * _FLOAT32
    # All layers' own inputs, and while they are made, what is projected to them and its norm.
    inputs = 3 * itemsize * share.num_layers * share.layer_input_size
    # The residual stream, and a block's output before it is added, or the normalised stream.
    return 2 * itemsize * share.hidden_size + rotations + inputs + max(attention, feed_forward)


def _qkv_size(share: ModelConfig) -> int:
    return max((share.num_heads + 2 * layer.num_kv_heads) * layer.head_dim for layer in share.cache_layers)


def _expert_bytes_per_token(model: ModelConfig, experts: ExpertsConfig, itemsize: int) -> int:
    """Return a token's bytes of router logits, rows for its experts, [gate | up], results and their sum."""
    row_bytes = itemsize * (2 * experts.size + experts.size + model.hidden_size)
    shared = itemsize * (3 * experts.shared_size + 2 * model.hidden_size) if experts.shared_size else 0
    logits = _FLOAT32 * (experts.number + model.hidden_size)
    return max(logits + experts.num_chosen * (row_bytes + 4 * _INT32), shared)
