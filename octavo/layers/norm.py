"""Root-mean-square norms."""

import math

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from octavo.gemm.cpu import compiled_norm as cpu_layers
from octavo.kernels.device import has_triton
from octavo.parallel import TensorParallel


class RMSNorm:
    """y = x / rms(x) * weight over the last dimension.

    Source: Zhang and Sennrich 2019.
    """

    def __init__(
        self,
        weight: Tensor,
        eps: float,
        parallel: TensorParallel = TensorParallel(),
        stream_scale: float = 1.0,
    ) -> None:
        """Keep the weight.

        Args:
            weight: [n]; if float32, half-precision inputs are normalised in float32.
            eps: added to the mean square.
            parallel: the ranks over which deltas are summed; the only rank: they are whole.
            stream_scale: factor of x before a delta is added; 1, unless deltas are whole and always there.
        """
        self.weight = weight
        self.eps = eps
        self.stream_scale = stream_scale
        self._parallel = parallel

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add delta, if any, to x in place, both [T, n]; return the norm of x, a new tensor of its dtype.

        With several ranks delta is this rank's part, and its memory is used for the sum of all parts.
        """
        if delta is not None and has_triton(delta):
            memory = self._parallel.memory_for(delta)
            if memory is not None:
                from octavo.parallel.triton.sum_norm import sum_rms_norm

                return sum_rms_norm(x, delta, self.weight, self.eps, memory)
        delta = self.whole(delta)
        if has_triton(x):
            from octavo.kernels.rms_norm import rms_norm as triton_rms_norm

            return triton_rms_norm(x, self.weight, self.eps, delta=delta, stream_scale=self.stream_scale)
        if self.stream_scale != 1.0:
            x.mul_(self.stream_scale)
        tensors = (x, self.weight) if delta is None else (x, self.weight, delta)
        if cpu_layers.unsupported_reason(*tensors) is None:
            return cpu_layers.compiled_layers().add_rms_norm(x, delta, self.weight, self.eps)
        if delta is not None:
            x.add_(delta)
        weight = self.weight
        return rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)

    def whole(self, delta: Tensor | None) -> Tensor | None:
        """Return a delta as it is to be added: with several ranks the sum of all parts, in its memory."""
        return None if delta is None else self._parallel.all_reduce(delta)


class HeadRMSNorm:
    """RMSNorm of each query and key head, with one weight row per head, in place."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Keep the weight.

        Args:
            weight: [H, D] float32, contiguous.
            eps: added to the mean square.
        """
        self.weight = weight
        self.eps = eps
        self._folded, self._floor = _fold(weight, eps)

    def apply_(self, heads: Tensor) -> None:
        """Normalise [T, H, D] heads (a strided view will do) in place."""
        if heads.dtype == torch.float32:
            heads.div_(_lengths(heads, self._floor)).mul_(self._folded)
        else:
            exact = heads.float()
            heads.copy_(exact.div_(_lengths(exact, self._floor)).mul_(self._folded))


class WideQKNorm:
    """RMSNorm of a token's queries over all heads, and of its keys likewise, in place."""

    def __init__(
        self, weights: tuple[Tensor, Tensor], sizes: tuple[int, int], eps: float, parallel: TensorParallel
    ) -> None:
        """Keep the weights.

        Args:
            weights: of this rank's query heads and key heads, [H D] and [KH D].
            sizes: numbers of a query and of a key over all ranks.
            eps: added to the mean squares.
            parallel: this rank.
        """
        self._norms = tuple(RMSNorm(weight, eps) for weight in weights)
        self._sizes = sizes
        self._parallel = parallel

    def apply_(self, qkv: Tensor) -> None:
        """Normalise the first columns of [T, (H + 2 KH) D] in place."""
        widths = [norm.weight.shape[0] for norm in self._norms]
        parts = [qkv[:, : widths[0]], qkv[:, widths[0] : sum(widths)]]
        if self._parallel.size == 1:
            for part, norm in zip(parts, self._norms, strict=True):
                part.copy_(norm(part))
            return
        squares = self._parallel.all_reduce(torch.stack([part.float().square().sum(-1) for part in parts], 1))
        for part, norm, width, size, total in zip(
            parts, self._norms, widths, self._sizes, squares.unbind(1), strict=True
        ):
            # Several ranks may hold the same key heads, which they all added.
            copies = width * self._parallel.size / size
            scale = torch.rsqrt(total / (size * copies) + norm.eps)
            part.copy_(part.float() * scale[:, None] * norm.weight)


def _fold(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return sqrt(n) weight and sqrt(n eps), with which x / |x| replaces x / rms(x)."""
    size = weight.shape[-1]
    return weight * math.sqrt(size), torch.tensor(
        math.sqrt(size * eps), dtype=torch.float32, device=weight.device
    )


def _lengths(x: Tensor, floor: Tensor) -> Tensor:
    """Return sqrt(|x|^2 + floor^2) over the last dimension: [..., 1]."""
    return torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), floor)
