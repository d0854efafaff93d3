"""Triton's interpreter without what takes most of its time, for engines: it runs all kernels of vLLM's V2 runner."""

import functools
from dataclasses import replace

from triton import language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """In this process: the language stays patched between launches, and integers are not watched for an overflow.

    The tests of the kernels watch them.
    """
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)  # by kernel
    of_any, of_scalar = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (of_scalar if type(dtype) is tl.dtype else of_any)(dtype)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
