"""Triton's interpreter without a third of its work.

The interpreter replaces the functions of triton.language before it runs a kernel. Triton 3.6 looks through
all of them again whenever the kernel calls a function, tl.sum among them, and finds nothing to replace.
"""

import inspect

import triton.language as tl
from triton.runtime import interpreter


def patch() -> None:
    """Let the interpreter skip a language module that it has patched already. Harmless when called twice."""
    patch_lang = interpreter._patch_lang

    def patch_lang_once(fn):
        modules = [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return patch_lang(fn)

    interpreter._patch_lang = patch_lang_once
