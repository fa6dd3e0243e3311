"""`octavo inspect`: a model's architecture and memory plan, without loading it."""

from collections.abc import Iterator
from dataclasses import replace

from octavo.cli.inspect_products import print_products
from octavo.config import EngineConfig
from octavo.engine.memory import ExecutionPlan, gib, plan_execution, plan_weights
from octavo.engine.memory.execution_plan import WeightGroup
from octavo.errors import OutOfMemoryError
from octavo.gemm.make_linear import describe_experts, describe_layers
from octavo.models import (
    ModelConfig,
    ModelSource,
    SamplingDefaults,
    load_tokenizer,
    num_active_parameters,
    read_model,
    read_sampling_defaults,
    resolve_model,
    stored_matrices,
)
from octavo.models.experts.experts_config import ExpertsConfig
from octavo.parallel import TensorParallel, expected_sums

Rows = list[tuple[str, str]]


def run_inspect(
    model: str | None, config: EngineConfig, *, products: bool = False, generation: str | None = None
) -> None:
    """Print architecture, parameters and the memory plan of each rank; or products, see print_products."""
    if model is not None:
        config = replace(config, model=model)
    source = resolve_model(config.model, config.load_format)
    model_config = read_model(source, config.task)
    if products or generation is not None:
        print_products(source, config, model_config, generation)
        return
    tokenizer = load_tokenizer(source)
    defaults = read_sampling_defaults(source, config.generation_config)
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=str(source.path))
    for name, value in _architecture(model_config):
        table.add_row(name, value)
    table.add_row(
        "tokenizer", "none: token ids only" if tokenizer is None else f"{tokenizer.vocab_size} pieces"
    )
    if model_config.pooling is not None:
        table.add_row("task", model_config.pooling.does)
    table.add_row("sampling by default", _sampling(defaults, config))
    try:
        for rows in _plans(source, config, model_config):
            if config.tensor_parallel_size > 1:
                table.add_section()
            for name, value in rows:
                table.add_row(name, value)
    finally:
        # The table is printed before an error, which says what does not fit or cannot run.
        Console().print(table)


def _sampling(defaults: SamplingDefaults, config: EngineConfig) -> str:
    """Say which values of sampling are not neutral, and where they come from."""
    if not defaults.values:
        why = "generation_config is none" if config.generation_config == "none" else "the model says nothing"
        return f"neutral: {why}"
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.values.items())
    return f"{values} (from {defaults.path})"


def _plans(source: ModelSource, config: EngineConfig, model: ModelConfig) -> Iterator[Rows]:
    """Yield the memory plan of the ranks, those that have the same one together."""
    stored, size = stored_matrices(source, config.load_format), config.tensor_parallel_size
    ranks = [TensorParallel.not_met(rank, size) for rank in range(size)]
    try:
        plans = [plan_execution(config, model, rank, stored=stored) for rank in ranks]
    except OutOfMemoryError:
        for alike, rows in _by_rank(
            [_without_cache(plan_weights(config, model, rank, stored)) for rank in ranks]
        ):
            yield _names(alike, size) + rows
        raise
    # The ranks of an engine agree on the smallest number.
    num_blocks = min(plan.num_blocks for plan in plans)
    for alike, rows in _by_rank([_memory(replace(plan, num_blocks=num_blocks)) for plan in plans]):
        several = [("sums over ranks", _sums(config, plans[0]))] if size > 1 else []
        if size > 1 and model.experts is not None:
            several.append(("experts of a rank", _experts_of(model.experts, config, size)))
        yield _names(alike, size) + several + rows


def _names(ranks: list[int], size: int) -> Rows:
    """Say which of several ranks a plan is for."""
    return [("ranks", f"{', '.join(map(str, ranks))} of {size}")] if size > 1 else []


def _sums(config: EngineConfig, plan: ExecutionPlan) -> str:
    return expected_sums(
        config.tensor_parallel_size,
        plan.device,
        shares_memory=config.all_reduce == "auto",
        in_order=config.deterministic,
    )


def _architecture(model: ModelConfig) -> Rows:
    windows = sorted({window for window in model.layer_windows if window is not None})
    dense = [("feed-forward size", str(model.intermediate_size))]
    feed_forward = dense if model.experts is None else _experts(model, model.experts)
    return [
        ("architecture", model.architecture),
        ("layers", str(model.num_layers)),
        ("hidden size", str(model.hidden_size)),
        ("attention heads / kv heads x dim", _heads(model)),
        *feed_forward,
        ("vocabulary", str(model.vocab_size)),
        ("context", f"{model.max_position_embeddings} tokens"),
        ("sliding windows", ", ".join(map(str, windows)) or "none"),
        ("tied embeddings", "yes" if model.tie_word_embeddings else "no"),
    ]


def _heads(model: ModelConfig) -> str:
    """Say what heads layers have, those of equal layers once, and how many layers keep no keys."""
    kinds = dict.fromkeys(layer.shape for layer in model.cache_layers)
    heads = ", ".join(f"{model.num_heads} / {number} x {head_dim}" for number, head_dim in kinds)
    num_shared = model.num_layers - len(model.cache_layers)
    return heads + (f"; {num_shared} layers read the cache of another" if num_shared else "")


