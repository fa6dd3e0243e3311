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
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """The mixtures of experts of a network.

    Attributes:
        number: experts of a layer.
        num_chosen: experts that a token goes to.
        size: width of an expert's feed-forward.
        renormalises: a token's router weights are divided by their sum.
        layers: for each layer, whether it has experts in place of a feed-forward.
        is_gpt_oss: they are like gpt-oss's; see ExpertFamily.
        held: the experts that a rank holds, whole; None: each rank holds a part of every one.
    """

    number: int
    num_chosen: int
    size: int
    renormalises: bool
    layers: tuple[bool, ...]
    is_gpt_oss: bool = False
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
        minimum=0 if family.has_dense_layers else 1,
        maximum=2**12,
    )
    layers = _layers(fields, family, num_layers)
    if number == 0 or not any(layers):
        return None
    renormalises = family.renormalises
    return ExpertsConfig(
        number=number,
        num_chosen=fields.integer("num_experts_per_tok", maximum=number),
        size=fields.integer(family.size_key, maximum=2**24),
        renormalises=fields.boolean("norm_topk_prob") if renormalises is None else renormalises,
        layers=layers,
        is_gpt_oss=family.is_gpt_oss,
    )


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
    if not family.has_dense_layers:
        return (True,) * num_layers
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(_is_layer(index, num_layers) for index in dense):
        raise fields.error("mlp_only_layers", f"a list of layers below {num_layers}", dense)
    return tuple((index + 1) % step == 0 and index not in dense for index in range(num_layers))


def _is_layer(index: object, num_layers: int) -> bool:
    return isinstance(index, int) and not isinstance(index, bool) and 0 <= index < num_layers
