"""Chooses the long prefills that are recorded in graphs: those that the host launches for long, as far as their memory
is within a bound. Measures them while nothing is served; knows nothing of how a graph is recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npu_runner.request.limits import MIB, size
from npu_runner.runner.dummy import dummy_prefill
from npu_runner.runner.memory import MemoryMeter
from npu_runner.runner.step import PreparedStep, StepRunner

logger = logging.getLogger(__name__)

MOST_BYTES = 512 * MIB
_BYTES_A_GRAPH = 16 * MIB
# The pool of graphs is cut into pieces, over what a step holds at once.
_POOL_MARGIN = 1.25
# Of the time that an eager step takes. The host has as much to do for the rows of a step as to launch it, so from half
# of the time on launching is what a step waits for.
_LEAST_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class LongPrefills:
    """The sizes to record, in ascending order; the bytes to leave free for their graphs; why there are no others."""

    sizes: tuple[int, ...]
    num_bytes: int
    reason: str
    seconds: float
    """Seconds that choosing took."""

    def describe(self, recorded: Sequence[int], num_bytes: int, seconds: float) -> str:
        """A line of the ledger; `num_bytes` and `seconds` of the start that recording took."""
        if not recorded:
            return f"\n  no graphs of long prefills: {self.reason}"
        return (f"\n  graphs of prefills of {', '.join(map(str, recorded))} tokens took {size(num_bytes)}, and "
                f"{self.seconds + seconds:.2f} s of the start: {self.reason}")


def choose_long_prefills(steps: StepRunner, sizes: Sequence[int], meter: MemoryMeter, *, uses_mrope: bool,
                         bytes_a_token: int) -> LongPrefills:
    """Run a prefill of each of `sizes`, in ascending order, until one is not worth a graph; all ranks find the same.

    `bytes_a_token`: of the result that each graph keeps.
    """
    chosen: list[int] = []
    begun, reserved, reason = time.perf_counter(), 0, ""
    for num_tokens in sizes:
        batch = dummy_prefill(num_tokens, min(steps.max_num_seqs, num_tokens), block_size=steps.block_size,
                              uses_mrope=uses_mrope)
        of_rows = {name: np.zeros(batch.batch_size, dtype=dtype) for name, dtype in steps.of_rows.items()}
        with steps.tables.preserve():
            step = steps.prepare(batch, 0, of_rows)
            launching, whole, peak_bytes = _measure(steps, step, meter)
        num_bytes = int(_POOL_MARGIN * peak_bytes) + (len(chosen) + 1) * _BYTES_A_GRAPH + bytes_a_token * (
            sum(chosen) + num_tokens)
        reason = f"launching one of {num_tokens} takes {1e3 * launching:.1f} of {1e3 * whole:.1f} ms"
        if num_bytes > MOST_BYTES:
            reason = f"those of {num_tokens} tokens would need {size(num_bytes)}"
        if not steps.tp.minimum(int(launching >= _LEAST_SHARE * whole and num_bytes <= MOST_BYTES), steps.device):
            break
        chosen.append(num_tokens)
        reserved = num_bytes
    found = LongPrefills(sizes=tuple(chosen), num_bytes=reserved, reason=reason, seconds=time.perf_counter() - begun)
    logger.info("long prefills to record: %s (%s)", ", ".join(map(str, chosen)) or "none", reason)
    return found


def _measure(steps: StepRunner, step: PreparedStep, meter: MemoryMeter) -> tuple[float, float, int]:
    """Seconds until an eager step is launched, and until it has run; the most bytes that it holds at once."""
    memory = steps.platform.memory
    peak_bytes = meter.peak_of(lambda: steps.launch(step))  # the first run loads kernels, too
    begun = time.perf_counter()
    steps.launch(step)
    launched = time.perf_counter()
    memory.synchronize()
    return launched - begun, time.perf_counter() - begun, peak_bytes
