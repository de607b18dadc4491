"""The channel between the engine and one rank. An interrupt between any two lines loses nothing.

Calls and replies lie in unnamed shared memory (memfds), so no process leaves anything behind. Sockets carry small
records that name their call. A record is read first and removed only after it has been booked. A call that is sent
twice runs once, so an interrupted step can be repeated. Knows nothing of the calls' work.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

RING_SIZE = 2
"""Most calls under way. Call n lies in place n % RING_SIZE until every rank has answered it."""

_MAX_RANKS = 255
_PHASE_BYTES = 256
_PHASE_LENGTH = struct.Struct("<i")
_RECORD = struct.Struct("<QQB")


@dataclass(frozen=True)
class Record:
    """`number` of the call, `length` of the payload in bytes, `status`: meaning is the reader's and writer's."""

    number: int
    length: int
    status: int = 0


class Wire:
    """One end of a socket pair that carries records."""

    def __init__(self, end: socket.socket):
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, record: Record) -> None:
        # 17 bytes are taken by the system in one piece or not at all.
        self._socket.sendall(_RECORD.pack(record.number, record.length, record.status))

    def has_record(self, timeout: float) -> bool:
        """Whether one lies there within `timeout` seconds, or the other end is gone."""
        return bool(select.select([self._socket], [], [], timeout)[0])

    def peek(self) -> Record:
        """The next record, waited for, which stays where it is. Raises EOFError when the other end is gone."""
        data = self._socket.recv(_RECORD.size, socket.MSG_PEEK | socket.MSG_WAITALL)
        if len(data) < _RECORD.size:
            raise EOFError("the other end is closed")
        return Record(*_RECORD.unpack(data))

    def pop(self) -> None:
        """Take out the record that `peek` has shown."""
        self._socket.recv(_RECORD.size, socket.MSG_WAITALL)


class Payloads:
    """A ring of byte strings of any size in shared memory, written by one process and read by others."""

    def __init__(self, fds: Sequence[int]):
        self.fds = tuple(fds)

    @classmethod
    def create(cls) -> Payloads:
        return cls([_nameless_file() for _ in range(RING_SIZE)])

    def write(self, number: int, payload: bytes) -> None:
        view, offset = memoryview(payload), 0
        while offset < len(view):
            offset += os.pwrite(self.fds[number % RING_SIZE], view[offset:], offset)

    def read(self, number: int, length: int) -> bytes:
        pieces: list[bytes] = []
        offset = 0
        while offset < length:
            pieces.append(os.pread(self.fds[number % RING_SIZE], length - offset, offset))
            offset += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class PhaseBoard:
    """The current phase of each rank, for the engine's messages. Its size is fixed, so it is mapped only once."""

    def __init__(self, fd: int):
        self.fd = fd
        self._map = mmap.mmap(fd, _PHASE_BYTES * _MAX_RANKS)

    @classmethod
    def create(cls) -> PhaseBoard:
        fd = _nameless_file()
        os.ftruncate(fd, _PHASE_BYTES * _MAX_RANKS)
        return cls(fd)

    def set(self, rank: int, phase: str) -> None:
        text = phase.encode()[: _PHASE_BYTES - _PHASE_LENGTH.size]
        start = rank * _PHASE_BYTES
        _PHASE_LENGTH.pack_into(self._map, start, len(text))
        self._map[start + _PHASE_LENGTH.size : start + _PHASE_LENGTH.size + len(text)] = text

    def get(self, rank: int) -> str:
        start = rank * _PHASE_BYTES
        (length,) = _PHASE_LENGTH.unpack_from(self._map, start)
        return self._map[start + _PHASE_LENGTH.size : start + _PHASE_LENGTH.size + length].decode(errors="replace")

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


def _nameless_file() -> int:
    return os.memfd_create("npu_runner", os.MFD_CLOEXEC)
