"""What a program can ask the emulation: its counters, injected failures, and to forget a stream's error."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

library = ctypes.CDLL("libascendcl.so")
library.cann_emu_counters_json.restype = ctypes.c_char_p

Counters = dict[str, dict[str, dict[str, int]]]
FALLBACKS = ("ai_cpu", "sorted", "transposed", "rewritten")
"""Groups of counters: what has no kernel of its own for some arguments, or none that writes in place."""


def counters() -> Counters:
    """{"launches": {"aclnnAdd": {"calls": 1, "bytes": 0}}, "copies": {"h2d": ...}, ...} since the last reset."""
    result: Counters = json.loads(library.cann_emu_counters_json().decode())
    return result


def reset_counters() -> None:
    torch.npu.synchronize()
    library.cann_emu_counters_reset()


def calls(group: str) -> dict[str, int]:
    """Calls by name within one group of counters."""
    torch.npu.synchronize()
    return {name: entry["calls"] for name, entry in counters().get(group, {}).items()}


def fallbacks() -> dict[str, int]:
    """Calls that left the AI core, sorted, transposed or rewrote a whole tensor, by name and reason."""
    torch.npu.synchronize()
    counts = counters()
    return {name: entry["calls"] for group in FALLBACKS for name, entry in counts.get(group, {}).items()}


def set_failures(text: str) -> None:
    library.cann_emu_set_failures(text.encode())


def clear_errors() -> None:
    library.cann_emu_clear_errors()


def error_of(body: Callable[[], object]) -> str:
    """The message of the RuntimeError that the body raises, out of memory included."""
    try:
        body()
        torch.npu.synchronize()
    except RuntimeError as error:
        clear_errors()
        return str(error)
    raise AssertionError("nothing was raised")


@contextmanager
def refused(code: int, *words: str) -> Iterator[None]:
    """The body must fail with CANN's code, and the message must hold the words."""
    try:
        yield
        torch.npu.synchronize()
    except RuntimeError as error:
        text = str(error)
        clear_errors()
        assert f"error {code}" in text, f"wanted {code}, got: {text}"
        for word in words:
            assert word in text, f"wanted '{word}' in: {text}"
        return
    raise AssertionError(f"nothing was refused, {code} was wanted")


def close(actual: torch.Tensor, expected: torch.Tensor, **tolerance: Any) -> None:
    """Same dtype, same shape, same values within the dtype's usual tolerance; NaN equals NaN."""
    torch.testing.assert_close(actual.cpu(), expected, equal_nan=True, **tolerance)
