"""What 4 to 8 bits cost in accuracy against float32, teacher-forced on a fixed text.

The embedded model is run as its file has it ("auto"), in bfloat16 and in int8, beside float32. Then its
numbers are stored once more in every GGUF type that the gguf package writes, each file run in its blocks
beside its own float32: the difference is the rounding of activations. At last they are stored in bfloat16 and
rounded to float8 while loading, with rows as they are, and with rows in float8, too, as GPUs multiply more
than one; here PyTorch rounds them. Prints perplexities, the share of
positions where both have the same most likely token, and the mean and largest difference of the
log-probabilities of the text's own tokens. The last line is JSON.

    python benchmarks/cpu_accuracy.py [--types Q4_0,Q8_0] [--save MACHINE]
"""

import math
import tempfile
from pathlib import Path
from unittest.mock import patch

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, ReaderTensor
from gguf.quants import dequantize, quantize
from support.common import make_parser, publish, table
from support.texts import TIDE
from torch import Tensor

from octavo import LLM, RequestOutput, SamplingParams
from octavo.forms.float8 import quantise_rows
from octavo.gemm.cpu.float8_rows import Float8CpuLinear
from octavo.models import resolve_model

TYPES = "Q4_0,Q4_1,Q5_0,Q5_1,Q8_0"
COLUMNS = ("perplexity float32", "perplexity", "same best token", "mean difference", "largest")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--types", default=TYPES)
    arguments = parser.parse_args()
    model = str(resolve_model("smollm2").path)
    figures: dict[str, object] = {
        "its own file": compare(model, "auto"),
        "bf16": compare(model, "bf16"),
        "int8": compare(model, "int8"),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.types.split(","):
            path = Path(folder) / f"{name}.gguf"
            store_again(model, path, GGMLQuantizationType[name])
            figures[name] = compare(str(path), "auto")
            path.unlink()
        path = Path(folder) / "BF16.gguf"
        store_again(model, path, GGMLQuantizationType.BF16)
        figures["fp8"] = compare(str(path), "fp8")
        with patch.object(Float8CpuLinear, "__call__", with_float8_rows):
            figures["fp8, rows too"] = compare(str(path), "fp8")
    rows = [[name, *(f"{value:.4g}" for value in row.values())] for name, row in figures.items()]  # type: ignore[union-attr]
    print(table(["weights", *COLUMNS], rows))
    publish("cpu_accuracy", figures, arguments)


def with_float8_rows(layer: Float8CpuLinear, x: Tensor) -> Tensor:
    """What a float8 layer returns of rows in float8."""
    values, scales = quantise_rows(x)
    return layer.multiply_dequantised(values.float() * scales)


def compare(model: str, quantization: str) -> dict[str, float]:
    """Read the text with a model's numbers in float32, and as `quantization` has them."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    exact, rough = (LLM(model, quantization=q).generate(TIDE, params)[0] for q in ("none", quantization))
    own_exact, own_rough = own_logprobs(exact), own_logprobs(rough)
    gaps = [abs(a - b) for a, b in zip(own_exact, own_rough, strict=True)]
    pairs = zip(best_ids(exact), best_ids(rough), strict=True)
    figures = (
        math.exp(-sum(own_exact) / len(gaps)),
        math.exp(-sum(own_rough) / len(gaps)),
        sum(a == b for a, b in pairs) / len(gaps),
        sum(gaps) / len(gaps),
        max(gaps),
    )
    return dict(zip(COLUMNS, figures, strict=True))


def store_again(model: str, path: Path, kind: GGMLQuantizationType) -> None:
    """Copy a GGUF file, its matrices in another type."""
    reader = GGUFReader(model)
    writer = GGUFWriter(path, arch=str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        values, kept = numbers_of(tensor, kind)
        writer.add_tensor(tensor.name, values, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def numbers_of(tensor: ReaderTensor, kind: GGMLQuantizationType) -> tuple:
    """A tensor's data in a type, and that type; vectors keep theirs."""
    if len(tensor.shape) < 2:
        return tensor.data, tensor.tensor_type
    return quantize(dequantize(tensor.data, tensor.tensor_type), kind), kind


def own_logprobs(output: RequestOutput) -> list[float]:
    """Log-probability of each prompt token after the first."""
    entries = (output.prompt_logprobs or [])[1:]
    return [entry[t].logprob for t, entry in zip(output.prompt_token_ids[1:], entries, strict=True) if entry]


def best_ids(output: RequestOutput) -> list[int]:
    """Most likely token at each position."""
    return [min(entry, key=lambda t: entry[t].rank) for entry in (output.prompt_logprobs or [])[1:] if entry]


if __name__ == "__main__":
    main()
