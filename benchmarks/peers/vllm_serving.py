"""The peer of GPU serving: vLLM on the same requests and shapes, in a process of its own.

It runs as its users run it: AsyncLLM with the API server's limits on a step for requests that arrive over
time, LLM.generate for a list of them; prefix caching and CUDA graphs as by default. Statistics are off, and
so is FlashInfer's sampler, which only top-k and top-p need and which wants a CUDA compiler.

    python -m peers.vllm_serving open_loop|offline SETTINGS     (JSON; the last line printed is JSON)
"""

import asyncio
import gc
import json
import os
import sys
import time
from typing import Any, NoReturn

from support.child import ChildError, run_child
from support.gpu_workloads import WORKLOADS, Workload, run_figures
from support.model_folder import model_folder, remove_folder
from support.open_loop import Arrival, Trace, poisson_arrivals, summarise

Figures = dict[str, Any]
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def measure_in_child(kind: str, settings: Figures, limit_s: float) -> Figures | None:
    """Measure in a fresh process.

    Args:
        kind: "open_loop" or "offline".
        settings: those of `open_loop` or `offline`.
        limit_s: seconds after which the process is killed.

    Returns:
        The figures, or None, after saying why, if vLLM failed.
    """
    try:
        return run_child(["-m", "peers.vllm_serving", kind, json.dumps(settings)], limit_s)
    except ChildError as error:
        print(f"vLLM was not measured: {error}", file=sys.stderr, flush=True)
        return None


def engine_options(settings: Figures) -> Figures:
    """Keyword arguments of LLM and of AsyncEngineArgs."""
    return {
        "model": model_folder(settings["model"], **settings.get("fields", {})),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 16384,
        "gpu_memory_utilization": 0.9,
        "kv_cache_dtype": settings.get("kv_cache_dtype", "auto"),
        "quantization": settings.get("quantization"),
        **({"attention_backend": backend} if (backend := settings.get("attention_backend")) else {}),
        "disable_log_stats": True,
        "tensor_parallel_size": settings.get("tensor_parallel_size", 1),
    }


async def open_loop(settings: Figures) -> None:
    """Answer requests that arrive over time, and print the figures.

    Args:
        settings: model, rate, seconds, seed, prompt_len, output_len, repeat, as in gpu_open_loop.py.
    """
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.usage.usage_lib import UsageContext  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    names = ("rate", "seconds", "seed", "prompt_len", "output_len")
    arrivals = poisson_arrivals(**{name: settings[name] for name in names})
    start = time.perf_counter()
    options = engine_options(settings)
    arguments = AsyncEngineArgs(**options)
    engine = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
    await engine.get_supported_tasks()
    ready = {"ready_s": time.perf_counter() - start, "ready_at": time.time(), "version": vllm.__version__}
    gc.collect()
    gc.freeze()
    runs = []
    for number in range(settings["repeat"]):
        if number:
            await _reset_prefix_cache(engine)
        trace = await serve(engine, arrivals, str(number))
        runs.append(summarise(arrivals, trace, settings["seconds"]))
    _finish({**ready, "runs": runs}, options["model"])


async def serve(engine: Any, arrivals: list[Arrival], label: str) -> Trace:
    """Run a task for each request, which sleeps until the request is due."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    trace = Trace([[] for _ in arrivals], [0.0] * len(arrivals))
    begun = time.perf_counter()

    async def answer(number: int, arrival: Arrival) -> None:
        await asyncio.sleep(begun + arrival.time_s - time.perf_counter())
        trace.added[number] = time.perf_counter() - begun
        params = SamplingParams(
            temperature=0.6,
            max_tokens=arrival.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": arrival.prompt}
        async for output in engine.generate(prompt, params, request_id=f"{label}-{number}"):
            now = time.perf_counter() - begun
            trace.token_times[number] += [now] * len(output.outputs[0].token_ids)
        assert len(trace.token_times[number]) == arrival.max_tokens

    await asyncio.gather(*(answer(number, arrival) for number, arrival in enumerate(arrivals)))
    return trace


async def _reset_prefix_cache(engine: Any) -> None:
    """Drop cached prefixes; the last requests' blocks may be freed a moment after their last tokens."""
    for _ in range(50):
        if await engine.reset_prefix_cache():
            return
        await asyncio.sleep(0.02)
    raise SystemExit("vLLM does not drop its cached prefixes")


def offline(settings: Figures) -> None:
    """Run workloads, each from an empty prefix cache, and print the figures.

    Args:
        settings: model, kv_cache_dtype, quantization, fields of config.json to add; workloads, names of
            them; runs of each.
    """
    import vllm  # pyright: ignore[reportMissingImports]

    start = time.perf_counter()
    options = engine_options(settings)
    llm = vllm.LLM(**options)
    ready = {"ready_s": time.perf_counter() - start, "ready_at": time.time(), "version": vllm.__version__}
    quantised = type(llm.llm_engine.vllm_config.quant_config).__name__
    print(f"vLLM is ready; its weights: {quantised}", file=sys.stderr, flush=True)
    results = {}
    for name in settings["workloads"]:
        workload = WORKLOADS[name]()
        seconds = [run(llm, workload) for _ in range(settings["runs"])]
        results[name] = run_figures(workload, seconds)
        print(f"vLLM {name}: {results[name]['rate']:,.1f} {workload.unit}", file=sys.stderr, flush=True)
    _finish({**ready, "weights": quantised, "results": results}, options["model"])


def run(llm: Any, workload: Workload) -> float:
    """Seconds that all requests take, starting with an empty prefix cache."""
    from vllm import SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]

    for _ in range(50):
        if llm.reset_prefix_cache():
            break
        time.sleep(0.02)
    else:
        raise SystemExit("vLLM does not drop its cached prefixes")
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in workload.prompts]
    params = [
        SamplingParams(n=workload.n, temperature=0.6, max_tokens=num, ignore_eos=True, detokenize=False)
        for num in workload.max_tokens
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for output, num in zip(outputs, workload.max_tokens, strict=True):
        assert [len(completion.token_ids) for completion in output.outputs] == [num] * workload.n
    return seconds


def _finish(figures: Figures, folder: str) -> NoReturn:
    """Print the figures and end here: whatever shutting down does, they are there and nobody waits for it.

    Removes the model's folder.
    """
    print(json.dumps(figures), flush=True)
    remove_folder(folder)
    os._exit(0)


def main() -> None:
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if kind == "open_loop":
        asyncio.run(open_loop(settings))
    else:
        offline(settings)


if __name__ == "__main__":
    main()
