"""Time to unpack a checkpoint's integers and to pack them as GPUs multiply them, by format.

    python benchmarks/repack.py [--device cuda] [--rounds 4] [--save MACHINE]

Random matrices of a layer of 8B: K, Q, gate and down. Reading files is not counted. On a CPU it is the time
of one thread. Prints a table, then one line of JSON.
"""

import time
from collections.abc import Callable

import torch
from support.common import make_parser, publish, table
from torch import Tensor

from octavo.forms.blocks import BlockWeight
from octavo.forms.packed import PackedWeight
from octavo.models.formats.gguf.gguf_blocks import blocks_of
from octavo.models.formats.gguf.header import GGML_TYPES
from octavo.models.formats.schemes import read_scheme

_SHAPES = ((1024, 4096), (4096, 4096), (12288, 4096), (4096, 12288))
_GROUP = 128
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True}
_PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP, "symmetric": True}
_FIELDS = {
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm"},
    "GPTQ": _GPTQ | {"desc_act": False},
    "GPTQ, act-order": _GPTQ | {"desc_act": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _PACKED}},
    },
}
_GGUF = ("Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0")


class Tensors:
    """A StoredTensors in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def type_name(self, name: str) -> str:
        return {torch.int32: "I32", torch.int64: "I64", torch.float16: "F16"}[self._tensors[name].dtype]

    def read_stored(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        tensor = self._tensors[name][rows or slice(None)]
        return tensor if columns is None else tensor[:, columns]

    def read(
        self, name: str, *, rows: slice | None = None, columns: slice | None = None, dtype: torch.dtype
    ) -> Tensor:
        return self.read_stored(name, rows=rows, columns=columns).to(dtype)

    def close(self) -> None:
        pass


def stored(name: str, num_rows: int, size: int) -> dict[str, Tensor]:
    """Return the tensors of a random matrix in a format."""

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)

    num_groups = size // _GROUP
    if name == "compressed-tensors":
        return {
            "x.weight_packed": words(num_rows, size // 8),
            "x.weight_scale": torch.rand(num_rows, num_groups).half(),
            "x.weight_shape": torch.tensor([num_rows, size]),
        }
    awq = {"x.qzeros": words(num_groups, num_rows // 8), "x.scales": torch.rand(num_groups, num_rows).half()}
    if name == "AWQ":
        return awq | {"x.qweight": words(size, num_rows // 8)}
    groups = torch.arange(size, dtype=torch.int32) // _GROUP
    groups = groups[torch.randperm(size)] if "order" in name else groups
    return awq | {"x.qweight": words(size // 8, num_rows), "x.g_idx": groups}


def reader(name: str, num_rows: int, size: int, device: torch.device) -> Callable[[], BlockWeight]:
    """Return what unpacks a random matrix."""
    if name in _GGUF:
        kind = next(each for each in GGML_TYPES.values() if each.name == name)
        shape = num_rows, size // kind.block_size, kind.block_bytes
        blocks = torch.randint(0, 60, shape, dtype=torch.uint8)
        return lambda: blocks_of(name, blocks.to(device))
    scheme = read_scheme({"quantization_config": _FIELDS[name]})
    assert scheme is not None, f"{name} is not quantised"
    source = scheme.open(Tensors(stored(name, num_rows, size)))

    def read() -> BlockWeight:
        weight = source.read_quantised("x.weight", device=device)
        assert isinstance(weight, BlockWeight), f"{name} has no blocks"
        return weight

    return read


def seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the best time of a call."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    times = []
    for _ in range(rounds):
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - start)
    return min(times)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    for name in (*_FIELDS, *_GGUF):
        unpack = pack = 0.0
        for num_rows, size in _SHAPES:
            read = reader(name, num_rows, size, device)
            unpack += seconds(read, device, arguments.rounds)
            weight = read()
            pack += seconds(lambda weight=weight: PackedWeight.pack(weight), device, arguments.rounds)
        rows.append([name, round(unpack, 4), round(pack, 4), round(unpack + pack, 4)])
    header = ["format", "unpack_s", "pack_s", "both_s"]
    print(table(header, rows))
    publish("repack", {"rows": [dict(zip(header, row, strict=True)) for row in rows]}, arguments)


if __name__ == "__main__":
    main()
