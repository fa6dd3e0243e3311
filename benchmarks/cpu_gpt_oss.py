"""gpt-oss on a CPU: some of its layers in its own shapes, of random weights, beside llama.cpp on one file.

    python benchmarks/cpu_gpt_oss.py [--layers 4] [--repeat 3] [--engines octavo,llama.cpp] [--save NAME]

The file is a GGUF as users download it: experts in MXFP4, attention, embedding and LM head in Q8_0. Each run
is a fresh process that starts when the machine is idle. "single" is a request of 32 tokens in and 48 out,
"batch8" eight of them, which llama.cpp's Python API answers one after the other. The bound is the bytes that
decode steps read, of experts that tokens touch if they choose evenly, at the measured bandwidth. Prints
medians, and the first run in brackets. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from support.common import make_parser, measure_apart, publish, read_bandwidth, table

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, CHOSEN, VOCABULARY = 2880, 64, 8, 64, 32, 4, 201088
NUM_IN, NUM_OUT = 32, 48
BATCHES = {"single": 1, "batch8": 8}
Q8_0_BYTES, MXFP4_BYTES = 34 / 32, 17 / 32
# Numbers of a layer's attention, of an expert, and of the LM head.
ATTENTION = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
EXPERT, LM_HEAD = 3 * HIDDEN * HIDDEN, HIDDEN * VOCABULARY


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engines", default="octavo,llama.cpp")
    parser.add_argument("--worker", nargs=3, metavar=("ENGINE", "BATCH", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        engine, batch, path = arguments.worker
        print(json.dumps(run_worker(engine, int(batch), path)))
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Write the file, run each engine, and print the comparison."""
    engines = [name for name in arguments.engines.split(",") if name != "llama.cpp" or find_spec("llama_cpp")]
    bandwidth = read_bandwidth()
    rows: list[list[object]] = []
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_file(Path(folder) / "gpt-oss.gguf", arguments.layers)
        for name, batch in BATCHES.items():
            bound = batch / (step_bytes(arguments.layers, batch) / bandwidth)
            runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
            for _ in range(arguments.repeat):
                for engine in engines:
                    run = measure_apart(__file__, "--worker", engine, str(batch), str(path))
                    runs[engine].append(run)
            results[name] = {"bound": bound, **runs}
            for engine, figures in runs.items():
                rates = [run["tokens_per_s"] for run in figures]
                rate = statistics.median(rates)
                own = [f"{rate:.1f} ({rates[0]:.1f})", f"{rate / bound:.0%}"]
                own += [f"{figures[0][key]:.1f}" for key in ("load_s", "peak_gib")]
                rows.append([name, engine, *own])
    print(f"{arguments.layers} of 24 layers; read bandwidth {bandwidth / 1e9:.0f} GB/s")
    print(
        table(["workload", "engine", "tokens/s: median (first)", "of the bound", "load s", "peak GiB"], rows)
    )
    report = {"layers": arguments.layers, "bytes_per_s": bandwidth, "results": results}
    publish("cpu_gpt_oss", report, arguments)


def step_bytes(layers: int, batch: int) -> float:
    """Bytes of weights that a decode step reads."""
    touched = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** batch)
    return layers * (ATTENTION * Q8_0_BYTES + touched * EXPERT * MXFP4_BYTES) + LM_HEAD * Q8_0_BYTES


def write_file(path: Path, layers: int) -> Path:
    """Write a GGUF file of random weights."""
    from gguf import GGMLQuantizationType, GGUFWriter

    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "gpt-oss")
    writer.add_block_count(layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_expert_feed_forward_length(HIDDEN)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_sliding_window(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(150000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")

    def q8_0(name: str, rows: int, columns: int) -> None:
        data = random.integers(0, 256, (rows, columns // 32, 34), dtype=np.uint8)
        # Numbers of about 0.02.
        data[:, :, :2] = np.array([3e-4], "<f2").view(np.uint8)
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=GGMLQuantizationType.Q8_0)

    def mxfp4(name: str, rows: int, columns: int) -> None:
        data = random.integers(0, 256, (EXPERTS, rows, columns // 32, 17), dtype=np.uint8)
        data[..., 0] = 120
        stack = data.reshape(EXPERTS, rows, -1)
        writer.add_tensor(name, stack, raw_dtype=GGMLQuantizationType.MXFP4)

    def floats(name: str, *sizes: int, mean: float = 0.0) -> None:
        writer.add_tensor(name, (mean + 0.1 * random.standard_normal(sizes)).astype(np.float32))

    q8_0("token_embd.weight", VOCABULARY, HIDDEN)
    q8_0("output.weight", VOCABULARY, HIDDEN)
    floats("output_norm.weight", HIDDEN, mean=1.0)
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS, "attn_v": KV_HEADS}
    for layer in range(layers):
        prefix = f"blk.{layer}."
        floats(f"{prefix}attn_norm.weight", HIDDEN, mean=1.0)
        floats(f"{prefix}post_attention_norm.weight", HIDDEN, mean=1.0)
        for name, number in heads.items():
            q8_0(f"{prefix}{name}.weight", number * HEAD_DIM, HIDDEN)
            floats(f"{prefix}{name}.bias", number * HEAD_DIM)
        q8_0(f"{prefix}attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        floats(f"{prefix}attn_output.bias", HIDDEN)
        floats(f"{prefix}attn_sinks.weight", HEADS)
        floats(f"{prefix}ffn_gate_inp.weight", EXPERTS, HIDDEN)
        floats(f"{prefix}ffn_gate_inp.bias", EXPERTS)
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            mxfp4(f"{prefix}{name}.weight", HIDDEN, HIDDEN)
            floats(f"{prefix}{name}.bias", EXPERTS, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run_worker(engine: str, batch: int, path: str) -> dict[str, float]:
    """Load an engine, warm it up, and answer; called in a process of its own."""
    from octavo.cli.bench.throughput import peak_rss_mib

    random = np.random.default_rng(1)
    prompts = [random.integers(1000, 190000, NUM_IN).tolist() for _ in range(batch)]
    start = time.perf_counter()
    answer = (open_llama_cpp if engine == "llama.cpp" else open_octavo)(path)
    load_s = time.perf_counter() - start
    answer(prompts[:1], 4)
    start = time.perf_counter()
    answer(prompts, NUM_OUT)
    rate = batch * NUM_OUT / (time.perf_counter() - start)
    return {"tokens_per_s": rate, "load_s": load_s, "peak_gib": peak_rss_mib() / 1024}


def open_octavo(path: str) -> Any:
    """Return what answers prompts with so many tokens each."""
    from octavo import LLM, SamplingParams

    llm = LLM(path, device="cpu", max_model_len=1024)

    def answer(prompts: list[list[int]], num_out: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        llm.reset_prefix_cache()
        llm.generate(prompts, params)

    return answer


def open_llama_cpp(path: str) -> Any:
    """Return what answers prompts with so many tokens each, one after the other."""
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    model = Llama(path, n_ctx=1024, verbose=False, n_threads=2, n_threads_batch=2)

    def answer(prompts: list[list[int]], num_out: int) -> None:
        for prompt in prompts:
            for count, _ in enumerate(model.generate(prompt, temp=0.0, reset=True), start=1):
                if count == num_out:
                    break

    return answer


if __name__ == "__main__":
    main()
