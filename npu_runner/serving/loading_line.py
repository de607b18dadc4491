"""A line of a terminal or a notebook that says what a model does before it is ready. Knows nothing of models."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm


def loading_line(stream: TextIO) -> tqdm:
    """`set_description_str` writes it anew, `close` takes it away."""
    return tqdm(total=0, bar_format="{desc}", file=stream, leave=False)


def shows_progress(stream: TextIO | None) -> bool:
    """Somebody sees a line that is written anew: the stream is a terminal, or a Jupyter kernel's, which is none."""
    return stream is not None and (stream.isatty() or type(stream).__module__.startswith("ipykernel."))


@contextlib.contextmanager
def on_terminal() -> Iterator[Callable[[str], None]]:
    """What is to be called with each phase. Where standard error shows no progress, it does nothing."""
    if not shows_progress(sys.stderr):
        yield lambda phase: None
        return
    with contextlib.closing(loading_line(sys.stderr)) as line:
        yield line.set_description_str
