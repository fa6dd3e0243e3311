"""Engine options.

One frozen dataclass defines the keyword arguments of `LLM`, the flags of the command line, the environment
variables (OCTAVO_...) and the keys of octavo.toml.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from octavo.errors import ConfigError, refuse_unknown

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Task = Literal["auto", "generate", "embed", "rerank"]
AttentionImpl = Literal["auto", "reference", "torch", "c", "triton"]
Quantization = Literal["auto", "none", "fp8", "bf16", "int8"]
KVCacheDType = Literal["auto", "bf16", "fp8"]
AllReduce = Literal["auto", "nccl"]
MessageControlTokens = Literal["text", "refuse", "allow"]

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How a model is loaded and run.

    Attributes:
        model: "smollm2" (embedded), a folder with config.json, a .gguf file, or a hub id.
        dtype: type of weights and activations; auto is float32 on a CPU.
        device: "cpu", "cuda", "cuda:1"...; auto takes a GPU when there is one.
        load_format: auto looks at the files; dummy builds seeded random weights from config.json alone.
        task: what the model is for; auto reads it from the checkpoint. "embed" and "rerank" make a checkpoint
            that generates text give embeddings, or the relevance of documents as Qwen3-Reranker does;
            "generate" makes one that embeds generate. See docs/embeddings.md.
        generation_config: where the defaults of temperature, top_p, top_k, min_p and repetition_penalty come
            from: auto is the model's own generation_config.json (general.sampling in a GGUF file), "none"
            keeps neutral values, anything else is a folder with a generation_config.json.
        max_model_len: longest prompt + output in tokens. Default: the model's own context. Models with
            LongRoPE or dynamic rope scaling rotate every text as one of this length.
        block_size: tokens per KV block, at least 1. Default: 16 on a CPU, 64 on a GPU.
        num_blocks: KV blocks to allocate; pages, where layers keep different keys. Default: by
            memory_fraction.
        memory_fraction: share of the free memory (after weights and, on a GPU, activations) that the KV cache
            may take if num_blocks is not given. Default: 0.9 on a GPU; on a CPU 0.5, and at most 4 GiB. The
            cache never exceeds max_num_seqs sequences of max_model_len.
        max_num_seqs: most sequences in one step. Default: 256 on a CPU, 512 on a GPU.
        max_num_batched_tokens: token budget of one step; longer prompts are chunked. Default: 512 on a CPU,
            8192 on a GPU.
        max_step_ms: how long a step may take, in milliseconds, while tokens are read as they come (by a
            stream, not by `generate`): prompts are chunked so that it is kept, which bounds the time between
            two tokens and makes prompts wait longer. A step that only decodes may take longer. Default: no
            limit but max_num_batched_tokens.
        enable_prefix_caching: reuse the KV blocks of equal prefixes.
        kept_cache_fraction: share of the KV blocks that may hold cached prefixes of requests that asked to
            keep them; these are evicted after all others. 0: nobody may ask.
        share_prefixes: read a KV block that several running requests share once per step instead of once per
            request; results agree within rounding.
        deterministic: a request gives the same tokens and log-probabilities, bit for bit, in any batch, with
            any chunking, with or without a cached prefix or preemption; set a seed to fix what it samples.
            NVIDIA GPUs only, several only if they map each other's memory, and slower: it turns
            share_prefixes off.
        message_control_tokens: how to treat control tokens, such as <|im_end|>, in the messages of a chat, in
            its tools or template variables. "text" tokenizes them as plain text; "refuse" refuses the
            request; "allow" lets them divide the prompt like the template's own, for callers who are all
            trusted.
        seed: seeds dummy weights and every request without a seed.
        attention_impl: auto picks the fastest that runs here; "reference" is the plain specification.
        quantization: auto keeps weights quantised as the checkpoint stores them, where the device multiplies
            them so: float8, integers of 4 or 8 bits, a GGUF file's blocks, MXFP4 (a CPU needs a C compiler
            and float32), and bfloat16 on a CPU with AMX, or AMD's with AVX512-BF16, unless dtype is float32.
            "none" converts them to dtype, which is exact. "bf16" keeps the matrices of any model in
            bfloat16 (CPU only). "fp8" rounds the projections of any model to float8 (e4m3) while it is
            loaded. "int8" rounds weights and activations of any model to 8 bits (CPU only). See
            docs/quantization.md.
        kv_cache_dtype: auto is dtype. "bf16" holds twice as many tokens as float32, and long contexts on a
            CPU decode faster; on a GPU it needs dtype bfloat16. "fp8" (e4m3) holds twice as many as 16 bits.
            On a CPU, attention over an fp8 cache runs in PyTorch instead of the compiled kernels.
        prepare: on a GPU, compile every kernel and capture every CUDA graph before the engine is ready, so
            that no request waits for either. False: the first request that needs one waits for it.
        kernel_cache_dir: where compiled GPU kernels are kept, for this process and later ones. Default:
            TRITON_CACHE_DIR, else the folder triton in XDG_CACHE_HOME/octavo or ~/.cache/octavo, which also
            holds those of CPUs. Only you and root may have the right to write there: see docs/security.md.
        tensor_parallel_size: number of processes that share the network, each with a GPU of its own (on a
            CPU, a share of the cores). It must divide the attention heads. See docs/scaling.md.
        expert_parallel: each of these processes holds some experts of a mixture whole, instead of a part of
            every one; the rest of the network is cut as before.
        all_reduce: how these processes sum on GPUs: auto uses kernels over memory that the GPUs map from each
            other, where that is possible and faster; "nccl" always uses NCCL.

    Raises:
        ConfigError: an option is out of range; the message names it, the range and the value.
    """

    model: str = DEFAULT_MODEL
    dtype: DType = "auto"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    task: Task = "auto"
    generation_config: str = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    memory_fraction: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_step_ms: float | None = None
    enable_prefix_caching: bool = True
    kept_cache_fraction: float = 0.5
    share_prefixes: bool = True
    deterministic: bool = False
    message_control_tokens: MessageControlTokens = "text"
    seed: int = 0
    attention_impl: AttentionImpl = "auto"
    quantization: Quantization = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    prepare: bool = True
    kernel_cache_dir: str | None = None
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    all_reduce: AllReduce = "auto"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            self._check_kind(name, hint)
        for name in ("max_model_len", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                self._check_integer(name, 1, 2**31)
        self._check_integer("tensor_parallel_size", 1, 2**10)
        self._check_integer("seed", 0, 2**63)
        fraction = self.memory_fraction
        if fraction is not None and (
            isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1
        ):
            raise ConfigError(f"memory_fraction must be a number in (0, 1], got {fraction!r}")
        kept = self.kept_cache_fraction
        if isinstance(kept, bool) or not isinstance(kept, int | float) or not 0 <= kept <= 1:
            raise ConfigError(f"kept_cache_fraction must be a number in [0, 1], got {kept!r}")
        limit = self.max_step_ms
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf
        ):
            raise ConfigError(
                f"max_step_ms must be a positive number of milliseconds, or None for no limit, got {limit!r}"
            )
        if self.num_blocks is not None and fraction is not None:
            raise ConfigError("num_blocks and memory_fraction both size the KV cache; give only one of them")
        if self.deterministic and self.tensor_parallel_size > 1 and self.all_reduce == "nccl":
            raise ConfigError(
                "deterministic=True over several ranks needs all_reduce='auto', got 'nccl': NCCL's order of "
                "sums depends on the size of the batch"
            )

    @classmethod
    def from_dict(cls, options: Mapping[str, object]) -> "EngineConfig":
        """Build from a mapping; an unknown name is refused with the nearest valid one."""
        valid = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(ConfigError, "unknown engine option", options, valid)
        return cls(**options)  # type: ignore[arg-type]

    def _check_kind(self, name: str, hint: object) -> None:
        """Check a choice, a switch or a string; without this check, "no" would count as true."""
        value = getattr(self, name)
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(hint))}, got {value!r}")
        elif hint is bool and not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
        elif hint == str | None and value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{name} must be a string that is not empty, or None, got {value!r}")
        elif hint is str and (not isinstance(value, str) or not value):
            raise ConfigError(f"{name} must be a non-empty string, got {value!r}")

    def _check_integer(self, name: str, low: int, end: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < end:
            kind = "a positive integer" if low else "an integer of at least 0"
            raise ConfigError(f"{name} must be {kind} below 2**{end.bit_length() - 1}, got {value!r}")
