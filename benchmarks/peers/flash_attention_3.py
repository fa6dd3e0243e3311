"""FlashAttention-3's paged kernel as a peer, from vLLM's shared object: _vllm_fa3_C.abi3.so."""

import importlib.util
import lzma
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.attention import AttentionMetadata

_INSIDE_VLLM = Path("vllm_flash_attn") / "_vllm_fa3_C.abi3.so"
# Holds vLLM's rotary embedding and its store to the cache.
_VLLM_OPERATORS = "_C_stable_libtorch.abi3.so"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of S sequences of queries and keys.

    Attributes:
        cu_seqlens_q: [S + 1] int32.
        max_q, max_k: tokens of the longest.
        seqused_k: [S] int32, keys in a paged cache, those that the call appends left out; or None.
        cu_seqlens_k: [S + 1] int32 of ragged keys; or None.
    """

    cu_seqlens_q: Tensor
    max_q: int
    max_k: int
    seqused_k: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


@dataclass(frozen=True, slots=True)
class NewKeys:
    """New keys and values [S, Sn, KH, D] and the angles [positions, D / 2], all of one dtype.

    Queries and keys are rotated by halves: dimension i with i + D / 2.
    """

    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor


def attend_flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    block_table: Tensor | None,
    scale: float,
    new: NewKeys | None = None,
    causal: bool = True,
) -> Tensor:
    """Attend q [T, H, D] to a paged cache [N, B, KH, D] or ragged keys [Tk, KH, D], by position as vLLM does.

    vLLM builds the kernel for ragged queries alone, and may build it without appending.

    Raises:
        RuntimeError: the build lacks what is asked, or an argument does not fit.
    """
    k_new, v_new, cos, sin = (None,) * 4 if new is None else (new.k, new.v, new.cos, new.sin)
    return torch.ops._vllm_fa3_C.fwd(
        *(q, k, v, k_new, v_new, None, None),
        *(lengths.cu_seqlens_q, lengths.cu_seqlens_k, None, None, lengths.seqused_k),
        *(lengths.max_q, lengths.max_k, block_table),
        # Batch index, left padding, angles, rotary positions; scales of q, k and v.
        *(None, None, cos, sin, None, None, None, None),
        # Scale, mask, window, softcap, interleaved; metadata, splits, packing, SMs, sinks, ranks.
        *(scale, causal, -1, -1, 0.0, False, None, 0, None, 0, None, 1, 0, None),
    )[0]


def call_flash_attention_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """Call FlashAttention-3's paged kernel; caches are [N, B, KH, D], contiguous."""
    lengths = Lengths(metadata.cu_seqlens_q, metadata.max_query_len, metadata.max_seq_len, metadata.seq_lens)
    return attend_flash_attention_3(q, k_cache, v_cache, lengths, metadata.block_table, scale, causal=causal)


@dataclass(frozen=True, slots=True)
class Places:
    """Where new tokens go: positions and slots [T] int64, cos_sin [positions, D], one [1] float32 of 1."""

    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    one: Tensor


def store_as_vllm(q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], places: Places) -> None:
    """Rotate q [T, H, D] and k [T, KH, D] in place and store k and v, by vLLM's two kernels.

    Raises:
        AttributeError: vLLM's operators are not loaded.
    """
    torch.ops._C.rotary_embedding(places.positions, q, k, q.shape[-1], places.cos_sin, True)
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        *(k, v, *caches, places.slots, "auto", places.one, places.one)
    )


def store_as_torch(q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], places: Places) -> None:
    """Do as store_as_vllm in PyTorch."""
    cos, sin = places.cos_sin[places.positions].unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        x.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
    for cache, rows in zip(caches, (k, v), strict=True):
        cache.flatten(0, 1)[places.slots] = rows


def find_flash_attention_3() -> Path:
    """Find the peer's shared object in an installed vLLM, without importing vLLM.

    Raises:
        FileNotFoundError: there is none.
    """
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        if (path := Path(folder) / _INSIDE_VLLM).exists():
            return path
    raise FileNotFoundError(f"no vllm/{_INSIDE_VLLM} on sys.path; looked in {list(folders)}")


def load_flash_attention_3(path: Path) -> None:
    """Load the peer's shared object, unpacking it first if it ends in .xz."""
    if path.suffix == ".xz":
        unpacked = Path(tempfile.mkdtemp()) / path.stem
        unpacked.write_bytes(lzma.decompress(path.read_bytes()))
        path = unpacked
    torch.ops.load_library(path)


def load_vllm_operators(flash_attention_3: Path) -> None:
    """Load vLLM's own operators, which lie in the folder above the peer's.

    Raises:
        OSError: they are not there, or do not fit this torch.
    """
    torch.ops.load_library(flash_attention_3.parent.parent / _VLLM_OPERATORS)
