"""Loads a model with a progress bar, for every command; `octavo compile` does no more than that."""

import dataclasses
import sys
import time
from typing import TYPE_CHECKING

from octavo.cli.interrupts import raise_on_interrupt
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineError
from octavo.garbage import all_lives_on
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM


def load(config: EngineConfig, *, quiet: bool = False) -> "LLM":
    """Load the model; show a progress bar if standard error is a terminal.

    PyTorch is imported here, which takes seconds: after a command has refused what it can.
    From here on Ctrl-C raises KeyboardInterrupt; before, it ends the process at once.
    """
    with all_lives_on():
        from octavo.llm import LLM

    llm = LLM(progress=not quiet and sys.stderr.isatty(), **dataclasses.asdict(config))
    raise_on_interrupt()
    return llm


def run_compile(model: str | None, config: EngineConfig, *, quiet: bool) -> None:
    """Start the engine, let it answer once, and say where the compiled code lies.

    Raises:
        ConfigError: prepare=False, which leaves the compiling to requests.
        EngineError: a kernel cannot be compiled, or the folder of compiled kernels cannot be used.
    """
    if not config.prepare:
        raise ConfigError(
            "octavo compile prepares everything; leave --no-prepare (OCTAVO_PREPARE, octavo.toml) out"
        )
    if model is not None:
        config = dataclasses.replace(config, model=model)
    import torch

    from octavo.attention.cpu.c_calls import unsupported_reason
    from octavo.engine.memory import gib
    from octavo.gemm.cpu.library import compile_failure
    from octavo.kernels.c.compiler import cache_folder

    begun = time.perf_counter()
    llm = load(config, quiet=quiet)
    llm.generate([[0]], SamplingParams(max_tokens=1, detokenize=False))
    seconds = time.perf_counter() - begun
    plan = llm.engine.plan
    if plan.device.type == "cuda":
        from octavo.engine.gpu.kernel_cache import KernelCache

        kernels = KernelCache(config.kernel_cache_dir)
        print(f"{kernels.folder}: {gib(kernels.num_bytes)} of kernels, ready after {seconds:.1f} s")
    elif plan.dtype == torch.float32:
        # Both libraries are checked, whichever of them this model needs.
        failure = unsupported_reason("cpu", torch.float32) or compile_failure()
        if failure is not None:
            raise EngineError(f"the CPU's kernels cannot be compiled: {failure}")
        print(f"{cache_folder()}: the CPU's kernels, ready after {seconds:.1f} s")
    else:
        print(f"nothing to compile: the CPU's kernels are float32, this model runs in {plan.dtype}")
