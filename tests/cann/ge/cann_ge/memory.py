"""Device memory as the interpreter sees it, and calls of the emulated aclnn operators. Knows nothing of graphs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

ACL_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.uint8: 4,
    torch.int16: 6,
    torch.int64: 9,
    torch.float64: 11,
    torch.bool: 12,
    torch.bfloat16: 27,
}

runtime = ctypes.CDLL("libascendcl.so")
operators = ctypes.CDLL("libopapi.so")
runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
for creator in ("aclCreateTensor", "aclCreateIntArray", "aclCreateTensorList"):
    getattr(operators, creator).restype = ctypes.c_void_p


NZ = 29
_ND = 2


class GraphEngineError(RuntimeError):
    """The graph engine refuses: an unknown operator, or arguments that the operator does not take."""


@contextmanager
def uncounted() -> Iterator[None]:
    """The interpreter's own synchronisations are no part of the program's."""
    runtime.cann_emu_uncounted(1)
    try:
        yield
    finally:
        runtime.cann_emu_uncounted(0)


def is_fractal(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" and int(sys.modules["torch_npu"].get_npu_format(tensor)) == NZ


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of a contiguous device tensor."""
    if tensor.device.type == "cpu":
        return tensor
    if is_fractal(tensor):
        raise GraphEngineError(f"an operator that does not take FRACTAL_NZ reads a tensor in it: {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise GraphEngineError(
            f"a graph input is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def device_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="npu")


def to_device(value: Tensor) -> Tensor:
    """Device memory that holds `value`."""
    result = device_empty(value.shape, value.dtype)
    host_view(result).copy_(value)
    return result


def count(group: str, name: str, num_bytes: int = 0) -> None:
    runtime.cann_emu_count(group.encode(), name.encode(), ctypes.c_int64(num_bytes))


def _acl_tensor(tensor: Tensor) -> ctypes.c_void_p:
    shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
    strides = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
    stored = sys.modules["torchair.core._npu_graph_executor"].GetNpuStorageSizes(tensor) if is_fractal(tensor) else None
    storage = shape if stored is None else (ctypes.c_int64 * len(stored))(*stored)
    handle = operators.aclCreateTensor(
        shape,
        ctypes.c_uint64(tensor.dim()),
        ACL_TYPES[tensor.dtype],
        strides,
        ctypes.c_int64(0),
        _ND if stored is None else NZ,
        storage,
        ctypes.c_uint64(len(storage)),
        ctypes.c_void_p(tensor.data_ptr()),
    )
    return ctypes.c_void_p(handle)


def _argument(value: object) -> object:
    """What C gets for a Python value: tensors, lists of tensors or numbers, text, numbers, None."""
    if isinstance(value, Tensor):
        return _acl_tensor(value)
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], Tensor):
            handles = (ctypes.c_void_p * len(value))(*(_acl_tensor(part) for part in value))
            return ctypes.c_void_p(operators.aclCreateTensorList(handles, ctypes.c_uint64(len(value))))
        numbers = (ctypes.c_int64 * len(value))(*value)
        return ctypes.c_void_p(operators.aclCreateIntArray(numbers, ctypes.c_uint64(len(value))))
    if isinstance(value, bool):
        return ctypes.c_bool(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, str):
        return ctypes.c_char_p(value.encode())
    if value is None:
        return ctypes.c_void_p(None)
    raise TypeError(f"{type(value).__name__} is no argument of an aclnn operator")


def call_aclnn(name: str, *arguments: object) -> None:
    """Runs an emulated operator at once; its constraints hold in a graph as they do outside."""
    workspace, executor = ctypes.c_uint64(0), ctypes.c_void_p(None)
    converted = [_argument(value) for value in arguments]
    code = getattr(operators, f"aclnn{name}GetWorkspaceSize")(
        *converted, ctypes.byref(workspace), ctypes.byref(executor)
    )
    if code == 0:
        code = operators.cann_emu_run_now(executor)
    if code != 0:
        raise GraphEngineError(f"{name}: {runtime.aclGetRecentErrMsg().decode()}")
