"""Which products a model's layers take, by numbers of rows: from shapes alone, before anything is loaded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.engine.memory.plan import dtype_for, quantization_for
from octavo.engine.memory.rank_device import device_of
from octavo.engine.memory.working import rank_share
from octavo.forms.base import Storage
from octavo.gemm.explain import TakenRow, explain, explain_experts
from octavo.gemm.product import MANY, Target
from octavo.models import ModelConfig, parameter_shapes
from octavo.models.experts.experts_config import ExpertsConfig
from octavo.models.storage import kept_storage
from octavo.parallel import TensorParallel

_ROUNDED = {"bf16": "bf16", "mixed": "bf16", "mixed fp8": "bf16", "int8": "int8"}
# What one product multiplies, and whether an activation of gate and up is a part of it.
_ATTENTION = (
    ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), False),
    ("o", ("self_attn.o_proj",), False),
)
_FEED_FORWARD = (("gate_up", ("mlp.gate_proj", "mlp.up_proj"), True), ("down", ("mlp.down_proj",), False))
_INPUTS = (
    ("layer_input_gate", ("per_layer_input_gate",), False),
    ("layer_input", ("per_layer_projection",), False),
)


@dataclass(frozen=True, slots=True)
class PartProducts:
    """A kind of matrices of the network, and what multiplies by them.

    Attributes:
        part: "qkv", "o", "gate_up", "down", "experts", "router", "embedding" or "lm_head"; of layers with
            inputs of their own, "layer_embedding", "layer_inputs", "layer_input_gate" and "layer_input", too.
        weight: its form and shape, for people.
        rows: the products; of experts, rows are tokens.
    """

    part: str
    weight: str
    rows: tuple[TakenRow, ...]


def part_products(
    config: EngineConfig,
    model: ModelConfig,
    stored: Mapping[str, Storage],
    capability: tuple[int, int] | None = None,
) -> tuple[PartProducts, ...]:
    """Return the products of the first rank's matrices, those of equal layers once.

    Args:
        config: with capability, its device does not matter.
        model: the network, whole.
        stored: how the checkpoint stores matrices.
        capability: of a GPU that need not be here; None: the device of config.

    Raises:
        ConfigError: an option contradicts the model or the machine.
    """
    rank = TensorParallel.not_met(0, config.tensor_parallel_size)
    share = rank_share(model, rank, expert_parallel=config.expert_parallel)
    device = device_of(config.device, rank) if capability is None else torch.device("cuda")
    target = Target(device, dtype_for(config, model, device), capability)
    quantization = quantization_for(config, model, device, stored)
    kept = kept_storage(
        parameter_shapes(share), stored, quantization,
        device=device, dtype=target.dtype, deterministic=config.deterministic, capability=capability,
    )  # fmt: skip
    network = _Network(share, target, quantization, kept, config.deterministic)
    return tuple(dict.fromkeys(network.parts()))


class _Network:
    """Matrices of a rank's share of a network, on a target."""

    def __init__(
        self,
        model: ModelConfig,
        target: Target,
        quantization: str,
        kept: Mapping[str, Storage],
        deterministic: bool,
    ) -> None:
        self._model, self._target, self._kept = model, target, kept
        self._shapes = parameter_shapes(model)
        self._deterministic = deterministic
        self._rounds = _ROUNDED.get(quantization) == "bf16"
        self._plain = "deterministic" if deterministic else _ROUNDED.get(quantization, "floats")

    def parts(self) -> Iterator[PartProducts]:
        """Yield what each layer multiplies, again for equal layers."""
        embedding, experts = "model.embed_tokens.weight", self._model.experts
        yield self._embedding("embedding", embedding)
        if self._model.layer_input_size:
            yield self._embedding("layer_embedding", "model.embed_tokens_per_layer.weight")
            yield from self._dense("layer_inputs", ["model.per_layer_model_projection.weight"], False)
        for index in range(self._model.num_layers):
            prefix = f"model.layers.{index}."
            for part, names, is_gated in (*_ATTENTION, *_FEED_FORWARD, *_INPUTS):
                own = [name for each in names if (name := f"{prefix}{each}.weight") in self._shapes]
                yield from self._dense(part, own, is_gated)
            if experts is None or not experts.layers[index]:
                continue
            yield self._router(f"{prefix}mlp.gate.weight")
            yield from self._experts(f"{prefix}mlp.experts.{experts.here[0]}.", experts)
        head = "lm_head.weight" if "lm_head.weight" in self._shapes else embedding
        yield from self._dense("lm_head", [head], False)

    def _embedding(self, part: str, name: str) -> PartProducts:
        storage = self._kept.get(name)
        taken = TakenRow((1, MANY), "lookup", "rows are looked up; those in blocks are dequantised")
        return PartProducts(part, self._describe(storage, self._shapes[name]), (taken,))

    def _dense(self, part: str, names: list[str], is_gated: bool) -> Iterator[PartProducts]:
        """Yield the products of matrices that lie above one another: one for those of one form."""
        rows: dict[Storage | None, int] = {}
        for name in names:
            storage = self._kept.get(name)
            rows[storage] = rows.get(storage, 0) + self._shapes[name][0]
        for storage, num_rows in rows.items():
            shape = num_rows, self._shapes[names[0]][1]
            kind = self._plain if storage is None else storage.kind
            taken = explain(
                kind, shape, self._target,
                storage=storage, is_gated=is_gated and len(rows) == 1, rounds=self._rounds,
            )  # fmt: skip
            yield PartProducts(part, self._describe_plain(storage, shape), tuple(taken))

    def _router(self, name: str) -> PartProducts:
        rows, size = self._shapes[name]
        taken = explain("router", (rows, size), self._target)
        if self._deterministic:
            taken = [TakenRow((1, MANY), taken[-1].product, taken[-1].why)]
        return PartProducts("router", self._describe(None, (rows, size)), tuple(taken))

    def _experts(self, prefix: str, experts: ExpertsConfig) -> Iterator[PartProducts]:
        gate, up, down = (f"{prefix}{name}_proj.weight" for name in ("gate", "up", "down"))
        if self._target.device.type != "cuda":
            yield from self._dense("an expert's gate_up", [gate, up], True)
            yield from self._dense("an expert's down", [down], False)
            return
        number, (size, hidden) = len(experts.here), self._shapes[gate]
        storages = self._kept.get(gate), self._kept.get(down)
        options: dict[str, Any] = {
            "has_bias": experts.has_bias,
            "deterministic": self._deterministic,
            "num_elsewhere": experts.number - number,
        }
        shapes = (number, 2 * size, hidden), (number, hidden, size)
        kinds = tuple("floats" if each is None else each.kind for each in storages)
        taken = explain_experts(kinds, shapes, experts.num_chosen, self._target, storages=storages, **options)
        weight = f"{self._describe(storages[0], shapes[0])}, then {self._describe(storages[1], shapes[1])}"
        yield PartProducts("experts", weight, tuple(taken))

    def _describe(self, storage: Storage | None, shape: tuple[int, ...]) -> str:
        form = str(self._target.dtype).removeprefix("torch.") if storage is None else storage.form
        return f"{form}, {list(shape)}"

    def _describe_plain(self, storage: Storage | None, shape: tuple[int, ...]) -> str:
        """Describe a matrix that may be rounded while it is loaded."""
        form = {"bf16": "bfloat16", "int8": "int8"}.get(self._plain)
        return self._describe(storage, shape) if storage or form is None else f"{form}, {list(shape)}"
