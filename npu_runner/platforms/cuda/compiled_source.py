"""CUDA C++ that NVRTC compiles for this GPU, and the driver's calls that load and launch it. Knows no kernel.

torch brings NVRTC with it; no header and no nvcc is needed. What was compiled lies where triton keeps its kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

from npu_runner.platforms.cuda.gpu import num_sms

logger = logging.getLogger(__name__)

_MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER, _DEPENDENT = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION
# CUtensorMapDataType.
_MAP_KINDS = {torch.float8_e4m3fn: 0, torch.uint8: 0, torch.int8: 0, torch.float16: 6, torch.bfloat16: 9}
_SWIZZLES, _PROMOTED_TO_256_BYTES = {64: 2, 128: 3}, 3  # by the bytes of a box's row
_MAP_BYTES, _MAP_ALIGNMENT, _MAP_STRIDE = 128, 64, 16


class NoKernel(Exception):
    """NVRTC is not there, it does not take the source, or the driver not what it made; says why."""


class CompiledSource:
    """Files, one behind the other, with their constants, compiled for one architecture.

    Paths are relative to the folder of this file.
    """

    def __init__(self, paths: Sequence[str | Path], constants: dict[str, int], architecture: str = "sm_90a"):
        self._paths = [Path(__file__).parent / path for path in paths]
        self._options = [f"--gpu-architecture={architecture}", "--std=c++17",
                         *(f"-D{name}={value}" for name, value in constants.items())]

    def cubin(self) -> bytes:
        """Compiled, or as it was kept. Needs no context of a GPU. Raises NoKernel."""
        source = "".join(f'#line 1 "{path.name}"\n{path.read_text()}' for path in self._paths)
        library = _nvrtc()
        key = "\n".join([_version_of(library), *self._options, source])
        cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        name = self._paths[-1].name
        file = f"{name}.cubin"
        kept = cache.get_file(file)
        if kept is not None:
            return Path(kept).read_bytes()
        started = time.perf_counter()
        cubin = _compile(library, source, name, self._options)
        logger.info("%s compiled in %.1f s", name, time.perf_counter() - started)
        cache.put(cubin, file, binary=True)
        return cubin


@functools.cache
def compilers() -> ThreadPoolExecutor:
    """Threads that compile kernels while a model is read."""
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "compile-kernels")


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared_bytes", ctypes.c_uint32),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
                ("num_attributes", ctypes.c_uint32))


class LoadedKernel:
    """A kernel in the current context. Raises NoKernel where the driver does not take it."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int):
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        try:
            check(driver().cuModuleLoadData(ctypes.byref(module), cubin))
            check(driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
            check(driver().cuFuncSetAttribute(self._function, _MAX_SHARED_BYTES, shared_bytes))
        except RuntimeError as error:
            raise NoKernel(str(error)) from error

    def launch(self, programs: int, threads: int, arguments: Sequence[Any], *, cluster: int = 1,
               is_dependent: bool = False, shared_bytes: int | None = None) -> None:
        """On the current stream. Arguments: tensors, ctypes values, and maps of `tensor_map`.

        `cluster`: programs that read each other's shared memory. `is_dependent`: it may start while the kernel before
        still runs, and waits by itself (dependent_launch.py). `shared_bytes`: fewer than it was loaded with.
        """
        values = [ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value for value in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        how = self._how(programs, threads, cluster, is_dependent)
        if shared_bytes is not None:
            assert shared_bytes <= self._shared_bytes, f"{shared_bytes} bytes are more than {self._shared_bytes}"
            how.shared_bytes = shared_bytes
        how.stream = torch.cuda.current_stream().cuda_stream
        check(driver().cuLaunchKernelEx(ctypes.byref(how), self._function, places, None))

    def most_clusters(self, threads: int, cluster: int) -> int:
        """The most clusters that run at once, with one program on a multiprocessor."""
        if cluster == 1:
            return num_sms()
        found, how = ctypes.c_int(), self._how(cluster, threads, cluster, False)
        check(driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), self._function, ctypes.byref(how)))
        return found.value

    def _how(self, programs: int, threads: int, cluster: int, is_dependent: bool) -> _Launch:
        wanted = [(_CLUSTER, (cluster, 1, 1))] * (cluster > 1) + [(_DEPENDENT, (1,))] * is_dependent
        attributes = (_Attribute * len(wanted))()
        for attribute, (name, values) in zip(attributes, wanted, strict=True):
            attribute.id, attribute.value[:len(values)] = name, values
        return _Launch((programs, 1, 1), (threads, 1, 1), self._shared_bytes, None, attributes, len(attributes))


