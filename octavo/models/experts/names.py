"""Checkpoints' layouts of experts, as one: a matrix and perhaps a bias for each expert and projection.

    here, Qwen, OLMoE   mlp.gate.weight (router), mlp.experts.3.gate_proj.weight, .up_proj, .down_proj
    Mixtral             block_sparse_moe.gate.weight, .experts.3.w1.weight, .w3, .w2
    llm-compressor      block_sparse_moe.gate.weight, .experts.3.gate_proj.weight, .up_proj, .down_proj
    GLM, Ernie          mlp.shared_experts.gate_proj.weight beside them, here mlp.shared_expert
    HY                  mlp.router.gate.weight, mlp.expert_bias, mlp.shared_mlp.gate_proj.weight
    Gemma               router.proj.weight, .scale, .per_expert_scale, experts.gate_up_proj, .down_proj
    Granite             block_sparse_moe.router.layer.weight, .input_linear.weight [E, 2 n, hidden],
                        .output_linear.weight, shared_mlp.input_linear.weight [2 n, hidden], .output_linear
    transformers 5      mlp.gate.weight, mlp.experts.gate_up_proj [E, 2 n, hidden], .down_proj [E, hidden, n]
    Qwen3-VL            the same, transposed: .gate_up_proj [E, hidden, 2 n], .down_proj [E, n, hidden]

    gpt-oss             mlp.router.weight, .bias
                        mlp.experts.gate_up_proj [E, hidden, 2 n], gate_up_proj_bias [E, 2 n]
                        mlp.experts.down_proj [E, n, hidden], down_proj_bias [E, hidden]

Scales and packed integers of quantised experts are beside them: `.experts.3.w1.qweight`,
`.experts.gate_up_proj_scale_inv`. In gpt-oss, gate and up alternate along 2 n, and its stacks in MXFP4 have
the first line's names already; see formats.float4. GGUF files' stacked tensors get these names in
formats.gguf.gguf_weights.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.models.renamed import Place, by_name, renamed, renamed_tensors
from octavo.models.weights import Part, StoredTensors, WeightSource, slice_bounds

_ROUTER = re.compile(r"(.*\.mlp)\.router\.(weight|bias)")
_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
# A stack of experts -> the projections whose rows it has.
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transposed(Place):
    """The columns first_column, first_column + step, ... of an expert in a stack, which become rows.

    Attributes:
        expert: index into the stack.
        first_column: the first of these columns.
        step: 2 where gate and up alternate.
    """

    expert: int
    first_column: int
    step: int

    def read(self, read: Callable[..., Tensor], rows: Part, columns: Part) -> Tensor:
        start, stop = slice_bounds(rows, self.shape[0])
        first, expert = self.first_column, slice(self.expert, self.expert + 1)
        stored = slice(first + self.step * start, first + self.step * stop, self.step)
        if len(self.shape) == 1:
            return read(self.name, rows=expert)[0, stored].contiguous()
        return read(self.name, rows=expert, columns=columns)[0][:, stored].T.contiguous()


def gpt_oss_places(weights: WeightSource, name: str) -> Iterator[tuple[str, Place]]:
    """Yield the tensors that a stored one contains, by our names."""
    shape = tuple(weights.shape(name))
    router, stack = _ROUTER.fullmatch(name), _STACK.fullmatch(name)
    if router is not None:
        yield f"{router[1]}.gate.{router[2]}", Place(name=name, shape=shape)
    elif stack is not None and len(shape) == (2 if stack[3] else 3):
        parts = PARTS[stack[2]]
        # A stack with a column too many keeps it, so that its shape differs from the config's.
        size = shape[-1] // len(parts) if shape[-1] % len(parts) == 0 else shape[-1]
        inner, step, kind = (size, *shape[1:-1]), len(parts), "bias" if stack[3] else "weight"
        for expert in range(shape[0]):
            for column, part in enumerate(parts):
                place = _Transposed(name=name, shape=inner, expert=expert, first_column=column, step=step)
                yield f"{stack[1]}.{expert}.{part}.{kind}", place
    else:
        yield name, Place(name=name, shape=shape)


_MIXTRAL = re.compile(
    r"(.*)\.block_sparse_moe\.(?:gate|experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj))\.(\w+)"
)
# What stands beside experts: those that every token goes to, and the bias of the choice.
_BESIDE = re.compile(
    r"(.*)\.(?:mlp|block_sparse_moe)\.(?:shared_(?:experts|mlp)\.(.+)|router\.gate\.(weight)|expert_bias"
    r"|(?:gate\.|moe_statics\.|gate\.moe_statics\.)?e_score_correction_bias)"
)
_MIXTRAL_PROJECTIONS = {
    **{name: name for name in ("gate_proj", "up_proj", "down_proj")},
    **{"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
}
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(\w*)")
# Gemma's experts stand beside a layer's mlp, not in it.
_OUTER = re.compile(
    r"(.*\.layers\.\d+)\.(?:router\.(?:proj\.)?(weight|scale|per_expert_scale)|(experts\..+))"
)
# What follows the name of a stack -> what follows the name of an expert's projection.
_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {
        "": "weight",
        "_scale": "weight_scale",
        "_scale_inv": "weight_scale_inv",
        "_activation_scale": "input_scale",
    }
)


_GRANITE: Mapping[str, str] = MappingProxyType(
    {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        **{name: name for name in ("experts.gate_up_proj", "experts.down_proj")},
        **dict.fromkeys(("router.layer.weight", "router.weight"), "gate.weight"),
    }
)
_GRANITE_SHARED = {"input_linear.weight": "gate_up_proj.weight", "output_linear.weight": "down_proj.weight"}


def _renamed_layer(weights: WeightSource, name: str) -> str:
    """Return what other families call a tensor of Gemma's or Granite's.

    Without experts, Granite's shared one stands alone.
    """
    if (match := _OUTER.fullmatch(name)) is not None:
        return f"{match[1]}.mlp.{match[3] or f'gate.{match[2]}'}"
    prefix, _, rest = name.partition(".block_sparse_moe.")
    if rest in _GRANITE:
        return f"{prefix}.mlp.{_GRANITE[rest]}"
    prefix, _, rest = name.partition(".shared_mlp.")
    if rest not in _GRANITE_SHARED:
        return name
    routers = {f"{prefix}.block_sparse_moe.router.{each}" for each in ("weight", "layer.weight")}
    part = "mlp.shared_expert" if weights.names() & routers else "mlp"
    return f"{prefix}.{part}.{_GRANITE_SHARED[rest]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stacked(Place):
    """All rows of an expert in a stack, or those from `first` on.

    Attributes:
        expert: index into the stack.
    """

    expert: int

    def read(self, read: Callable[..., Tensor], rows: Part, columns: Part) -> Tensor:
        """See Place; a single number is [1]."""
        stack = read(self.name, rows=slice(self.expert, self.expert + 1), columns=self.rows(rows))
        if stack.ndim == 1:
            return stack
        return stack[0] if columns is None else stack[0, :, columns].contiguous()


def with_expert_names(weights: WeightSource, *, is_gpt_oss: bool = False) -> WeightSource:
    """Return a source that hands out experts by the names above, whatever a checkpoint calls them.

    Raises:
        WeightsError: the checkpoint has a tensor twice.
    """
    places_of = gpt_oss_places if is_gpt_oss else _places
    return renamed(
        weights, by_name(at for name in sorted(weights.names()) for at in places_of(weights, name))
    )


def with_stored_expert_names(tensors: StoredTensors, tile_rows: int = 1) -> StoredTensors:
    """Return the tensors of quantised experts by the names above; see with_expert_names.

    Args:
        tensors: the checkpoint.
        tile_rows: rows of a matrix that share a scale, where scales are for tiles.

    Raises:
        UnsupportedModelError: gate and up of a stack share a scale.
        WeightsError: the checkpoint has a tensor twice.
    """
    places = by_name(at for name in sorted(tensors.names()) for at in _places(tensors, name, tile_rows))
    return renamed_tensors(tensors, places)


def _places(weights: WeightSource, name: str, tile_rows: int = 1) -> Iterator[tuple[str, Place]]:
    """Yield the tensors that a stored one contains, by our names."""
    shape, stored, name = tuple(weights.shape(name)), name, _renamed_layer(weights, name)
    if stored != name and name.endswith(".gate_up_proj.weight"):
        for part, (first, inner) in zip(PARTS["gate_up_proj"], _divide(shape, 2), strict=True):
            own = f"{name.removesuffix('gate_up_proj.weight')}{part}.weight"
            yield own, Place(name=stored, shape=inner, first=first)
        return
    if (match := _BESIDE.fullmatch(name)) is not None:
        is_bias = match[2] is None and match[3] is None
        own = f"shared_expert.{match[2]}" if match[2] else f"gate.{match[3] or 'e_score_correction_bias'}"
        # Ernie's bias is a matrix of one row.
        yield f"{match[1]}.mlp.{own}", Place(name=stored, shape=shape[-1:] if is_bias else shape)
        return
    if (match := _MIXTRAL.fullmatch(name)) is not None:
        prefix, expert, projection, suffix = match.groups()
        part = "gate" if expert is None else f"experts.{expert}.{_MIXTRAL_PROJECTIONS[projection]}"
        yield f"{prefix}.mlp.{part}.{suffix}", Place(name=stored, shape=shape)
        return
    match = _STACKED.fullmatch(name)
    # A stack of matrices has three dimensions, its scales may have fewer.
    if match is None or match[3] not in _SUFFIXES or (not match[3] and len(shape) != 3):
        yield name, Place(name=stored, shape=shape)
        return
    prefix, projection, suffix = match.groups()
    parts = PARTS[projection]
    is_transposed = len(shape) == 3 and _are_transposed(weights, prefix)
    if is_transposed:
        shape = (shape[0], shape[2], shape[1])
    elif len(parts) == 2 and suffix in ("_scale", "_scale_inv"):
        _check_tiles(weights, name, name.removesuffix(suffix), tile_rows)
    for part, (first, inner) in zip(parts, _divide(shape[1:], len(parts)), strict=True):
        for expert in range(shape[0]):
            place = _Stacked(name=stored, shape=inner, first=first, expert=expert)
            if is_transposed:
                place = _Transposed(name=stored, shape=inner, expert=expert, first_column=first or 0, step=1)
            yield f"{prefix}.{expert}.{part}.{_SUFFIXES[suffix]}", place


def _are_transposed(weights: WeightSource, prefix: str) -> bool:
    """Return whether the stacks of a layer have columns where others have rows."""
    names = [f"{prefix}.{stack}" for stack in PARTS]
    if not weights.names() >= set(names):
        return False
    (*_, rows, columns), (*_, down_rows, down_columns) = map(weights.shape, names)
    return rows == down_columns and columns == 2 * down_rows


def _divide(shape: tuple[int, ...], number: int) -> list[tuple[int | None, tuple[int, ...]]]:
    """Divide an expert's rows among its projections: the first row and the shape of each.

    Rows that cannot be divided go whole to each projection: a single scale is for both, and a matrix with a
    row too many keeps a shape that differs from the config's.
    """
    if number == 1 or not shape or shape[0] % number:
        return [(None, shape or (1,))] * number
    size = shape[0] // number
    return [(index * size, (size, *shape[1:])) for index in range(number)]


def _check_tiles(weights: WeightSource, name: str, stack: str, tile_rows: int) -> None:
    """Refuse tiles of scales if one of them has rows of both gate and up.

    Raises:
        UnsupportedModelError: there is such a tile.
    """
    shape = weights.shape(name)
    if tile_rows == 1 or len(shape) != 3 or shape[1] == 1 or stack not in weights.names():
        return
    size = weights.shape(stack)[1] // 2
    # Each matrix that is smaller than a tile has a scale.
    if size % tile_rows and not (shape[1] == 2 and 2 * size <= tile_rows):
        raise UnsupportedModelError(
            f"{name}: gate and up of {size} rows each share scales for {tile_rows} rows, which is not "
            "supported"
        )
