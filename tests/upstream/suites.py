"""Which of other projects' tests Octavo runs, what is changed in their text, what is left out, and why."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Case = dict[str, Any]


@dataclass(frozen=True)
class Edit:
    """Text of an upstream file that is replaced before it runs; not finding it is an error."""

    old: str
    new: str
    reason: str


@dataclass(frozen=True)
class Suite:
    """One test function of a checkout.

    Attributes:
        checkout: "flash-attention" or "vllm".
        file: path in the checkout.
        function: name of the test.
        edits: what is replaced in the file's text.
        exception: says of a case why it is left out; None: it runs.
    """

    checkout: str
    file: str
    function: str
    edits: tuple[Edit, ...] = ()
    exception: Callable[[Case], str | None] = lambda case: None


_FLASH = "tests/test_flash_attn.py"
_HOPPER = "hopper/test_flash_attn.py"
_NO_GRADIENTS = Edit(
    "torch.autograd.grad(", "zero_gradients(", "Octavo has no backward: gradients are zeros on both sides"
)
_NO_CHUNKS = Edit(
    "attention_chunk_vals = [torch.randint(1, seqlen_k * 2, (1,)).item(), 0]",
    "attention_chunk_vals = [0]",
    "attention_chunk is refused by name",
)


def _splits(case: Case) -> str:
    """Every case of the test expects an error."""
    return "expects num_splits > 1 to be refused for ragged queries; Octavo honours it"


def _bounds(case: Case) -> str | None:
    """Lengths are on the device: reading them would make every call wait."""
    return (
        None
        if os.environ.get("OCTAVO_DEBUG") == "1"
        else "lengths past a block table raise under OCTAVO_DEBUG=1"
    )


SUITES = {
    "fa2-kvcache": Suite("flash-attention", _FLASH, "test_flash_attn_kvcache"),
    "fa2-varlen": Suite("flash-attention", _FLASH, "test_flash_attn_varlen_causal", (_NO_GRADIENTS,)),
    "fa2-splits": Suite(
        "flash-attention", _FLASH, "test_flash_attn_varlen_paged_kv_num_splits", exception=_splits
    ),
    "fa2-bounds": Suite(
        "flash-attention", _FLASH, "test_flash_attn_kvcache_paged_block_table_bounds", exception=_bounds
    ),
    "fa3-kvcache": Suite("flash-attention", _HOPPER, "test_flash_attn_kvcache", (_NO_CHUNKS,)),
    "fa3-combine": Suite("flash-attention", _HOPPER, "test_flash_attn_combine"),
    "vllm": Suite("vllm", "tests/kernels/attention/test_flash_attn.py", "test_varlen_with_paged_kv"),
}
