"""Decides device, dtype and sizes, and how many KV blocks fit, before anything is loaded."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from octavo.attention.cache import FLOAT8
from octavo.attention.implementations import choose_impl
from octavo.config import EngineConfig
from octavo.engine.memory.execution_plan import ExecutionPlan, dequantised_forms, gib, weight_groups
from octavo.engine.memory.rank_device import device_of, free_bytes_of, free_memory_bytes
from octavo.engine.memory.working import cpu_working_bytes, gpu_working_bytes, rank_share
from octavo.errors import ConfigError, OutOfMemoryError
from octavo.forms.base import Storage
from octavo.gemm.cpu.matrix_units import outruns_float32
from octavo.gemm.make_linear import multiplies
from octavo.kv import plan_layout
from octavo.models import ModelConfig, parameter_shapes
from octavo.models.storage import kept_storage
from octavo.parallel import TensorParallel

_CPU_DEFAULT_KV_BYTES = 4 * 2**30
_DEFAULT_FRACTION = {"cpu": 0.5, "cuda": 0.9}
_DEFAULT_TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}
_DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
_DEFAULT_NUM_SEQS = {"cpu": 256, "cuda": 512}


def plan_execution(
    config: EngineConfig,
    model: ModelConfig,
    parallel: TensorParallel = TensorParallel(),
    *,
    stored: Mapping[str, Storage] = MappingProxyType({}),
) -> ExecutionPlan:
    """Decide device, dtype, lengths and the size of the KV cache.

    Args:
        config: engine options.
        model: the network, whole.
        parallel: the rank to plan for. Where num_blocks is not given, ranks may plan different numbers of
            blocks; an engine takes the least.
        stored: matrices that the checkpoint stores quantised; see stored_matrices.

    Raises:
        ConfigError: an option contradicts the model or the machine.
        OutOfMemoryError: what the options ask for does not fit. Nothing was allocated.
    """
    plan = plan_weights(config, model, parallel, stored)
    if plan.weight_bytes >= plan.free_bytes:
        raise OutOfMemoryError(
            f"weights take {gib(plan.weight_bytes)}, but {gib(plan.free_bytes)} are free on {plan.device}; "
            'keep them in fewer bytes (quantization="fp8", on a CPU also "int8"), cut them over GPUs '
            "(tensor_parallel_size), or use a smaller model"
        )
    plan = replace(plan, working_bytes=_working_bytes(plan))
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = min(_num_blocks(plan), plan.most_blocks, plan.layout.max_pages)
    if num_blocks > plan.layout.max_pages:
        raise ConfigError(
            f"num_blocks must be at most {plan.layout.max_pages:,} for this model, got {num_blocks:,}: block "
            "tables hold ids of 32 bits"
        )
    plan = replace(plan, num_blocks=num_blocks)
    _check_memory(plan)
    return plan


def plan_weights(
    config: EngineConfig, model: ModelConfig, parallel: TensorParallel, stored: Mapping[str, Storage]
) -> ExecutionPlan:
    """Plan everything that does not depend on how much memory is free; see plan_execution.

    Raises:
        ConfigError: an option contradicts the model or the machine.
    """
    share = rank_share(model, parallel, expert_parallel=config.expert_parallel)
    device = device_of(config.device, parallel)
    dtype = dtype_for(config, model, device)
    kv_dtype = _kv_dtype(config, device, dtype)
    if config.deterministic:
        _check_deterministic(config, device, dtype)
    quantization = quantization_for(config, model, device, stored)
    kept = kept_storage(
        parameter_shapes(share),
        stored,
        quantization,
        device=device,
        dtype=dtype,
        deterministic=config.deterministic,
    )
    max_model_len = _max_model_len(config, model)
    block_size = config.block_size or _DEFAULT_BLOCK_SIZE[device.type]
    return ExecutionPlan(
        config=config,
        model=model,
        parallel=parallel,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or _DEFAULT_NUM_SEQS[device.type],
        max_num_batched_tokens=config.max_num_batched_tokens or _DEFAULT_TOKEN_BUDGET[device.type],
        weights=weight_groups(share, dtype, kept, quantization, device),
        dequantised=dequantised_forms(stored, kept),
        layout=plan_layout(share.cache_layers, block_size, max_model_len),
        num_blocks=0,
        working_bytes=0,
        free_bytes=free_bytes_of(device, parallel),
    )


def dtype_for(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of activations; see plan_execution."""
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    elif device.type == "cpu":
        # Matrices that quantization_for chooses to keep in bfloat16 are the exception.
        dtype = torch.float32
    else:
        dtype = torch.float16 if model.dtype == "float16" else torch.bfloat16
    if config.quantization in ("bf16", "int8") and (device.type, dtype) != ("cpu", torch.float32):
        raise ConfigError(
            f"quantization={config.quantization!r} runs on a CPU in float32, got {device.type} and {dtype}"
        )
    return dtype


