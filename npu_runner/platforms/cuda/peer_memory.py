"""Memory of this rank's GPU that the other ranks of the host write into, and theirs, as mapped here (CUDA IPC).

Knows no kernel. Every step is voted on: either all ranks have mapped each other's memory, or none goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from npu_runner.platforms.cuda.compiled_source import check, driver
from npu_runner.platforms.devices import Exchange

_HANDLE_BYTES, _LAZY_PEER_ACCESS = 64, 1  # CUipcMemHandle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: NVLink has them, PCIe does not
_DONE, _REFUSED = b"+", b"-"


class NoPeerMemory(Exception):
    """The ranks cannot write into each other's memory; the message names a rank and its reason. All ranks raise it."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)


class PeerMemory:
    """`num_bytes` bytes, a multiple of 4, per rank, each 32-bit word of which is `word`. `prepare` runs before anything
    is allocated; a RuntimeError in it ends the attempt on all ranks.

    It lives as long as the process: other ranks store into it until they end.
    """

    def __init__(self, rank: int, num_bytes: int, word: int, exchange: Exchange, prepare: Callable[[], object]):
        self._rank, self._num_bytes, self._word, self._exchange = rank, num_bytes, word, exchange
        self.addresses: list[int] = []
        """The address of each rank's memory in this process, by rank."""
        self._own = ctypes.c_uint64()
        try:
            of_ranks = self._vote(lambda: (prepare(), self._allocate())[1])
            self._vote(lambda: self._map(of_ranks))
            self._vote(self._verify)
        except NoPeerMemory:
            for address in self.addresses:
                if address != self._own.value:
                    driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
            self._exchange(b"")  # no rank frees what another one has mapped
            driver().cuMemFree_v2(self._own)
            raise

    def _vote(self, step: Callable[[], bytes]) -> list[bytes]:
        """The result of `step` on each rank, once all have taken it. Raises NoPeerMemory."""
        try:
            own = _DONE + step()
        except RuntimeError as error:
            own = _REFUSED + str(error).encode()
        answers = self._exchange(own)
        for rank, answer in enumerate(answers):
            if answer.startswith(_REFUSED):
                raise NoPeerMemory(f"rank {rank}: {answer[1:].decode()}")
        return [answer[1:] for answer in answers]

    def _allocate(self) -> bytes:
        """This rank's device and the handle of its memory."""
        torch.cuda.current_stream().synchronize()  # the driver's calls need the context that torch makes
        handle = _Handle()
        check(driver().cuMemAlloc_v2(ctypes.byref(self._own), ctypes.c_size_t(self._num_bytes)))
        self._fill()
        check(driver().cuIpcGetMemHandle(ctypes.byref(handle), self._own))
        return bytes([torch.cuda.current_device()]) + bytes(handle)

    def _fill(self) -> None:
        check(driver().cuMemsetD32_v2(self._own, ctypes.c_uint32(self._word), ctypes.c_size_t(self._num_bytes // 4)))
        check(driver().cuCtxSynchronize())

    def _map(self, of_ranks: list[bytes]) -> bytes:
        """Map the memory of all others, and write this rank's number to its own place in each."""
        own_device = of_ranks[self._rank][0]
        for rank, answer in enumerate(of_ranks):
            if rank == self._rank:
                self.addresses.append(self._own.value)
                continue
            _check_link(own_device, answer[0])
            mapped = ctypes.c_uint64()
            check(driver().cuIpcOpenMemHandle_v2(ctypes.byref(mapped), _Handle.from_buffer_copy(answer[1:]),
                                                 _LAZY_PEER_ACCESS))
            self.addresses.append(mapped.value)
            check(driver().cuMemsetD32_v2(ctypes.c_uint64(mapped.value + 4 * self._rank), self._rank,
                                          ctypes.c_size_t(1)))
        check(driver().cuCtxSynchronize())
        return b""

    def _verify(self) -> bytes:
        """Whether the number of each rank has arrived. Some hosts map memory of peers and lose what is written."""
        found = (ctypes.c_uint32 * len(self.addresses))()
        check(driver().cuMemcpyDtoH_v2(found, self._own, ctypes.c_size_t(ctypes.sizeof(found))))
        for rank, number in enumerate(found):
            if rank not in (self._rank, number):
                raise RuntimeError(f"what rank {rank} wrote into its memory has not arrived")
        self._fill()
        return b""


def _check_link(own: int, peer: int) -> None:
    """Raises RuntimeError where the two devices are not joined by NVLink, for which the kernels were measured."""
    if own == peer:
        return
    found = ctypes.c_int()
    check(driver().cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, own, peer))
    if not found.value:
        raise RuntimeError(f"GPUs {own} and {peer} are not joined by NVLink")
