"""What every user of torch.compile here needs. Knows no vendor.

torch._dynamo takes about as long to import as torch itself: nothing loads it before something is compiled with it.
"""

from __future__ import annotations

import types

from npu_runner.platforms.base import DecodeForward


def own_code(forward: DecodeForward, name: str | None = None) -> DecodeForward:
    """The same function over a fresh code object, called `name` if one is given.

    dynamo counts recompilations per code object and falls back to eager after 8 without a word: every bucket gets its
    own. Code objects of different names are also unequal, which matters to those who look them up.
    """
    function = forward.__func__ if isinstance(forward, types.MethodType) else forward
    assert isinstance(function, types.FunctionType), f"{forward!r} is not a Python function"
    name = name or function.__name__
    code, defaults = function.__code__.replace(co_name=name), function.__defaults__
    fresh = types.FunctionType(code, function.__globals__, name, defaults, function.__closure__)
    return types.MethodType(fresh, forward.__self__) if isinstance(forward, types.MethodType) else fresh


def forget(code: types.CodeType) -> None:
    """Drop what was compiled from a code object: it and what guards it keep each other alive, out of gc's sight.

    torch._dynamo.reset would drop the graphs of every engine of this process.
    """
    from torch._dynamo.eval_frame import reset_code

    reset_code(code)
