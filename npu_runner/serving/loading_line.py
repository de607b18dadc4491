"""A line of a terminal or a notebook with the phase of a model's start. Knows nothing of models."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm


def loading_line(stream: TextIO) -> tqdm:
    """`set_description_str` rewrites it, `close` erases it."""
    return tqdm(total=0, bar_format="{desc}", file=stream, leave=False)


def shows_progress(stream: TextIO | None) -> bool:
    """Whether the stream shows a line that is rewritten: it is a terminal, or a Jupyter kernel's stream."""
    return stream is not None and (stream.isatty() or type(stream).__module__.startswith("ipykernel."))


@contextlib.contextmanager
def on_terminal() -> Iterator[Callable[[str], None]]:
    """A function that shows a phase; it does nothing if standard error shows no progress."""
    if not shows_progress(sys.stderr):
        yield lambda phase: None
        return
    with contextlib.closing(loading_line(sys.stderr)) as line:
        yield line.set_description_str
