"""gpt-oss's names and layout of experts, as a matrix and a bias for each expert and projection.

    mlp.router.weight, .bias                           mlp.gate.weight, .bias
    mlp.experts.gate_up_proj [E, hidden, 2 n]          mlp.experts.3.gate_proj.weight, .up_proj.weight
    mlp.experts.gate_up_proj_bias [E, 2 n]             the same with .bias
    mlp.experts.down_proj [E, n, hidden]               mlp.experts.3.down_proj.weight
    mlp.experts.down_proj_bias [E, hidden]             mlp.experts.3.down_proj.bias

Gate and up alternate along 2 n. Stacks in MXFP4 have the names on the right already; see formats.mxfp4.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from octavo.models.renamed import Place
from octavo.models.weights import Part, WeightSource, slice_bounds

_ROUTER = re.compile(r"(.*\.mlp)\.router\.(weight|bias)")
_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
# A stack of experts -> the projections whose rows it has.
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transposed(Place):
    """Columns turn, turn + step, ... of an expert in a stack; they are rows here.

    Attributes:
        expert: index into the stack.
        turn: the first of these columns.
        step: 2 where gate and up alternate.
    """

    expert: int
    turn: int
    step: int

    def read(self, read: Callable[..., Tensor], rows: Part, columns: Part) -> Tensor:
        """See Place."""
        start, stop = slice_bounds(rows, self.shape[0])
        expert, stored = slice(self.expert, self.expert + 1), slice(self.step * start, self.step * stop)
        if len(self.shape) == 1:
            return read(self.name, rows=expert, columns=stored)[0, self.turn :: self.step].contiguous()
        matrix = read(self.name, rows=expert, columns=columns)[0]
        return matrix[:, stored][:, self.turn :: self.step].T.contiguous()


def gpt_oss_places(weights: WeightSource, name: str) -> Iterator[tuple[str, Place]]:
    """Yield the tensors that a stored one holds, by their names here."""
    shape = tuple(weights.shape(name))
    router, stack = _ROUTER.fullmatch(name), _STACK.fullmatch(name)
    if router is not None:
        yield f"{router[1]}.gate.{router[2]}", Place(name=name, shape=shape)
    elif stack is not None and len(shape) == (2 if stack[3] else 3):
        parts = PARTS[stack[2]]
        # A stack with one column too many keeps it: its shape then differs from that of the config.
        size = shape[-1] // len(parts) if shape[-1] % len(parts) == 0 else shape[-1]
        inner, step, kind = (size, *shape[1:-1]), len(parts), "bias" if stack[3] else "weight"
        for expert in range(shape[0]):
            for turn, part in enumerate(parts):
                place = _Transposed(name=name, shape=inner, expert=expert, turn=turn, step=step)
                yield f"{stack[1]}.{expert}.{part}.{kind}", place
    else:
        yield name, Place(name=name, shape=shape)
