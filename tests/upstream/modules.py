"""The modules that upstream's tests import, over Octavo's operators, and the tests' text made a module."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from suites import Suite

import octavo.hf
from octavo import ops
from octavo.errors import InvalidArgumentError


def install() -> None:
    """Make flash_attn, flash_attn_interface and vllm importable, as far as the tests need them."""
    octavo.hf.stand_in_for_flash_attn(2)
    octavo.hf.stand_in_for_flash_attn(3)
    private: Any = sys.modules["flash_attn.flash_attn_interface"]
    private._get_block_size_n = None  # tests of dropout call it
    private.USE_TRITON_ROCM = False
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        module: Any = sys.modules[name]
        module.flash_attn_with_kvcache = _raise_as_upstream(module.flash_attn_with_kvcache)
    platform = SimpleNamespace(
        is_rocm=lambda: False, is_device_capability_family=lambda family: False, seed_everything=_seed
    )
    for name, contents in {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"set_random_seed": _seed},
        "vllm.vllm_flash_attn": {
            "fa_version_unsupported_reason": lambda version: (
                f"Octavo stands in for 2 and 3, not for {version}"
            ),
            "flash_attn_varlen_func": ops.flash_attn_varlen_func,
            "is_fa_version_supported": lambda version: version in (2, 3),
        },
    }.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(contents)
        sys.modules[name] = module


def load(suite: Suite, checkout: Path, device: str) -> Any:
    """The test function of a suite, from its edited text.

    Args:
        suite: what to load.
        checkout: folder of the project.
        device: "cuda", or "cpu" to try the runner where there is no GPU.
    """
    path = checkout / suite.file
    text = path.read_text()
    for edit in suite.edits:
        if edit.old not in text:
            raise SystemExit(f"{path} does not have {edit.old!r} any more: look at tests/upstream/suites.py")
        text = text.replace(edit.old, edit.new)
    if device == "cpu":
        text = text.replace('"cuda"', '"cpu"')
        torch.cuda.get_device_capability = lambda *args: (9, 0)
    module = ModuleType(f"upstream_{suite.function}")
    module.__dict__.update(__file__=str(path), zero_gradients=_zero_gradients)
    # padding.py and test_util.py lie beside hopper's tests; another folder's must not be found first.
    sys.path.insert(0, str(path.parent))
    exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102 - a test file, run as one
    return getattr(module, suite.function)


def _raise_as_upstream(function: Any) -> Any:
    """flash-attention raises RuntimeError where Octavo raises InvalidArgumentError."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InvalidArgumentError as error:
            raise RuntimeError(str(error)) from error

    return call


def _zero_gradients(outputs: Any, inputs: Any, *others: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Zeros in place of torch.autograd.grad."""
    return tuple(torch.zeros_like(x) for x in inputs)


def _seed(seed: int) -> None:
    """Seed torch's generators."""
    torch.manual_seed(seed)
