"""The running requests' state on a GPU, a row each: a decode step needs nothing else from the host."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.engine.request import Request
from octavo.engine.sampling.option_table import COLUMNS
from octavo.kernels.copies import to_device
from octavo.kv import BlockTables


class SamplingRows:
    """Sampling options of R sequences, as the kernels read them.

    Attributes:
        columns: one tensor [R] for each of option_table.COLUMNS, in that order.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        """Allocate rows that ask for nothing: greedy ones."""
        self.columns = tuple(
            torch.from_numpy(np.full(num_rows, option.neutral, dtype=option.dtype)).to(device)
            for option in COLUMNS
        )

    def write(self, rows: Tensor, requests: Sequence[Request]) -> None:
        """Overwrite rows, [S] int64, with the options of S requests."""
        num_rows = len(requests)
        # One copy for all columns, whatever their types: each has 8 bytes a row, and fills the first of them.
        host = np.zeros((len(COLUMNS), num_rows), dtype=np.int64)
        for line, option in zip(host, COLUMNS, strict=True):
            line.view(option.dtype)[:num_rows] = [option.read(request) for request in requests]
        for column, line in zip(self.columns, to_device(host, rows.device), strict=True):
            column.index_copy_(0, rows, line.view(column.dtype)[:num_rows])


class DeviceRows:
    """The device's state: row r belongs to the running request with `row` r.

    A row counts once a token was sampled for it: from then on the device moves it on by itself, and the host
    sends only the blocks that its sequence grows by.

    Attributes:
        tokens: [R] int32, the last token sampled: what the row feeds next.
        positions: [R] int32, that token's position.
        tables: [groups, R, C] int32 block ids, of each group of layers.
        sampling: the requests' parameters.
    """

    def __init__(self, tables: Sequence[BlockTables], device: torch.device) -> None:
        """Allocate rows for all sequences of `tables`, the host's block tables of each group."""
        num_rows, num_columns = tables[0].table.shape
        self.tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.tables = torch.zeros(len(tables), num_rows, num_columns, dtype=torch.int32, device=device)
        self.sampling = SamplingRows(num_rows, device)
        self._device = device
        self._host_tables = tables
        # The rows as they will be once the device has run all launched work: their requests and positions.
        self._requests: list[Request | None] = [None] * num_rows
        self._positions = [0] * num_rows
        self._written: list[list[tuple[int, int, int]]] = [[] for _ in tables]

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, outcome: Tensor, *, filters: bool
    ) -> Tensor:
        """Sample by the rows' parameters, and give the rows their tokens.

        Args:
            logits: [S, V] bfloat16, float16 or float32.
            rows: [S] int32, row of each sequence; -1: padding, whose token nobody reads.
            positions: [S] int32, position of the token each row of logits was computed from.
            outcome: at least [S] int32; becomes the token ids, -1 where logits were not finite.
            filters: some row asks for top-k, top-p or min-p.

        Returns:
            [S] int32 token ids, 0 where logits were not finite.
        """
        from octavo.engine.gpu.row_kernels import advance_rows, gather_parameters
        from octavo.engine.sampling.triton_sampler import sample_tokens

        temperatures, seeds, steps, *chosen = gather_parameters(
            rows, positions, self.sampling.columns, filters=filters
        )
        sampled, is_finite = sample_tokens(logits, temperatures, seeds, steps, chosen)
        advance_rows(rows, sampled, is_finite, positions, self.tokens, self.positions, outcome)
        return sampled

    def holds(self, request: Request, position: int) -> bool:
        """Return True when the token at this position, which a request feeds next, is in its row."""
        return self._requests[request.row] is request and self._positions[request.row] == position

    def update_tables(self, requests: Sequence[Request]) -> bool:
        """Bring the host's tables up to date; True when a row was written anew, not only grown at its end."""
        rewritten = False
        for request in requests:
            lists = request.blocks.lists
            for tables, block_ids, written in zip(self._host_tables, lists, self._written, strict=True):
                begin, end = tables.update(request.row, block_ids)
                if begin < end:
                    written.append((request.row, begin, end))
                    rewritten |= begin == 0
        return rewritten

    def reset(self) -> None:
        """Forget every request: rows and tables are written again before they are read."""
        self._requests = [None] * len(self._requests)
        self._written = [[] for _ in self._host_tables]
        for tables in self._host_tables:
            tables.reset()

    def send_tables(self) -> None:
        """Send what was written to the host's tables since the last call."""
        for table, host, written in zip(self.tables, self._host_tables, self._written, strict=True):
            if not written:
                continue
            width = table.shape[1]
            places = np.concatenate([np.arange(row * width + a, row * width + b) for row, a, b in written])
            written.clear()
            both = to_device(np.stack((places, host.table.ravel()[places])), self._device)
            table.view(-1).index_copy_(0, both[0], both[1].int())

    def write_options(self, requests: Sequence[Request]) -> None:
        """Write the sampling options of requests that are new in their rows."""
        new = [request for request in requests if self._requests[request.row] is not request]
        if new:
            self.sampling.write(to_device(np.array([request.row for request in new]), self._device), new)
            for request in new:
                self._requests[request.row] = request

    def set_positions(self, requests: Sequence[Request], ends: Sequence[int]) -> None:
        """Note the positions of the tokens that a launched step leaves in these requests' rows."""
        for request, end in zip(requests, ends, strict=True):
            self._positions[request.row] = end
