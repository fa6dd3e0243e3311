"""Triton's interpreter without most of its work: the same numbers, several times faster.

Triton 3.6 spends its time on the descriptions of values, not on their numbers. For every value it makes the
type, the shape and the names of both anew; for every sum of integers it looks for an overflow and, without
debug mode, drops what it finds; for every call of a function it looks for functions to replace.
"""

import inspect
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch() -> None:
    """Make the interpreter faster. Harmless when called twice."""
    if getattr(interpreter, "patched_by_octavo", False):
        return
    interpreter.patched_by_octavo = True
    _index_by_item()
    _patch_functions_once()
    _make_types_once()
    _look_up_dtypes()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are reported"
    builder.options = replace(builder.options, sanitize_overflow=False)


def _index_by_item() -> None:
    """Triton 3.6 turns a loop bound into an int in a way NumPy 2.4 refuses; item() works in both."""
    patch_lang_tensor = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def _patch_functions_once() -> None:
    """Let the interpreter skip a language module that it has patched already."""
    patch_lang = interpreter._patch_lang
    modules: dict[Any, list[Any]] = {}

    def patch_lang_once(fn):
        if fn not in modules:
            values = fn.__globals__.values()
            modules[fn] = [m for m in values if inspect.ismodule(m) and m in (tl, tl.core)]
        if modules[fn] and not any(tl.core.is_builtin(module.load) for module in modules[fn]):
            return interpreter._LangPatchScope()
        return patch_lang(fn)

    interpreter._patch_lang = patch_lang_once


def _make_types_once() -> None:
    """Types, and what a tensor says of its type, are constants: equal ones share their attributes."""
    make_block, make_tensor, make_tuple = (cls.__init__ for cls in (tl.block_type, tl.tensor, tl.tuple))
    unwrap = tl.core._unwrap_if_constexpr

    def block_init(self, element_ty, shape):
        known = vars(element_ty).setdefault("_blocks", {})
        key = tuple(getattr(size, "value", size) for size in shape)
        if key not in known:
            make_block(self, element_ty, shape)
            known[key] = {**vars(self), "_of_tensor": {}}
        vars(self).update(known[key])

    def tensor_init(self, handle, type):
        known = vars(type).setdefault("_of_tensor", {})
        if not known:
            make_tensor(self, handle, type)
            known.update((name, value) for name, value in vars(self).items() if name != "handle")
        vars(self).update(known, handle=handle)

    def tuple_init(self, args, type=None):
        if type is not None:
            make_tuple(self, args, type)
        else:
            self.values = list(args)

    def tuple_type(self):
        if "_type" not in vars(self):
            self._type = tl.core._type_for_tuple_values(self.values)
        return self._type

    def unwrap_if_constexpr(value):
        if type(value) is tl.constexpr:
            return value.value
        return value if type(value) is int else unwrap(value)

    tl.core._unwrap_if_constexpr = unwrap_if_constexpr
    tl.block_type.__init__, tl.tensor.__init__, tl.tuple.__init__ = block_init, tensor_init, tuple_init
    tl.tuple.type = property(tuple_type, lambda self, type: vars(self).__setitem__("_type", type))


def _look_up_dtypes() -> None:
    """NumPy's dtype of a type by its name; Triton makes a table of all for each question."""
    get_np_dtype = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up(tt_dtype):
        name = tt_dtype.scalar.name
        if name not in known:
            known[name] = get_np_dtype(tt_dtype)
        return known[name]

    interpreter._get_np_dtype = look_up
