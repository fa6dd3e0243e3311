"""Token embedding and LM head, each cut over ranks by rows of the vocabulary."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding

from octavo.gemm.cpu.block_linear import TiledBlocks
from octavo.kernels.device import has_triton
from octavo.parallel import TensorParallel


def vocabulary_shard(vocab_size: int, parallel: TensorParallel) -> tuple[slice, int]:
    """Return the rows that a rank holds, and how many rows each rank computes.

    The last ranks may hold fewer rows than they compute; the rest is padding.
    """
    share = -(-vocab_size // parallel.size)
    start = min(parallel.rank * share, vocab_size)
    return slice(start, min(start + share, vocab_size)), share


class Embedding:
    """Looks up the embeddings of token ids.

    Attributes:
        dtype: of the results.
    """

    def __init__(
        self,
        weight: Tensor | TiledBlocks,
        first_id: int,
        multiplier: float,
        parallel: TensorParallel,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Keep a rank's rows.

        Args:
            weight: [rows, hidden], embeddings of the ids from first_id on.
            first_id: id of row 0.
            multiplier: factor of every embedding; 1 costs nothing.
            parallel: this rank.
            dtype: of the results; None: the weight's.
        """
        self._weight = weight
        self._first_id = first_id
        self.dtype = dtype or weight.dtype
        # Checkpoints are trained with the factor in the dtype of the stream.
        self._multiplier = float(torch.tensor(multiplier, dtype=self.dtype))
        self._parallel = parallel

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] int32 or int64 ids of the whole vocabulary to a new [T, hidden]."""
        if self._parallel.size == 1:
            hidden = self._rows(input_ids)
        else:
            hidden = self._parallel.all_reduce(self._local(input_ids))
        return hidden if self._multiplier == 1.0 else hidden.mul_(self._multiplier)

    def _local(self, input_ids: Tensor) -> Tensor:
        """Return this rank's part of the sum over ranks: zero for ids that other ranks hold."""
        num_rows = self._weight.shape[0]
        row = input_ids - self._first_id
        is_here = (row >= 0) & (row < num_rows)
        return self._rows(row.where(is_here, 0)).mul_(is_here[:, None])

    def _rows(self, rows: Tensor) -> Tensor:
        """Return rows [T] of the weight, a new [T, hidden]."""
        weight = self._weight
        found = weight.rows(rows) if isinstance(weight, TiledBlocks) else embedding(rows, weight)
        return found.to(self.dtype)


class LMHead:
    """Turns hidden states into logits."""

    def __init__(
        self,
        linear: Callable[[Tensor], Tensor],
        vocab_size: int,
        softcap: float,
        parallel: TensorParallel,
    ) -> None:
        """Keep a rank's head.

        Args:
            linear: [R, hidden] to [R, rows], this rank's (padded) rows of the vocabulary; includes the last
                norm, if the model has one.
            vocab_size: ids of the whole vocabulary.
            softcap: logits become softcap * tanh(logit / softcap); 0: off.
            parallel: this rank.
        """
        self._linear = linear
        self._vocab_size = vocab_size
        self._softcap = softcap
        self._parallel = parallel

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab size], whole on every rank.

        float32; on a GPU without a softcap the dtype of hidden, which the GPU's samplers read as it is.
        """
        logits = self._parallel.all_gather_last_dim(self._linear(hidden))[:, : self._vocab_size]
        if self._softcap:
            return logits.float().div_(self._softcap).tanh_().mul_(self._softcap)
        return logits if has_triton(logits) else logits.float()


class Pooler:
    """Turns hidden states into what a model that embeds or classifies pools."""

    def __init__(self, norm: Callable[[Tensor], Tensor], linear: Callable[[Tensor], Tensor] | None) -> None:
        """Keep the last norm, and the logits of labels in float32, if there are any."""
        self._norm = norm
        self._linear = linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to float32, [R, hidden] or [R, labels], the same on every rank."""
        normed = self._norm(hidden).float()
        return normed if self._linear is None else self._linear(normed).float()
