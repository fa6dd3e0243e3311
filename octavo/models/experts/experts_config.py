"""The experts of a network: their number, sizes and layers, read from config.json."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.forms.mxfp4 import BLOCK
from octavo.models.config_fields import ConfigFields
from octavo.models.families.family import ExpertFamily
from octavo.parallel import TensorParallel, shard_blocks, shard_range

# Models of some families have the first key on the hub, where transformers 5 writes the second.
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """The mixtures of experts of a network.

    Attributes:
        number: experts of a layer.
        num_chosen: experts that a token goes to.
        size: width of an expert's feed-forward.
        renormalises: a token's router weights are divided by their sum.
        is_sigmoid, has_choice_bias, has_float32_router, has_shared_gate, is_beside_dense: see ExpertFamily.
        groups: into how many groups experts fall, and how many of these a token chooses from; None: from all.
        scaling: factor of a token's router weights.
        shared_size: width of the feed-forward that every token goes to, beside its experts; 0: there is none.
        layers: for each layer, whether it has experts, which are in place of a feed-forward or beside it.
        is_gpt_oss: they are like gpt-oss's; see ExpertFamily.
        held: the experts that a rank holds, whole; None: each rank holds a part of every one.
    """

    number: int
    num_chosen: int
    size: int
    renormalises: bool
    layers: tuple[bool, ...]
    is_gpt_oss: bool = False
    is_sigmoid: bool = False
    has_choice_bias: bool = False
    has_float32_router: bool = False
    groups: tuple[int, int] | None = None
    scaling: float = 1.0
    shared_size: int = 0
    has_shared_gate: bool = False
    is_beside_dense: bool = False
    held: range | None = None

    @property
    def has_bias(self) -> bool:
        """Whether the router and the experts' projections have biases."""
        return self.is_gpt_oss

    @property
    def here(self) -> range:
        """The experts of which this rank holds at least a part."""
        return range(self.number) if self.held is None else self.held


def read_experts(fields: ConfigFields, family: ExpertFamily, num_layers: int) -> ExpertsConfig | None:
    """Read the experts of a config.json; None: no layer has any.

    Raises:
        FileFormatError: a field is missing or malformed.
    """
    present = [key for key in NUM_EXPERTS_KEYS if fields.get(key) is not None]
    number = fields.integer(
        present[0] if present else family.number_key,
        minimum=1 if family.dense_rule == "none" else 0,
        maximum=2**12,
    )
    layers = _layers(fields, family, num_layers)
    if number == 0 or not any(layers):
        return None
    renormalises = family.renormalises
    size = fields.integer(family.size_key, maximum=2**24)
    num_chosen = fields.integer(family.chosen_key, maximum=number)
    return ExpertsConfig(
        number=number,
        num_chosen=num_chosen,
        size=size,
        renormalises=fields.boolean("norm_topk_prob") if renormalises is None else renormalises,
        layers=layers,
        is_gpt_oss=family.is_gpt_oss,
        is_sigmoid=family.is_sigmoid,
        has_choice_bias=family.has_choice_bias,
        has_float32_router=family.has_float32_router,
        groups=_groups(fields, number, num_chosen) if family.has_groups else None,
        scaling=fields.number(family.scaling_key, 1.0) if family.scaling_key else 1.0,
        shared_size=_shared_size(fields, family, size),
        has_shared_gate=family.has_shared_gate,
        is_beside_dense=family.is_beside_dense,
    )


def _groups(fields: ConfigFields, number: int, num_chosen: int) -> tuple[int, int] | None:
    num_groups = fields.integer("n_group", 1)
    chosen = fields.integer("topk_group", 1, maximum=num_groups)
    # The score of a group is the sum of its two best experts'.
    if num_groups > 1 and (number % num_groups or number < 2 * num_groups):
        raise fields.error(
            "n_group", f"a number of equal groups of at least two of {number} experts", num_groups
        )
    if num_chosen * num_groups > chosen * number:
        raise fields.error("topk_group", f"enough groups for {num_chosen} experts", chosen)
    return (num_groups, chosen) if chosen < num_groups else None


def _shared_size(fields: ConfigFields, family: ExpertFamily, size: int) -> int:
    if family.shared_key is None:
        return 0
    shared = fields.integer(family.shared_key, 0, minimum=0, maximum=2**24)
    return shared if family.shared_key.endswith("size") else shared * size


def expert_part(experts: ExpertsConfig, parallel: TensorParallel) -> range:
    """Return a rank's rows of gate and up, and columns of down, of every expert that it has.

    Experts of gpt-oss may be in MXFP4, which is cut between blocks.

    Raises:
        ConfigError: the ranks do not divide an expert.
    """
    if experts.held is not None:
        return range(experts.size)
    what = "columns of an expert"
    if experts.is_gpt_oss and experts.size % BLOCK == 0:
        return shard_blocks(experts.size, BLOCK, parallel, what=what)
    return shard_range(experts.size, parallel, what=what)


@contextmanager
def names_expert_parallel(experts: ExpertsConfig, parallel: TensorParallel) -> Iterator[None]:
    """Add to an error about cutting experts that expert parallelism cuts none."""
    try:
        yield
    except ConfigError as error:
        if experts.held is not None or parallel.size == 1:
            raise
        raise ConfigError(f"{error}, or expert_parallel=True, which cuts no expert") from error


def _layers(fields: ConfigFields, family: ExpertFamily, num_layers: int) -> tuple[bool, ...]:
    if family.dense_rule in ("none", "all_or_none"):
        return (True,) * num_layers
    if family.dense_rule == "enable_moe_block":
        return (fields.boolean("enable_moe_block"),) * num_layers
    if family.dense_rule == "first_k_dense_replace":
        num_dense = fields.integer("first_k_dense_replace", 0, minimum=0)
        return tuple(index >= num_dense for index in range(num_layers))
    if family.dense_rule == "moe_layer_interval":
        return _layers_by_interval(fields, num_layers)
    if family.dense_rule == "mlp_layer_types":
        return _layers_by_type(fields, num_layers)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(_is_layer(index, num_layers) for index in dense):
        raise fields.error("mlp_only_layers", f"a list of layers below {num_layers}", dense)
    return tuple((index + 1) % step == 0 and index not in dense for index in range(num_layers))


def _layers_by_interval(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    start = fields.integer("moe_layer_start_index", 0, minimum=0)
    end = fields.integer("moe_layer_end_index", -1, minimum=-1)
    step = fields.integer("moe_layer_interval", 1)
    last = num_layers - 1 if end == -1 else end
    return tuple((index + 1) % step == 0 and start <= index <= last for index in range(num_layers))


def _layers_by_type(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    names = fields.get("mlp_layer_types")
    if names is None:
        return tuple(index > 0 for index in range(num_layers))
    if not isinstance(names, list) or len(names) != num_layers or not set(names) <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f'a list of "dense" or "sparse" for {num_layers} layers', names)
    return tuple(name == "sparse" for name in names)


def _is_layer(index: object, num_layers: int) -> bool:
    return isinstance(index, int) and not isinstance(index, bool) and 0 <= index < num_layers
