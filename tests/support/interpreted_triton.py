"""Triton's interpreter without most of its work: the same numbers, several times faster, also with NumPy 2.4.

Triton spends its time on the descriptions of values, not on their numbers. For every value it makes the
type, the shape and the names of both anew; for every operator it asks which type the result has, and fills a
block with each constant; for every sum of integers it looks for an overflow and, without debug mode, drops
what it finds; for every call of a function it looks for functions to replace.
"""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

# Names of the types of which two equal ones need no cast, whatever the operator.
PLAIN = {"int1", "int8", "uint8", "int32", "uint32", "int64", "uint64", "fp32", "fp64"}


def patch() -> None:
    """Make the interpreter faster. Harmless when called twice."""
    if getattr(interpreter, "patched_by_octavo", False):
        return
    interpreter.patched_by_octavo = True
    _index_by_item()
    _unwrap_tensors()
    _patch_functions_once()
    _call_builtins_directly()
    _make_types_once()
    _know_equal_types()
    _make_constants_once()
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


def _unwrap_tensors() -> None:
    """A constant times a tensor is a constexpr that holds a tensor, which Triton 3.7 takes for no operand."""
    to_tensor = interpreter.TritonSemantic.to_tensor

    def unwrapped(self, x, check_type=True):
        return to_tensor(self, x.value if type(x) is tl.constexpr else x, check_type)

    interpreter.TritonSemantic.to_tensor = unwrapped


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


def _call_builtins_directly() -> None:
    """Leave out the wrapper that asks whether a function is called with what the interpreter adds."""
    wrapper = tl.core.builtin(patch).__code__
    make_semantic = cache(interpreter.TritonSemantic)

    def patch_attr(obj, name, member, builder, scope):
        semantic = make_semantic(builder)
        function = member.__wrapped__ if member.__code__ is wrapper else member

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _make_types_once() -> None:
    """Types, and what a tensor says of its type, are constants: equal blocks have one type, made once."""
    make_block, make_tensor, make_tuple = (cls.__init__ for cls in (tl.block_type, tl.tensor, tl.tuple))
    unwrap = tl.core._unwrap_if_constexpr

    def block_new(cls, element_ty, shape):
        known = vars(element_ty).setdefault("_blocks", {})
        key = tuple([getattr(size, "value", size) for size in shape])
        if key not in known:
            known[key] = object.__new__(cls)
            make_block(known[key], element_ty, shape)
        return known[key]

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
    tl.block_type.__new__, tl.block_type.__init__ = block_new, lambda self, element_ty, shape: None
    tl.tensor.__init__, tl.tuple.__init__ = tensor_init, tuple_init
    tl.tuple.type = property(tuple_type, lambda self, type: vars(self).__setitem__("_type", type))


def _know_equal_types() -> None:
    """A type equals itself; values of one type need no casts, and blocks of one shape no broadcasts."""
    semantic = interpreter.TritonSemantic
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    for cls in (tl.dtype, tl.pointer_type, tl.block_type):
        cls.__eq__ = lambda self, other, equals=cls.__eq__: self is other or equals(self, other)

    def check_operands(self, lhs, rhs, *flags, **named):
        if type(lhs) is type(rhs) is tl.tensor:
            scalar = lhs.type.scalar
            if scalar is rhs.type.scalar and scalar.name in PLAIN:
                return broadcast_operands(self, lhs, rhs)
        return check(self, lhs, rhs, *flags, **named)

    def broadcast_operands(self, lhs, rhs):
        return (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl = check_operands
    semantic.broadcast_impl_value = broadcast_operands


def _make_constants_once() -> None:
    """Beside a tensor a Python number is a block of one number, which nobody changes."""
    check = interpreter.TritonSemantic.binary_op_type_checking_impl

    def check_operands(self, lhs, rhs, *flags, **named):
        if type(lhs) is not tl.tensor or type(rhs) not in (int, float) or lhs.type.scalar.name not in PLAIN:
            return check(self, lhs, rhs, *flags, **named)
        known = vars(lhs.type).setdefault("_constants", {})
        # Not by the number itself: 0.0 is equal to -0.0, and 1 to 1.0.
        key = (str(rhs), flags, *named.items())
        if key in known:
            return lhs, known[key]
        checked, constant = check(self, lhs, rhs, *flags, **named)
        if checked is lhs:
            constant.handle.data.flags.writeable = False
            known[key] = constant
        return checked, constant

    interpreter.TritonSemantic.binary_op_type_checking_impl = check_operands


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