def quantization_for(
    config: EngineConfig, model: ModelConfig, device: torch.device, stored: Mapping[str, Storage]
) -> str:
    """Make floats bfloat16 where it was measured to be faster and the checkpoint has no more digits."""
    leaves_it_open = (
        config.quantization in ("auto", "fp8") and config.dtype == "auto" and not config.deterministic
    )
    fits = device.type == "cpu" and model.dtype == "bfloat16"
    if not (leaves_it_open and fits and outruns_float32()):
        return config.quantization
    if config.quantization == "fp8":
        return "mixed fp8"
    if not stored:
        return "bf16"
    # What would be dequantised has more digits.
    stays = all(multiplies(storage.kind, device, torch.float32) for storage in stored.values())
    return "mixed" if stays else config.quantization


def _check_deterministic(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    impl = choose_impl(config.attention_impl, device.type, dtype)
    if device.type != "cuda" or impl != "triton":
        raise ConfigError(
            f"deterministic=True runs by the Triton kernels for NVIDIA GPUs, got device={device.type} and "
            f"attention_impl={impl!r}; run on a GPU with attention_impl='auto', or use deterministic=False"
        )
    if config.quantization in ("bf16", "fp8", "int8"):
        raise ConfigError(
            f"deterministic=True runs with quantization='none', got {config.quantization!r}: kernels for "
            "quantised weights are chosen by the number of rows"
        )


def _kv_dtype(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    kv_dtype = {"auto": dtype, "bf16": torch.bfloat16, "fp8": FLOAT8}[config.kv_cache_dtype]
    is_wider = dtype == torch.float32 and device.type == "cpu"
    if config.kv_cache_dtype == "bf16" and not (dtype == torch.bfloat16 or is_wider):
        raise ConfigError(
            f'kv_cache_dtype="bf16" runs with dtype bfloat16, on a CPU also float32; got dtype {dtype} on '
            f"{device}; use kv_cache_dtype='auto'"
        )
    if config.attention_impl != "auto":
        # This raises if the implementation cannot run here, or not over such a cache.
        choose_impl(config.attention_impl, device.type, kv_dtype, dtype)
    return kv_dtype


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(f"max_model_len must be at most the model's {longest}, got {config.max_model_len}")
    return config.max_model_len


def _working_bytes(plan: ExecutionPlan) -> int:
    """Return the most memory that steps need beside weights and KV cache."""
    if plan.device.type == "cuda":
        return gpu_working_bytes(plan)
    # Nothing is allocated before a step needs it, so a budget beyond all tokens that fit costs nothing.
    num_blocks = plan.config.num_blocks or _num_blocks(plan)
    num_tokens = num_blocks * plan.layout.tokens_per_page
    return cpu_working_bytes(plan, min(plan.max_num_seqs * plan.max_model_len, num_tokens))


def _num_blocks(plan: ExecutionPlan) -> int:
    """Return how many blocks fit into memory_fraction of the memory that the plan leaves free."""
    device_type, fraction = plan.device.type, plan.config.memory_fraction
    free_bytes = plan.free_bytes - plan.weight_bytes - plan.working_bytes
    block_bytes = plan.block_bytes
    if device_type == "cpu":
        free_bytes -= plan.table_bytes
        block_bytes += plan.host_bytes_per_block
    budget = int(free_bytes * (fraction or _DEFAULT_FRACTION[device_type]))
    if device_type == "cpu" and fraction is None:
        budget = min(budget, _CPU_DEFAULT_KV_BYTES)
    if budget < block_bytes:
        raise OutOfMemoryError(
            f"no KV block of {gib(block_bytes)} fits: of {gib(plan.free_bytes)} free on {plan.device}, "
            f"weights take {gib(plan.weight_bytes)}, activations and buffers {gib(plan.working_bytes)}, "
            f"block tables {gib(plan.table_bytes)}, and the KV cache may have {gib(max(0, budget))}; lower "
            "block_size, max_num_seqs, max_num_batched_tokens or max_model_len, raise memory_fraction, or "
            "use a smaller model"
        )
    return budget // block_bytes


def _check_memory(plan: ExecutionPlan) -> None:
    """Refuse what does not fit before anything is allocated; otherwise the system would kill the process."""
    if plan.total_bytes > plan.free_bytes:
        raise OutOfMemoryError(
            f"weights ({gib(plan.weight_bytes)}), KV cache ({gib(plan.kv_bytes)}), activations and buffers "
            f"({gib(plan.working_bytes)}) and block tables ({gib(plan.host_bytes)}) do not fit the "
            f"{gib(plan.free_bytes)} free on {plan.device}; lower num_blocks, memory_fraction, "
            "block_size, max_num_batched_tokens, max_num_seqs or max_model_len, or use a smaller model"
        )
    free_bytes = free_memory_bytes(torch.device("cpu"))
    if plan.device.type != "cpu" and plan.host_bytes > free_bytes:
        raise OutOfMemoryError(
            f"block tables and bookkeeping ({gib(plan.host_bytes)}) do not fit the {gib(free_bytes)} free on "
            "the host; lower max_num_seqs, max_model_len or num_blocks, or raise block_size"
        )
