"""How much memory a GPU needs beside weights and KV cache: told from shapes, before anything is loaded."""

from octavo.attention import DeviceForest
from octavo.models import ModelConfig

# cuBLAS keeps a workspace for each stream: the steps' own, and the one that graphs are captured on.
_WORKSPACE_BYTES = 2 * 32 * 2**20
_FLOAT32 = 4


def working_bytes(
    model: ModelConfig,
    *,
    itemsize: int,
    max_num_tokens: int,
    max_num_seqs: int,
    share_prefixes: bool,
    deterministic: bool,
) -> int:
    """Return the most that steps hold at one time, in bytes: activations, logits, forest, workspaces.

    Args:
        model: the network.
        itemsize: bytes of a number of an activation.
        max_num_tokens: most tokens of a step.
        max_num_seqs: most sequences of a step.
        share_prefixes: whether there is a forest, if not deterministic.
        deterministic: logits are float32, and there is no forest.
    """
    # Activations, and the buffer that steps with prompts leave their result in.
    token_bytes = _bytes_per_token(model, itemsize) + itemsize * model.hidden_size
    total = _WORKSPACE_BYTES + max_num_tokens * token_bytes
    # An eager step's logits, and those in the graphs' pool, which all graphs share.
    total += 2 * max_num_seqs * model.vocab_size * (_FLOAT32 if deterministic else itemsize)
    if share_prefixes and not deterministic:
        total += DeviceForest.nbytes(
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            num_heads=model.num_heads,
            head_dim=model.head_dim,
        )
    return total


def _bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    """Activations of one token where a layer holds most of them."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    # Queries, keys and values; the attention's result, its logsumexp; its projection back.
    attention = itemsize * (qkv + model.num_heads * model.head_dim) + _FLOAT32 * model.num_heads
    # [gate | up], and the activation of it.
    feed_forward = itemsize * 3 * model.intermediate_size
    # Cosines and sines for each rope.
    rotations = len(model.ropes) * model.head_dim * _FLOAT32
    # The residual stream, and what is to be added to it or was normed of it.
    return 2 * itemsize * model.hidden_size + rotations + max(attention, feed_forward)
