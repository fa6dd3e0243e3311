"""How a version of transformers is taught a new attention function, and how a model is set to it."""

import inspect
from typing import Any

import torch

from octavo.errors import InvalidArgumentError
from octavo.hf.attention_function import octavo_attention
from octavo.hf.attention_masks import octavo_mask

# 5.23 lets generate_batch use a function only if its name has "flash" in it.
_NAME, _FLASH_NAME = "octavo", "octavo_flash"


def register() -> str:
    """Make Octavo's attention known to transformers; `attach` does this too.

    Returns:
        The name to put into `model.config._attn_implementation_internal`. With transformers 5.17 it is
        "octavo", which `from_pretrained(..., attn_implementation="octavo")` takes as well.

    Raises:
        InvalidArgumentError: transformers is missing, or its paged cache is of neither known kind.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
    except ImportError as error:
        raise InvalidArgumentError(f"octavo.hf needs transformers 5.17 or later: {error}") from error
    cache: Any = PagedAttentionCache  # its decorator hides the class from type checkers
    arguments = inspect.signature(cache.update).parameters
    if "kwargs" in arguments:
        AttentionInterface.register(_FLASH_NAME, _attend_and_update)
        AttentionMaskInterface.register(_FLASH_NAME, octavo_mask)
        return _FLASH_NAME
    if {"read_index", "write_index"} <= arguments.keys():
        AttentionInterface.register(_NAME, octavo_attention)
        AttentionMaskInterface.register(_NAME, octavo_mask)
        # generate_batch puts the prefix before the name. It has no mask: lengths come with the call.
        AttentionInterface.register(f"paged|{_NAME}", _attend_and_update_by_index)
        return _NAME
    raise InvalidArgumentError(
        f"transformers {__version__}: its paged cache takes {', '.join(arguments)}; "
        "octavo.hf knows the caches of 5.17 and 5.23"
    )


def attach(model: Any) -> Any:
    """Set a model to Octavo's attention, for `generate`, `generate_batch` and plain calls; returns the model.

    `model.set_attn_implementation("sdpa")` sets it back.

    Raises:
        InvalidArgumentError: the model does not work with functions that are given no mask, or transformers
            is of an unknown kind.
    """
    name = register()
    if not hasattr(model, "_supports_flash_attn"):
        raise InvalidArgumentError(f"model must be a model of transformers, got {type(model).__name__}")
    if not model._supports_flash_attn:
        raise InvalidArgumentError(
            f"{type(model).__name__} does not support attention without a mask tensor (transformers runs no "
            "flash attention on it either)"
        )
    # set_attn_implementation would look on the hub for a kernel with "flash" in its name.
    for config in {
        id(part.config): part.config for part in model.modules() if hasattr(part, "config")
    }.values():
        config._attn_implementation_internal = name
    return model


def _attend_and_update(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Run octavo_attention behind the paged cache of transformers 5.23, which gathers keys by index."""
    if cache is not None:
        _refuse_block_table(arguments.get("block_table"))
        key, value = cache.update(key, value, module.layer_idx, kwargs=arguments)
        for used_up in ("block_table", "read_index", "write_index"):
            arguments.pop(used_up, None)
    return octavo_attention(module, query, key, value, attention_mask, **arguments)


def _attend_and_update_by_index(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cache: Any,
    read_index: list[torch.Tensor],
    write_index: list[torch.Tensor],
    cu_seq_lens_k: torch.Tensor | dict[str, torch.Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int | dict[str, int],
    block_table: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Run octavo_attention behind the paged cache of transformers 5.17, which gathers keys by index."""
    _refuse_block_table(block_table)
    kind = "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
    lengths_k = cu_seq_lens_k[kind] if isinstance(cu_seq_lens_k, dict) else cu_seq_lens_k
    longest_k = max_seqlen_k[kind] if isinstance(max_seqlen_k, dict) else max_seqlen_k
    keys, values = cache.update(key, value, module.layer_idx, read_index, write_index)
    arguments |= {"max_length_q": max_seqlen_q, "max_length_k": longest_k, "cu_seq_lens_k": lengths_k}
    # [Sk, KH, D] -> [1, KH, Sk, D]
    key, value = (x.transpose(0, 1)[None] for x in (keys, values))
    return octavo_attention(module, query, key, value, attention_mask, **arguments)


def _refuse_block_table(block_table: object) -> None:
    """Refuse a block table, which transformers should only hand to flash_attention_2 and 3."""
    if block_table is not None:
        raise InvalidArgumentError(
            "block tables come to flash_attention_2 only: octavo.hf.stand_in_for_flash_attn() before "
            "transformers is imported, then attn_implementation='flash_attention_2'"
        )
