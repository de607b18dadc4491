"""A line of a terminal that says what a model does before it is ready. Knows nothing of models."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm


def loading_line(stream: TextIO) -> tqdm:
    """`set_description_str` writes it anew, `close` takes it away."""
    return tqdm(total=0, bar_format="{desc}", file=stream, leave=False)


@contextlib.contextmanager
def on_terminal() -> Iterator[Callable[[str], None]]:
    """What is to be called with each phase. Without a terminal for standard error it does nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda phase: None
        return
    with contextlib.closing(loading_line(sys.stderr)) as line:
        yield line.set_description_str
