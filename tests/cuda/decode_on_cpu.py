"""Decode attention for Hopper without a GPU: g++ compiles the kernels' source, and the CPU runs it.

The host's code is the package's own, up to the launch. It imports Triton, of which it needs nothing here. Where Triton
is not installed, an empty module stands in for it. Knows no test.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "npu_runner" / "platforms" / "cuda" / "attention"
_MODULES = ("triton", "npu_runner.platforms.cuda")
# The fewest with which steps of 8 kv heads have ranges enough for groups, and some more: each takes time.
NUM_SMS = 24
# Elements behind each output, which no kernel may write.
_GUARD = 4096


@contextlib.contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """The host's code launches decode attention on the CPU. Other kernels are not available."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with _modules(), pytest.MonkeyPatch.context() as patch:
        from npu_runner.platforms.cuda import dependent_launch
        from npu_runner.platforms.cuda.attention import hopper_decode
        from npu_runner.platforms.cuda.gpu import Gpu

        gpu = Gpu.current()._replace(num_sms=NUM_SMS)
        patch.setattr(Gpu, "current", lambda: gpu)
        patch.setattr(dependent_launch, "IS_WANTED", False)
        patch.setattr(hopper_decode, "why_not_hopper", lambda dtype: None)
        patch.setattr(hopper_decode, "_DecodeKernel", KernelOnCpu)
        yield


@contextlib.contextmanager
def _modules() -> Iterator[None]:
    """Without Triton, modules that were imported with its stand-in are forgotten at the end."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    before = {name: module for name, module in sys.modules.items() if name.startswith(_MODULES)}
    for name in ("triton", "triton.language", "triton.runtime.cache", "triton.runtime.jit",
                 "triton.tools.tensor_descriptor"):
        sys.modules[name] = _StandIn(name)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(_MODULES)]:
            del sys.modules[name]
        sys.modules.update(before)


class _StandIn(ModuleType):
    """A module of Triton, whose functions are there to be named. Kernels cannot be launched."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _STAND_INS.get(name, _Named)


class _Named:
    """A decorator, a type or a constant of Triton."""

    def __init__(self, *arguments: Any, **settings: Any) -> None: ...

    def __call__(self, function: Callable[..., Any]) -> _Named:
        return self

    run = None


_STAND_INS: dict[str, Any] = {"next_power_of_2": lambda n: 1 << (n - 1).bit_length(), "cdiv": lambda n, by: -(-n // by)}


class KernelOnCpu:
    """In the place of `hopper_decode._DecodeKernel`. It is compiled when it is first launched."""

    is_available = True

    def __init__(self, source: Any, name: str, shared_bytes: int, *, fallback: str, found: str):
        assert name == "attend_decode", f"{name} is not decode attention"
        self._constants = tuple(option for option in source._options if option.startswith("-D"))
        # Which arguments a kernel writes: the plan; results and partial accumulators.
        self.plan = _Launch(self._constants, "launch_plan", 0, written=(2,))
        self.loaded = _Launch(self._constants, "launch_attention", shared_bytes, written=(3, 4))


class _Launch:
    def __init__(self, constants: tuple[str, ...], name: str, shared_bytes: int, written: Sequence[int]):
        self._constants, self._name, self._shared_bytes, self._written = constants, name, shared_bytes, written

    def launch(self, programs: int, threads: int, arguments: Sequence[Any], *, is_dependent: bool) -> None:
        """Runs the programs in any order. Memory that the kernel writes is full of garbage before."""
        arguments, outputs = list(arguments), {}
        for place in self._written:
            output = outputs[place] = arguments[place]
            garbage = torch.nan if output.is_floating_point() else -123_456_789
            arguments[place] = torch.full((output.numel() + _GUARD,), garbage, dtype=output.dtype)
        values = [ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value for value in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        order = list(range(programs))
        random.Random(programs).shuffle(order)
        launch = getattr(_build(self._constants), self._name)
        launch.restype = ctypes.c_bool
        assert launch((ctypes.c_int * programs)(*order), programs, threads, self._shared_bytes, places, len(values)), (
            "the kernel has another number of arguments")
        for place, output in outputs.items():
            found, guard = arguments[place].split([output.numel(), _GUARD])
            assert (guard.isnan() if guard.is_floating_point() else guard == -123_456_789).all(), (
                f"{self._name} writes behind the end of argument {place}")
            output.copy_(found.view(output.shape))


@functools.cache
def _build(constants: tuple[str, ...]) -> ctypes.CDLL:
    """The kernels for these constants. PTX that has no definition for the CPU is an error of g++, and of the test."""
    paths = {"PLAN": "hopper_decode_plan.cu", "ATTENTION": "hopper_decode.cu"}
    given = [f'-D{name}="{SOURCES / path}"' for name, path in paths.items()]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "decode.so"
        # A fortified longjmp refuses to change stacks.
        options = ["-std=c++17", "-O1", "-march=native", "-w", "-fPIC", "-shared", "-fno-strict-aliasing",
                   "-U_FORTIFY_SOURCE"]
        subprocess.run(["g++", *options, *constants, *given, str(HERE / "decode_on_cpu.cpp"), "-o", str(library)],
                       check=True)
        return ctypes.CDLL(str(library))
