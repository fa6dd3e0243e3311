"""Writes GGUF files byte by byte, good ones and bad ones, independently of the reader."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_LAYOUTS = dict(zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIif?Qqd", strict=True))


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def number(kind: int, value: float) -> bytes:
    return struct.pack("<" + _LAYOUTS[kind], value)


def pair(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def array(kind: int, items: Sequence[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


def encode(key: str, value: object) -> bytes:
    """A pair of the natural type of a Python value."""
    if isinstance(value, bool):
        return pair(key, BOOL, number(BOOL, value))
    if isinstance(value, int):
        return pair(key, U32, number(U32, value))
    if isinstance(value, float):
        return pair(key, F32, number(F32, value))
    if isinstance(value, str):
        return pair(key, STRING, text(value))
    assert isinstance(value, list)
    if isinstance(value[0], str):
        return pair(key, ARRAY, array(STRING, [text(item) for item in value]))
    kind = BOOL if isinstance(value[0], bool) else I32 if isinstance(value[0], int) else F32
    return pair(key, ARRAY, array(kind, [number(kind, item) for item in value]))


@dataclass
class Tensor:
    """A tensor; `offset` None is the next aligned place."""

    name: str | bytes
    dimensions: Sequence[int]  # innermost first, as in the file
    data: bytes
    kind: int = 0
    offset: int | None = None

    @classmethod
    def of(cls, name: str, values: np.ndarray) -> "Tensor":
        return cls(name, tuple(reversed(values.shape)), values.astype("<f4").tobytes())


@dataclass
class File:
    """All parts of a file, each open to being wrong."""

    pairs: list[bytes] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_pairs: int | None = None
    alignment: int = 32

    def build(self) -> bytes:
        infos, data = b"", b""
        for tensor in self.tensors:
            data += bytes(-len(data) % self.alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            infos += text(tensor.name) + struct.pack("<I", len(tensor.dimensions))
            infos += struct.pack(f"<{len(tensor.dimensions)}Q", *tensor.dimensions)
            infos += struct.pack("<IQ", tensor.kind, offset)
            data += tensor.data
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_pairs)
        head += b"".join(self.pairs) + infos
        return head + bytes(-len(head) % self.alignment) + data


def write(path: Path, metadata: Mapping[str, object], tensors: Sequence[Tensor]) -> Path:
    path.write_bytes(File([encode(key, value) for key, value in metadata.items()], list(tensors)).build())
    return path


SIZES = {"hidden": 16, "inner": 24, "vocab": 20, "heads": 4, "kv_heads": 2, "head_dim": 8}


def metadata_of(architecture: str, **more: object) -> dict[str, object]:
    """Metadata of a tiny model of two layers; `more` is of the architecture, with "__" for a dot."""
    own: dict[str, object] = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": SIZES["hidden"],
        "feed_forward_length": SIZES["inner"],
        "attention.head_count": SIZES["heads"],
        "attention.head_count_kv": SIZES["kv_heads"],
        "attention.key_length": SIZES["head_dim"],
        "attention.value_length": SIZES["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
    }
    own |= {key.replace("__", "."): value for key, value in more.items()}
    return {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in own.items()}


def tensors_of(architecture: str, *, biases: bool = False, seed: int = 0) -> list[Tensor]:
    """Random tensors of the model that `metadata_of` describes, in the file's names."""
    random = np.random.default_rng(seed)
    hidden, inner = SIZES["hidden"], SIZES["inner"]
    q, kv = (SIZES[heads] * SIZES["head_dim"] for heads in ("heads", "kv_heads"))
    layer = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
    }
    layer |= {"attn_output": (hidden, q)}
    layer |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    layer |= {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    if architecture in ("qwen3", "gemma3"):
        layer |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (SIZES["head_dim"],))
    if architecture in ("gemma2", "gemma3"):
        layer |= dict.fromkeys(("post_attention_norm", "post_ffw_norm"), (hidden,))
    shapes = {"token_embd.weight": (SIZES["vocab"], hidden), "output_norm.weight": (hidden,)}
    for index in range(2):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
        if biases or architecture == "qwen2":
            stems = ("attn_q", "attn_k", "attn_v", "attn_output")[: 4 if biases else 3]
            shapes |= {f"blk.{index}.{stem}.bias": layer[stem][:1] for stem in stems}
    return [Tensor.of(name, random.standard_normal(shape)) for name, shape in shapes.items()]
