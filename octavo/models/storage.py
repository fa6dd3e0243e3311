"""Which matrices stay quantised in memory: decided from names and shapes, before anything is read."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from octavo.errors import ConfigError
from octavo.forms.base import Storage
from octavo.forms.float8 import FLOAT8_ROWS
from octavo.gemm.make_linear import looks_up, multiplies, unstackable_reason

_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight", "model.embed_tokens_per_layer.weight")
# Projections that one product multiplies: all stay quantised, or none does.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def kept_storage(
    names: Iterable[str],
    stored: Mapping[str, Storage],
    quantization: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    capability: tuple[int, int] | None = None,
) -> Mapping[str, Storage]:
    """Return the matrices that stay quantised, by name; the others are dequantised.

    Args:
        names: of all tensors of the network.
        stored: how the checkpoint stores matrices; see QuantisedSource.
        quantization, device, dtype, deterministic: see load_decoder.
        capability: of a GPU that is named only; None: the device is here.

    Raises:
        ConfigError: the checkpoint is quantised otherwise than quantization says, or has experts that
            kernels of the device cannot multiply as they are.
    """
    names = frozenset(names)
    if quantization in ("fp8", "mixed fp8"):
        made = {name: FLOAT8_ROWS for name in names if name.endswith("_proj.weight")}
        _check_requantised(stored)
        stored = made | {name: storage for name, storage in stored.items() if name in made}
    elif quantization not in ("auto", "mixed") or deterministic:
        return {}
    if device.type == "cuda":
        _check_experts(stored, device, dtype, capability)
    kept = {
        name: storage
        for name, storage in stored.items()
        if (
            (_is_expert(name) and device.type == "cuda")
            or multiplies(storage.kind, device, dtype, capability)
        )
        and (name not in _VOCABULARY or looks_up(storage.kind, device))
    }
    return {
        name: _on(device, storage)
        for name, storage in kept.items()
        if _kinds(kept, _partners(name) & names) == {storage.kind}
    }


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _check_experts(
    stored: Mapping[str, Storage],
    device: torch.device,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
) -> None:
    """Refuse experts that a GPU's kernels, which stack them, cannot multiply as they are stored.

    Dequantised, a model whose size is mostly that of its experts would take a multiple of its bytes.
    """
    for name, storage in stored.items():
        reason = unstackable_reason(storage.kind, device, dtype, capability) if _is_expert(name) else None
        if reason is not None:
            raise ConfigError(
                f'{name} cannot be multiplied as {storage.kind}: {reason}; use quantization="none", which '
                "dequantises all weights"
            )


def _on(device: torch.device, storage: Storage) -> Storage:
    if device.type != "cuda" or storage.bytes_on_gpu is None:
        return storage
    return replace(storage, bytes_per_number=storage.bytes_on_gpu)


def _check_requantised(stored: Mapping[str, Storage]) -> None:
    """Refuse to round twice."""
    for name, storage in stored.items():
        if storage.kind != FLOAT8_ROWS.kind:
            raise ConfigError(
                f'quantization="fp8" rounds numbers, but the checkpoint stores {name} as {storage.kind}; use '
                'quantization="auto"'
            )


def _kinds(kept: Mapping[str, Storage], names: Iterable[str]) -> set[str | None]:
    return {kept[name].kind if name in kept else None for name in names}


def _partners(name: str) -> set[str]:
    """Return the names of all matrices that one product may multiply, this one included."""
    prefix, _, projection = name.removesuffix(".weight").rpartition(".")
    group = next((group for group in _FUSED if projection in group), (projection,))
    return {f"{prefix}.{each}.weight" for each in group} if prefix else {name}
