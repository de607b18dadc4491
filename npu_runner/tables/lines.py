"""Lines of a file that may still grow: where each begins, and its bytes again later. Knows nothing of rows.

What is appended after the file was opened is not looked at, and a file that is replaced meanwhile stays readable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.errors import ConfigError


class LinesFile:
    """Open until it is closed. `title`: what messages call it; a line of more than `max_bytes` is an error."""

    def __init__(self, title: str, path: str, max_bytes: int):
        self.title = title
        self._max_bytes = max_bytes
        with clear_file_errors(title):
            if not os.path.isfile(path):
                raise ConfigError(f"{title}: there is no such file")
            self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self._size = os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(where it begins, line), from the first one. The last one has no end where it is not whole yet."""
        position = 0
        with clear_file_errors(self.title):
            self._file.seek(0)
            while position < self._size:
                line = self._line(position)
                yield position, line
                position += len(line)

    def line_at(self, start: int) -> bytes:
        with clear_file_errors(self.title):
            self._file.seek(start)
            return self._line(start)

    def _line(self, start: int) -> bytes:
        line = self._file.readline(min(self._max_bytes + 1, self._size - start))
        if len(line) > self._max_bytes:
            raise ConfigError(f"{self.title}: the line at byte {start} has more than {self._max_bytes} bytes; raise "
                              "--max-row-bytes")
        if not line:
            raise ConfigError(f"{self.title}: was cut while it was read; run the same command again")
        return line
