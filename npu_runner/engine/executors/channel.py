"""Shared memory between the engine and its ranks: calls of any size one way, heartbeats and phases the other.

The memory has no name (a memfd, or an unlinked file where there is none), so nothing is left behind however a process
ends. Who may read or write when is the executor's business; this file knows only the layout.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import struct
import tempfile
import time
from typing import Any

_STATUS_BYTES = 256  # per rank: heartbeat (double), phase length (int), phase (utf-8)
_MAX_RANKS = 255
_PAYLOAD_START = _STATUS_BYTES * (_MAX_RANKS + 1)
_STATUS = struct.Struct("<di")


class SharedArea:
    """One mapping of the area behind `fd`. The engine creates it; ranks open the descriptor they inherit."""

    def __init__(self, fd: int):
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def create(cls, payload_bytes: int = 1 << 20) -> SharedArea:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("npu_runner", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _PAYLOAD_START + payload_bytes)
        return cls(fd)

    def write(self, call: Any) -> int:
        """Pickle `call` into the area, growing it as needed; returns the length that readers must be told."""
        payload = pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)
        end = _PAYLOAD_START + len(payload)
        if end > len(self._map):
            os.ftruncate(self.fd, _PAYLOAD_START + 2 * len(payload))
            self._remap()
        self._map[_PAYLOAD_START:end] = payload
        return len(payload)

    def read(self, length: int) -> Any:
        """The call of `length` bytes that the engine wrote; nothing of it refers to the area afterwards."""
        end = _PAYLOAD_START + length
        if end > len(self._map):
            self._remap()
        return pickle.loads(self._map[_PAYLOAD_START:end])

    def expect(self, rank: int) -> None:
        """Note that `rank` is being started: its silence counts from its first heartbeat on."""
        self.set_phase(rank, "being started")
        struct.pack_into("<d", self._map, rank * _STATUS_BYTES, math.inf)

    def beat(self, rank: int) -> None:
        """Note that `rank` is alive now."""
        struct.pack_into("<d", self._map, rank * _STATUS_BYTES, time.monotonic())

    def set_phase(self, rank: int, phase: str) -> None:
        """Note what `rank` is doing."""
        text = phase.encode()[: _STATUS_BYTES - _STATUS.size]
        start = rank * _STATUS_BYTES
        _STATUS.pack_into(self._map, start, time.monotonic(), len(text))
        self._map[start + _STATUS.size : start + _STATUS.size + len(text)] = text

    def status(self, rank: int) -> tuple[float, str]:
        """(seconds since the last heartbeat, phase) of `rank`; negative infinity before the first."""
        start = rank * _STATUS_BYTES
        beat, length = _STATUS.unpack_from(self._map, start)
        text = self._map[start + _STATUS.size : start + _STATUS.size + length]
        return time.monotonic() - beat, text.decode(errors="replace")

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)

    def _remap(self) -> None:
        self._map.close()
        self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
