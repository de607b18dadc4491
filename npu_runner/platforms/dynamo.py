"""What every user of torch.compile here needs. Knows no vendor."""

from __future__ import annotations

import types

from npu_runner.platforms.base import DecodeForward


def own_code(forward: DecodeForward) -> DecodeForward:
    """The same function over a fresh code object.

    dynamo counts recompilations per code object and falls back to eager after 8 without a word: every bucket gets its
    own.
    """
    function = forward.__func__ if isinstance(forward, types.MethodType) else forward
    assert isinstance(function, types.FunctionType), f"{forward!r} is not a Python function"
    code, defaults = function.__code__.replace(), function.__defaults__
    fresh = types.FunctionType(code, function.__globals__, function.__name__, defaults, function.__closure__)
    return types.MethodType(fresh, forward.__self__) if isinstance(forward, types.MethodType) else fresh
