"""What a GPU knows of the running requests, one row each: a decode step needs nothing else from the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.engine.request import Request
from octavo.gpu.copies import to_device
from octavo.kv import BlockTables


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of R sequences, [R] each.

    Attributes:
        temperatures: float32, 0: greedy.
        seeds: int64.
        first_positions: int32, the position each sequence's first output token is computed from.
        top_k: int32, 0: off.
        top_p: float32, 1: off.
        min_p: float32, 0: off.
    """

    temperatures: Tensor
    seeds: Tensor
    first_positions: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> "SamplingRows":
        """Greedy rows."""
        floats = torch.zeros(3, num_rows, device=device)
        integers = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        floats[1] = 1.0
        return cls(floats[0], seeds, integers[0], integers[1], floats[1], floats[2])

    def write(self, rows: Tensor, requests: Sequence[Request]) -> None:
        """Overwrite rows, [S] int64, with the parameters of S requests."""
        params = [request.params for request in requests]
        floats = np.array(
            [[0.0 if p.greedy else p.temperature, p.top_p, p.min_p] for p in params], dtype=np.float32
        )
        # Seeds are unsigned 64-bit numbers.
        integers = np.array(
            [
                [(r.seed + 2**63) % 2**64 - 2**63, r.num_prompt_tokens - 1, max(0, r.params.top_k)]
                for r in requests
            ],
            dtype=np.int64,
        )
        temperatures, top_p, min_p = to_device(floats.T.copy(), rows.device)
        seeds, first_positions, top_k = to_device(integers.T.copy(), rows.device)
        values = (temperatures, seeds, first_positions.int(), top_k.int(), top_p, min_p)
        for column, value in zip(self.columns(), values, strict=True):
            column.index_copy_(0, rows, value)

    def columns(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the attributes."""
        return (
            self.temperatures,
            self.seeds,
            self.first_positions,
            self.top_k,
            self.top_p,
            self.min_p,
        )


def asks_for_filters(request: Request) -> bool:
    """True when top-k, top-p or min-p is on."""
    params = request.params
    return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


class DeviceRows:
    """The device's state: row r belongs to the running request with `row` r.

    A row counts once a token was sampled for it: from then on the device moves it on by itself, and the host
    sends only the blocks that its sequence grows by.

    Attributes:
        tokens: [R] int32, the last token sampled: what the row feeds next.
        positions: [R] int32, that token's position.
        table: [R, C] int32 block ids.
        sampling: the requests' parameters.
    """

    def __init__(self, tables: BlockTables, device: torch.device) -> None:
        """Allocate rows for all sequences of `tables`, the host's block tables."""
        num_rows, num_columns = tables.table.shape
        self.tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.table = torch.zeros(num_rows, num_columns, dtype=torch.int32, device=device)
        self.sampling = SamplingRows.allocate(num_rows, device)
        self._device = device
        self._tables = tables
        # What the device will hold once it has done all it was told: whose row, and its position.
        self._requests: list[Request | None] = [None] * num_rows
        self._positions = [0] * num_rows
        self._written: list[tuple[int, int, int]] = []

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, *, filters: bool
    ) -> tuple[Tensor, Tensor]:
        """Sample by the rows' parameters; the rows stay as they are.

        Args:
            logits: [S, V] bfloat16, float16 or float32.
            rows: [S] int32 or int64, row of each sequence; -1: a dead place, whose token nobody looks at.
            positions: [S] int32, position of the token each row of logits was computed from.
            filters: some row asks for top-k, top-p or min-p.

        Returns:
            ([S] int32 token ids, [S] bool is finite), see sample_tokens.
        """
        from octavo.engine.gpu.row_kernels import gather_parameters
        from octavo.engine.sampling.triton_filters import SamplingFilters
        from octavo.engine.sampling.triton_sampler import sample_tokens

        columns = self.sampling.columns()
        temperatures, seeds, steps, *cuts = gather_parameters(rows, positions, columns, filters=filters)
        chosen = SamplingFilters(*cuts) if filters else None
        return sample_tokens(logits, temperatures, seeds, steps, chosen)

    def holds(self, request: Request, position: int) -> bool:
        """True when a request's row will feed the token at this position next."""
        return self._requests[request.row] is request and self._positions[request.row] == position

    def update_tables(self, requests: Sequence[Request]) -> bool:
        """Bring the host's tables up to date; True when blocks changed that the device may have had."""
        rewritten = False
        for request in requests:
            begin, end = self._tables.update(request.row, request.blocks.block_ids)
            if begin < end:
                self._written.append((request.row, begin, end))
                rewritten |= begin == 0
        return rewritten

    def reset(self) -> None:
        """Forget every request: rows and tables are written again before they are read."""
        self._requests = [None] * len(self._requests)
        self._written = []
        self._tables.reset()

    def send_tables(self) -> None:
        """Send what was written to the host's tables since the last call."""
        if not self._written:
            return
        width = self.table.shape[1]
        places = np.concatenate([np.arange(row * width + a, row * width + b) for row, a, b in self._written])
        self._written = []
        both = to_device(np.stack((places, self._tables.table.ravel()[places])), self._device)
        self.table.view(-1).index_copy_(0, both[0], both[1].int())

    def rows_of(self, requests: Sequence[Request]) -> Tensor:
        """Return the requests' rows, [S] int64; their sampling parameters are there."""
        rows = to_device(np.array([request.row for request in requests]), self._device)
        if any(self._requests[request.row] is not request for request in requests):
            self.sampling.write(rows, requests)
            for request in requests:
                self._requests[request.row] = request
        return rows

    def put(self, rows: Tensor, requests: Sequence[Request], tokens: Tensor, ends: Sequence[int]) -> None:
        """Give rows the tokens that were sampled for them.

        Args:
            rows: [S] int64, as rows_of gave them for these requests.
            requests: S requests.
            tokens: [S] int32.
            ends: positions of the tokens.
        """
        self.tokens.index_copy_(0, rows, tokens)
        self.positions.index_copy_(0, rows, to_device(np.array(ends, dtype=np.int32), self._device))
        for request, end in zip(requests, ends, strict=True):
            self._positions[request.row] = end

    def advance(self, requests: Sequence[Request]) -> None:
        """Note that the device moves these requests' rows on by one token."""
        for request in requests:
            self._positions[request.row] += 1
