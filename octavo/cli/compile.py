"""`octavo compile`: everything that is compiled for a model, before the first request needs it."""

import time
from dataclasses import replace

from octavo.attention.choice import choose_impl
from octavo.attention.cpu.compile import cache_folder
from octavo.cli.loading import load
from octavo.config import EngineConfig
from octavo.engine.memory import gib
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams


def run_compile(model: str | None, config: EngineConfig, *, quiet: bool) -> None:
    """Start the engine, let it answer once, and say where the compiled code lies.

    Raises:
        ConfigError: prepare=False, which leaves the compiling to requests.
    """
    if not config.prepare:
        raise ConfigError("octavo compile prepares everything; leave --no-prepare (OCTAVO_PREPARE) out")
    if model is not None:
        config = replace(config, model=model)
    begun = time.perf_counter()
    llm = load(config, quiet=quiet)
    llm.generate([[0]], SamplingParams(max_tokens=1, detokenize=False))
    seconds = time.perf_counter() - begun
    plan = llm.engine.plan
    if plan.device.type == "cuda":
        from octavo.engine.gpu.kernel_cache import KernelCache

        kernels = KernelCache(config.kernel_cache_dir)
        print(f"{kernels.folder}: {gib(kernels.num_bytes)} of kernels, ready after {seconds:.1f} s")
    elif choose_impl(config.attention_impl, "cpu", plan.kv_dtype) == "c":
        print(f"{cache_folder()}: the CPU's kernels, ready after {seconds:.1f} s")
    else:
        print(f"nothing to compile: attention runs in PyTorch here ({seconds:.1f} s)")
