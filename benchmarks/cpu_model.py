"""A model of random weights on a CPU, with its matrices in float32, bfloat16, float8 and int8.

Prints tokens per second of a prompt of 512 tokens, and of decoding some sequences of short prompts at once,
from the difference of two runs; the best of some. In brackets: the fraction of the bound, at which a step
reads all matrices once at the measured bandwidth. The last line is JSON.

    python benchmarks/cpu_model.py [--size 0.6b] [--layers 28] [--forms none,bf16,fp8,int8] [--save MACHINE]
"""

import argparse
import time
from typing import Any

import torch
from support.common import make_parser, publish, read_bandwidth, table
from support.model_folder import model_folder

from octavo import LLM, SamplingParams
from octavo.gemm.cpu.bfloat16 import matrix_units
from octavo.models import ModelConfig, read_config, resolve_model

FORMS = ("none", "bf16", "fp8", "int8")
SEQUENCES = (1, 4, 16, 64)
PROMPT, SHORT, NEW, REPEATS = 512, 16, 16, 2


def seconds(llm: LLM, num_seqs: int, prompt: int, num_new: int) -> float:
    """Seconds that some requests take together."""
    prompts = [[(7 * row + token) % 9000 + 100 for token in range(prompt)] for row in range(num_seqs)]
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def decode_rate(llm: LLM, num_seqs: int) -> float:
    """Tokens per second of all sequences, without their prompts."""
    gaps = (seconds(llm, num_seqs, SHORT, 2 + NEW) - seconds(llm, num_seqs, SHORT, 2) for _ in range(REPEATS))
    return num_seqs * NEW / min(gaps)


def step_bytes(llm: LLM) -> float:
    """Bytes of weights that a step reads: all but an embedding that is no LM head."""
    parts: dict[str, float] = {}
    for group in llm.engine.plan.weights:
        parts[group.part] = parts.get(group.part, 0) + group.num_bytes
    return sum(parts.values()) - (parts["embedding"] if "LM head" in parts else 0)


def measure(folder: str, form: str) -> dict[str, float]:
    """Load the model in one form, warm it up and run it."""
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "enable_prefix_caching": False}
    start = time.perf_counter()
    llm = LLM(folder, quantization=form, max_model_len=1024, **options)
    figures: dict[str, float] = {"load s": time.perf_counter() - start}
    figures["bytes"] = step_bytes(llm)
    seconds(llm, 1, SHORT, 2)
    figures["prompt"] = PROMPT / min(seconds(llm, 1, PROMPT, 1) for _ in range(REPEATS + 1))
    return figures | {f"decode {num}": decode_rate(llm, num) for num in SEQUENCES}


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure all forms and print a table."""
    layers = {} if arguments.layers is None else {"num_hidden_layers": arguments.layers}
    folder = model_folder(arguments.size, **layers)
    model = ModelConfig.from_hf(read_config(resolve_model(folder, "dummy")))
    bandwidth = read_bandwidth()
    print(
        f"{torch.get_num_threads()} threads, {bandwidth / 1e9:.1f} GB/s, units for bfloat16: {matrix_units()}"
    )
    results, rows = {}, []
    for form in arguments.forms.split(","):
        results[form] = figures = measure(folder, form)
        steps = bandwidth / figures["bytes"]
        shown = [f"{figures['load s']:.1f}", f"{figures['prompt']:.0f}"]
        for num in SEQUENCES:
            rate = figures[f"decode {num}"]
            shown.append(f"{rate:.1f} ({rate / (num * steps):.0%})")
        rows.append([form, *shown])
    print(table(["matrices", "load s", "prompt", *(f"decode {num}" for num in SEQUENCES)], rows))
    return {"size": arguments.size, "layers": model.num_layers, "bandwidth": bandwidth, "results": results}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", default="0.6b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--forms", default=",".join(FORMS))
    publish("cpu_model", run(arguments := parser.parse_args()), arguments)


if __name__ == "__main__":
    main()
