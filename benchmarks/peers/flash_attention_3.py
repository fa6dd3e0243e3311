"""FlashAttention-3's paged kernel as a peer, from vLLM's shared object: _vllm_fa3_C.abi3.so."""

import lzma
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from octavo.attention import AttentionMetadata


def call_flash_attention_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """Call FlashAttention-3's paged kernel; caches are [N, B, KH, D], contiguous."""
    return torch.ops._vllm_fa3_C.fwd(
        *(q, k_cache, v_cache, None, None, None, None),
        *(metadata.cu_seqlens_q, None, None, None, metadata.seq_lens),
        *(metadata.max_query_len, metadata.max_seq_len, metadata.block_table),
        *(None, None, None, None, None, None, None, None),
        *(scale, causal, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None),
    )[0]


def load_flash_attention_3(path: Path) -> None:
    """Load the peer's shared object, unpacking it first if it ends in .xz."""
    if path.suffix == ".xz":
        unpacked = Path(tempfile.mkdtemp()) / path.stem
        unpacked.write_bytes(lzma.decompress(path.read_bytes()))
        path = unpacked
    torch.ops.load_library(path)
