"""Tensor parallelism on paper: tokens per second on 1 to 8 GPUs, and what share of time sums over ranks take.

    python benchmarks/tensor_parallel_model.py

A decode step of B sequences with c tokens each on n GPUs takes

    (weights / n + KV / min(n, kv heads)) / bandwidth  +  operations / (n x rate)  +  layers x fixed
    +  2 x layers x sum(2 B hidden bytes, n)

and a prompt of T tokens

    operations / (n x prefill rate)  +  2 x layers x sum(2 T hidden bytes, n)

Bandwidth, rate, prefill rate and the fixed time are those of one H200 in this repository's results (8B:
846ff3d); the H100 is taken to have the same rates at 3.35 / 4.8 of the bandwidth. The time of a sum between
two GPUs was measured in a CUDA graph on two H200s with NVLink (7a35ba1): one shot with residual sum and norm,
two shots, and beyond 16 MB NCCL. For four and eight, the part beyond an empty sum is taken to grow as a
ring's traffic does, 2 (n - 1) / n; that is not measured. Needs no GPU.
"""

from dataclasses import dataclass
from itertools import pairwise

from support.common import table

MB = 2**20
# Bytes of a bfloat16 sum, and its microseconds.
SUMS = (
    *((2048, 3.8), (16384, 4.4), (65536, 4.7), (262144, 5.3), (524288, 6.0), (MB, 8.3)),
    *((2 * MB, 12.2), (4 * MB, 19.4), (8 * MB, 35.5), (16 * MB, 59.6)),
)
# Of larger ones: what NCCL takes for 16 MB, and its bytes per second beyond.
LARGE_SUM_US, LARGE_SUM_RATE = 75.3, 332e9
# Of bfloat16 matrices; what prompts reach of it, and a layer of a decode step beside reading its weights.
MATRIX_RATE, PREFILL_SHARE, LAYER_S = 786e12, 0.80, 17e-6
CONTEXT, PROMPT = 2048, 8192


@dataclass(frozen=True, slots=True)
class Network:
    """Shapes of a decoder with heads of 128 and 8 kv heads."""

    name: str
    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int

    @property
    def weights(self) -> float:
        """Numbers that a decode step reads: all products, the LM head included."""
        layer = self.hidden * (2 * self.heads + 16) * 128 + 3 * self.hidden * self.inner
        return float(self.layers * layer + self.vocabulary * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache."""
        return self.layers * 2 * 8 * 128 * 2


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: bytes per second that a copy reaches, and bytes of memory."""

    name: str
    bandwidth: float
    memory: float


NETWORKS = (
    Network("8B", 4096, 36, 32, 12288, 151936),
    Network("32B", 5120, 64, 64, 25600, 151936),
    Network("70B", 8192, 80, 64, 28672, 128256),
)
DEVICES = (Device("H100", 2.96e12, 80e9), Device("H200", 4.24e12, 141e9))


def sum_s(num_bytes: float, num_gpus: int) -> float:
    """Seconds of a sum over ranks."""
    if num_gpus == 1:
        return 0.0
    empty = SUMS[0][1]
    return (empty + (_two_us(num_bytes) - empty) * 2 * (num_gpus - 1) / num_gpus) * 1e-6


def _two_us(num_bytes: float) -> float:
    """Microseconds between two GPUs, on straight lines between what was measured."""
    if num_bytes > SUMS[-1][0]:
        return LARGE_SUM_US + (num_bytes - SUMS[-1][0]) / LARGE_SUM_RATE * 1e6
    for (low, low_us), (high, high_us) in pairwise(SUMS):
        if low <= num_bytes <= high:
            return low_us + (high_us - low_us) * (num_bytes - low) / (high - low)
    return SUMS[0][1]


def decode_s(
    network: Network, device: Device, num_gpus: int, batch: int, context: int = CONTEXT
) -> tuple[float, float]:
    """Seconds of a decode step, and those of them that sums over ranks take."""
    kv_bytes = batch * context * network.kv_bytes / min(num_gpus, 8)
    read_s = (2 * network.weights / num_gpus + kv_bytes) / device.bandwidth
    compute_s = 2 * network.weights * batch / num_gpus / MATRIX_RATE
    sums_s = 2 * network.layers * sum_s(2 * batch * network.hidden, num_gpus)
    return read_s + compute_s + network.layers * LAYER_S + sums_s, sums_s


def prompt_s(network: Network, num_gpus: int, num_tokens: int = PROMPT) -> tuple[float, float]:
    """Seconds of a prompt, and those of them that sums over ranks take."""
    head = network.vocabulary * network.hidden
    operations = 2 * (network.weights - head) * num_tokens
    operations += 4 * network.layers * network.heads * 128 * num_tokens**2 / 2
    sums_s = 2 * network.layers * sum_s(2 * num_tokens * network.hidden, num_gpus)
    return operations / num_gpus / (MATRIX_RATE * PREFILL_SHARE) + sums_s, sums_s


def with_share(value: float, part_s: float, total_s: float) -> str:
    """Format a value, and in brackets the share of its time that sums take."""
    return f"{value:,.0f} ({100 * part_s / total_s:.0f}%)"


def fits(network: Network, device: Device, num_gpus: int) -> bool:
    """Whether a tenth of the memory is left for activations and graphs beside the cache of 64 sequences."""
    needed = (2 * network.weights + 64 * CONTEXT * network.kv_bytes) / num_gpus
    return needed <= 0.9 * device.memory


def decode_cells(network: Network, device: Device, num_gpus: int) -> list[str]:
    """Tokens per second of 1 and of 64 sequences, with the share of sums."""
    if not fits(network, device, num_gpus):
        return ["-", "-"]
    times = [(batch, *decode_s(network, device, num_gpus, batch)) for batch in (1, 64)]
    return [with_share(batch / total_s, sums_s, total_s) for batch, total_s, sums_s in times]


def rows() -> list[list[str]]:
    """A row for each network and number of GPUs that hold it, if they are the largest."""
    found = []
    for network in NETWORKS:
        for num_gpus in (n for n in (1, 2, 4, 8) if any(fits(network, device, n) for device in DEVICES)):
            decoding = [cell for device in DEVICES for cell in decode_cells(network, device, num_gpus)]
            total_s, sums_s = prompt_s(network, num_gpus)
            found.append([network.name, str(num_gpus), *decoding, with_share(total_s * 1e3, sums_s, total_s)])
    return found


def report() -> str:
    """Return the table in Markdown."""
    decoding = (f"{device.name}: {of}" for device in DEVICES for of in ("1 sequence", "64"))
    return table(("model", "GPUs", *decoding, "8,192 in, ms"), rows())


def main() -> None:
    """Print the table."""
    print(report())


if __name__ == "__main__":
    main()
