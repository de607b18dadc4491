"""Standard output and error without escape sequences. Standard error ends nothing: words that cannot be written are
dropped, and the reason is kept.

All that a command prints, and all that its processes log, goes through `PlainStream.write`: rows, schemas, file names
and libraries bring any character, and a terminal obeys some of them.

For a process whose work is worth more than its words. Knows nothing of what is said.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

_STANDARD = (1, 2)
# Control characters but tab, line feed and the carriage return of a progress bar; what turns the direction of writing;
# halves of characters, which no encoding takes.
_OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """`text` with each character that a terminal would obey as JSON's escape of it: \\u001b."""
    return text if text.isprintable() else _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PlainStream:
    """A text stream that writes what `plain` makes of a text."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(plain(text))
        return len(text)

    def write_data(self, text: str) -> None:
        """Write `text` as it is, unless a terminal reads it."""
        self._stream.write(plain(text) if self._stream.isatty() else text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PatientStream(PlainStream):
    """Its `write` and `flush` raise no OSError. After the first one it is silent for good."""

    def __init__(self, stream: TextIO, silence: str | None = None):
        """`silence`: why it is silent already."""
        super().__init__(stream)
        self.silence = silence
        """Why nothing is written any more; None: everything was written so far."""

    def write(self, text: str) -> int:
        shown = plain(text)
        self._do(lambda: self._stream.write(shown), shown)
        return len(text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def _do(self, operation: Callable[[], object], text: str = "") -> None:
        try:
            operation()
        except OSError as error:
            self._fall_silent(error.strerror or str(error))
        except RuntimeError:  # in the midst of a write, by a signal's handler: past the buffer
            self._do(lambda: os.write(self._stream.fileno(), text.encode(errors="replace")))
        except ValueError as error:
            if not self._stream.closed:
                raise
            self._fall_silent(str(error))

    def _fall_silent(self, reason: str) -> None:
        self.silence = self.silence or reason
        # Native code, children that are started later and Python at its end write to the descriptor as well.
        with contextlib.suppress(OSError, ValueError):
            if self._stream.fileno() in _STANDARD:
                _lead_to_null(self._stream.fileno())
                self._stream.flush()


def patient(stream: TextIO | PatientStream | None) -> PatientStream:
    """The stream, made patient; None is a stream that was closed before Python began."""
    if isinstance(stream, PatientStream):
        return stream
    if stream is None:
        return PatientStream(open(os.devnull, "w"), "it is closed")
    return PatientStream(stream)


@contextlib.contextmanager
def patient_stderr() -> Iterator[PatientStream]:
    """sys.stderr is patient within."""
    before = sys.stderr
    stream = patient(before)
    sys.stderr = cast(TextIO, stream)
    try:
        yield stream
    finally:
        stream.flush()
        sys.stderr = before


@contextlib.contextmanager
def plain_stdout() -> Iterator[None]:
    """sys.stdout is plain within; its bytes (`sys.stdout.buffer`) are as they are."""
    before = sys.stdout
    if before is not None:
        sys.stdout = cast(TextIO, PlainStream(before))
    try:
        yield
    finally:
        sys.stdout = before


def make_standard_streams_patient() -> None:
    """For a child that writes to its parent's standard error: a failed write must not fail its work."""
    sys.stdout, sys.stderr = cast(TextIO, patient(sys.stdout)), cast(TextIO, patient(sys.stderr))


def hold_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed: else the next file takes the number, and gets what others print."""
    for number in (0, *_STANDARD):
        try:
            os.fstat(number)
        except OSError:
            _lead_to_null(number)


def _lead_to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(null, True)
        return
    os.dup2(null, number)
    os.close(null)