class KernelAhead:
    """A kernel that a thread of `compilers` compiles from now on.

    `fallback` is logged where that is not possible, with the reason, and `found` when the kernel is loaded.
    """

    def __init__(self, source: CompiledSource, name: str, shared_bytes: int, *, fallback: str, found: str = ""):
        self._cubin: Future[bytes] = compilers().submit(source.cubin)
        self._name, self._shared_bytes, self._fallback, self._found = name, shared_bytes, fallback, found

    @functools.cached_property
    def _kernel(self) -> LoadedKernel | None:
        try:
            kernel = self.load(self._name, self._shared_bytes)
        except NoKernel as reason:
            logger.info("%s (%s)", self._fallback, reason)
            return None
        if self._found:
            logger.info(self._found)
        return kernel

    def load(self, name: str, shared_bytes: int = 0) -> LoadedKernel:
        """A kernel of the same source. Waits until it is compiled; raises NoKernel."""
        return LoadedKernel(self._cubin.result(), name, shared_bytes)

    @property
    def is_available(self) -> bool:
        """The first call waits until the kernel is compiled."""
        return self._kernel is not None

    @property
    def loaded(self) -> LoadedKernel:
        assert self._kernel is not None, "callers ask whether it is available"
        return self._kernel


def fits_tensor_map(tensor: Tensor) -> bool:
    """Whether TMA can copy from this tensor: 16-byte addresses and strides."""
    places = (tensor.data_ptr(), *(stride * tensor.itemsize for stride in tensor.stride()[:-1]))
    return tensor.stride(-1) == 1 and all(place % _MAP_STRIDE == 0 for place in places)


def tensor_map(tensor: Tensor, box: tuple[int, ...]) -> ctypes.Array[ctypes.c_char]:
    """Descriptor by which the copy engine brings boxes of a tensor to shared memory, innermost dimension first there.

    The tensor has elements of 8 or 16 bits, consecutive in its last dimension; its address and its strides are
    multiples of 16 bytes. `box`: elements of each dimension. Its rows, of 64 or 128 bytes, are swizzled; beyond the
    ends is 0.
    """
    return _map_of(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, box)


@functools.lru_cache(maxsize=4096)  # caches keep their places, and steps mostly get the same memory again
def _map_of(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype,
            box: tuple[int, ...]) -> ctypes.Array[ctypes.c_char]:
    rank, count, size = len(shape), ctypes.c_uint64, ctypes.c_uint32
    places = (count * (rank - 1))(*(stride * dtype.itemsize for stride in reversed(strides[:-1])))
    room = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    made = (ctypes.c_char * _MAP_BYTES).from_buffer(room, -ctypes.addressof(room) % _MAP_ALIGNMENT)
    check(driver().cuTensorMapEncodeTiled(
        made, _MAP_KINDS[dtype], rank, ctypes.c_void_p(address), (count * rank)(*reversed(shape)), places,
        (size * rank)(*reversed(box)), (size * rank)(*[1] * rank), 0,
        _SWIZZLES[box[-1] * dtype.itemsize], _PROMOTED_TO_256_BYTES, 0))
    return made


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def check(status: int) -> None:
    if status:
        words = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(words))
        raise RuntimeError(f"CUDA: {words.value.decode() if words.value else status}")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    for name in _nvrtc_names():
        try:
            # NVRTC looks for its builtins in the system's folders only, unless they are there already.
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NoKernel("no NVRTC of CUDA 12 or newer was found")


def _nvrtc_names() -> Iterator[str]:
    """The library names: those of torch's wheels, then the system's."""
    major = (torch.version.cuda or "12").split(".")[0]
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}")))
    yield f"libnvrtc.so.{major}"


def _version_of(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compile(library: ctypes.CDLL, source: str, name: str, options: Sequence[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None):
        raise NoKernel("NVRTC takes no program")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise NoKernel(f"NVRTC {_version_of(library)}: {log.value.decode().strip()}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