def _experts(model: ModelConfig, experts: ExpertsConfig) -> Rows:
    num_layers = sum(experts.layers)
    rows = [
        ("experts", f"{experts.number} of size {experts.size} in {num_layers} layers"),
        ("experts of a token", str(experts.num_chosen)),
        ("active parameters of a token", f"{num_active_parameters(model) / 1e6:,.1f} M"),
    ]
    if experts.is_beside_dense:
        rows.append(("feed-forward size beside experts", str(model.intermediate_size)))
    elif num_layers < model.num_layers:
        rows.append(("feed-forward size of the other layers", str(model.intermediate_size)))
    return rows


def _experts_of(experts: ExpertsConfig, config: EngineConfig, size: int) -> str:
    if not config.expert_parallel:
        return f"a part of each of {experts.number}"
    fewest, most = experts.number // size, -(-experts.number // size)
    return f"{fewest if fewest == most else f'{fewest} or {most}'} of {experts.number}, whole"


def _by_rank(plans: list[Rows]) -> list[tuple[list[int], Rows]]:
    """Put ranks with equal plans together."""
    found: list[tuple[list[int], Rows]] = []
    for rank, rows in enumerate(plans):
        if not found or found[-1][1] != rows:
            found.append(([], rows))
        found[-1][0].append(rank)
    return found


def _weights(plan: ExecutionPlan) -> Rows:
    """Return the bytes of each part, its form, and how that is multiplied if it is quantised."""
    rows = [(f"  {group.part}", f"{gib(group.num_bytes)}: {_form(plan, group)}") for group in plan.weights]
    if plan.dequantised:
        name = str(plan.dtype).removeprefix("torch.")
        forms = ", ".join(f"{count} x {form}" for form, count in plan.dequantised.items())
        rows.append(("dequantised while loading", f"{forms}: become {name}"))
    return rows


def _form(plan: ExecutionPlan, group: WeightGroup) -> str:
    if group.kind is None:
        return group.form
    describe = describe_experts if group.part == "experts" else describe_layers
    return f"{group.form}; {describe(group.kind, plan.device, plan.dtype)}"


def _without_cache(plan: ExecutionPlan) -> Rows:
    """Return the rows that do not depend on the size of the KV cache."""
    return [
        ("parameters", f"{plan.num_parameters / 1e6:,.1f} M"),
        ("device, dtype", f"{plan.device}, {str(plan.dtype).removeprefix('torch.')}"),
        ("free memory", gib(plan.free_bytes)),
        ("weights", gib(plan.weight_bytes)),
        *_weights(plan),
    ]


def _groups(plan: ExecutionPlan) -> Rows:
    """Return what groups of layers keep, and the cache that they share."""
    layout, size = plan.layout, f"{gib(plan.kv_bytes)}: {plan.num_blocks:,}"
    if len(layout.groups) == 1:
        return [("KV cache", f"{size} blocks x {plan.block_size} tokens")]
    rows = [("KV cache", f"{size} pages of {gib(plan.block_bytes)}, blocks of {plan.block_size} tokens")]
    for group in filter(lambda group: group.layers, layout.groups):
        kind, number = group.kind, len(group.layers)
        keeps = "all keys" if kind.window is None else f"the last {kind.window:,} keys"
        num_bytes = 2 * kind.size * number * plan.kv_dtype.itemsize
        heads = f"{kind.num_kv_heads} kv heads x {kind.head_dim}"
        name = f"  {number} {'layer' if number == 1 else 'layers'}"
        rows.append((name, f"{keeps}, {heads}: {num_bytes:,} bytes per token"))
    return rows


def _tokens(plan: ExecutionPlan) -> Rows:
    """Return how many tokens fit; where windows give memory back, in sequences of several lengths."""
    if len(plan.layout.groups) == 1:
        return [("tokens that fit", f"{plan.num_kv_tokens:,}")]
    in_one_group = plan.kv_bytes // plan.kv_bytes_per_token
    longest = min(plan.max_model_len, plan.num_kv_tokens)
    lengths = [length for length in (1024, 32768) if length < longest] + [longest]
    return [
        (
            f"tokens that fit, in sequences of {length:,}",
            f"{plan.num_blocks * length // plan.layout.num_pages(length):,} (in one group {in_one_group:,})",
        )
        for length in lengths
    ]


def _memory(plan: ExecutionPlan) -> Rows:
    return [
        *_without_cache(plan),
        ("KV cache dtype", str(plan.kv_dtype).removeprefix("torch.")),
        ("KV cache per token", f"{plan.kv_bytes_per_token:,} bytes"),
        *_groups(plan),
        ("activations and buffers", gib(plan.working_bytes)),
        ("block tables and bookkeeping, on the host", gib(plan.host_bytes)),
        ("memory in all", gib(plan.total_bytes)),
        *_tokens(plan),
        (f"sequences of {plan.max_model_len:,} tokens that fit", f"{plan.max_full_sequences:.1f}"),
    ]
