"""Triton's interpreter with bfloat16 as GPUs have it: by itself it multiplies its bits as integers, and rounds down.

And with loops up to an argument, which it keeps as an array of one element: newer numpy makes no integer of that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot, binary = (getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_dot", "binary_op"))

    def as_float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def mended_cast(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.bfloat16, tl.float32):
            return as_float32(source)
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(source.data, ndmin=1)).bfloat16().view(torch.int16)
            return TensorHandle(rounded.numpy().view(np.uint16).reshape(np.shape(source.data)), tl.bfloat16)
        return cast(self, source, target)

    def mended_dot(self: Any, x: Any, y: Any, *others: Any) -> Any:
        return dot(self, as_float32(x), as_float32(y), *others)

    def mended_binary(self: Any, x: Any, y: Any, operation: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return binary(self, x, y, operation)
        result = binary(self, as_float32(x), as_float32(y), operation)
        return mended_cast(self, result, tl.bfloat16) if result.dtype.scalar == tl.float32 else result

    patch_tensor = interpreter._patch_lang_tensor

    def mended_patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = mended_patch
    InterpreterBuilder.cast_impl = mended_cast
    InterpreterBuilder.binary_op = mended_binary
    InterpreterBuilder.create_dot = mended_dot
