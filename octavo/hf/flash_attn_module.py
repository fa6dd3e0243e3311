"""Modules that answer to flash-attention's names, for code that imports flash_attn.

transformers hands block tables to nothing but its flash_attention_2 and 3, which import these packages. The
modules exist in this process only, from the call on; nothing is installed, and no real package is hidden.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from octavo.errors import InvalidArgumentError
from octavo.hf import flash_attn_3, padding
from octavo.hf.rotary_tables import apply_rotary_emb

# The releases whose signatures are followed.
_VERSIONS = {2: ("flash-attn", "flash_attn", "2.8.3"), 3: ("flash-attn-3", "flash_attn_interface", "3.0.0")}


def stand_in_for_flash_attn(version: int = 2) -> None:
    """Let `import flash_attn` (2) or `import flash_attn_interface` (3) find Octavo's operators.

    Call it before transformers is imported, which looks for flash_attn only once; then load the model with
    `attn_implementation="flash_attention_2"`. Calling it again changes nothing.

    Args:
        version: 2: flash_attn, flash_attn.{flash_attn_interface, bert_padding, layers.rotary}; 3:
            flash_attn_interface. Inference only, both.

    Raises:
        InvalidArgumentError: the real package is installed, transformers is imported already, or there is no
            such version.
    """
    if version not in _VERSIONS:
        raise InvalidArgumentError(f"version must be 2 or 3; got {version!r}")
    distribution, package, release = _VERSIONS[version]
    if any(isinstance(finder, _Finder) and finder.package == package for finder in sys.meta_path):
        return
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        raise InvalidArgumentError(
            f"{package} is installed: Octavo does not hide it; uninstall {distribution} first"
        )
    if "transformers.utils.import_utils" in sys.modules:
        raise InvalidArgumentError(
            "transformers is imported already and has looked for flash_attn: call this before that import"
        )
    modules = _flash_attn_2() if version == 2 else {package: flash_attn_3.public_names()}
    for name, contents in modules.items():
        _add_module(name, contents, is_package=any(other.startswith(f"{name}.") for other in modules))
    sys.modules[package].__dict__["__version__"] = release
    sys.meta_path.append(_Finder(distribution, package, release))


def _flash_attn_2() -> dict[str, dict[str, Callable]]:
    """Return the modules of flash_attn and what is in them, parents first."""
    from octavo import ops

    # flash_attn lacks two names that FlashAttention-3 has.
    names = set(ops.__all__) - {"flash_attn_combine", "get_scheduler_metadata"}
    functions = {name: getattr(ops, name) for name in sorted(names)}
    return {
        "flash_attn": functions,
        "flash_attn.flash_attn_interface": functions,
        "flash_attn.bert_padding": {name: getattr(padding, name) for name in padding.__all__},
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {
            "apply_rotary_emb": apply_rotary_emb,
            "apply_rotary_emb_func": apply_rotary_emb,
        },
    }


def _add_module(name: str, contents: dict[str, Callable], *, is_package: bool) -> None:
    """Make a module importable, and an attribute of its parent."""
    module = ModuleType(name, "Octavo's operators under flash-attention's names.")
    module.__spec__ = ModuleSpec(name, loader=None, origin="octavo.hf", is_package=is_package)
    if is_package:
        module.__path__ = []
    module.__dict__.update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


class _Metadata(importlib.metadata.Distribution):
    """The metadata that an installed package has in its dist-info folder."""

    def __init__(self, finder: "_Finder") -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {finder.distribution}\nVersion: {finder.release}\n",
            "top_level.txt": f"{finder.package}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """Return the contents of a metadata file; None if there is none."""
        return self._texts.get(filename)

    def locate_file(self, path: object) -> Any:
        """Refuse: no file of this distribution exists."""
        raise FileNotFoundError(path)


class _Finder(importlib.metadata.DistributionFinder):
    """Finds the metadata of one stand-in; its modules are in sys.modules."""

    def __init__(self, distribution: str, package: str, release: str) -> None:
        self.distribution, self.package, self.release = distribution, package, release

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Find no module: this object only finds metadata."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yield the distribution if it, or every one, is asked for."""
        name = None if context is None else context.name
        if name is None or name.replace("_", "-").lower() == self.distribution:
            yield _Metadata(self)
