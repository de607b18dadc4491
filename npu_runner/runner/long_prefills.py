"""Chooses the long prefills that are recorded in graphs: those that the host launches for long, as far as their memory
is within a bound. Measures them while nothing is served; knows nothing of how a graph is recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from npu_runner.request.limits import MIB, size
from npu_runner.runner.dummy import dummy_prefill
from npu_runner.runner.memory import MemoryMeter
from npu_runner.runner.step import StepRunner

logger = logging.getLogger(__name__)

MOST_BYTES = 512 * MIB
_BYTES_A_GRAPH = 16 * MIB
# The graphs' pool is fragmented: it takes more than a step holds at once.
_POOL_MARGIN = 1.35
# Of the time of an eager step. While serving, launching takes longer than at the start (24 and not 15 ms on an H200),
# and the host has rows to prepare beside it.
_LEAST_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class LongPrefills:
    """The sizes to record, in ascending order; the bytes to leave free for their graphs; what was measured of the last
    size."""

    sizes: Sequence[int]
    num_bytes: int
    reason: str
    bytes_a_token: float = 0.0
    """Bytes that the last prefill measured held at once, per token. A smaller one holds at least as many."""
    seconds: float = 0.0
    """Seconds that choosing took."""

    def describe(self, recorded: Sequence[int], num_bytes: int, seconds: float) -> str:
        """A line of the ledger; `num_bytes` and `seconds` of the start that recording took."""
        if not recorded:
            return f"\n  no graphs of long prefills: {self.reason}"
        return (f"\n  graphs of prefills of {', '.join(map(str, recorded))} tokens took {size(num_bytes)}, and "
                f"{self.seconds + seconds:.2f} s of the start: {self.reason}")


def choose_long_prefills(steps: StepRunner, sizes: Sequence[int], meter: MemoryMeter, *, uses_mrope: bool,
                         bytes_a_token: int) -> LongPrefills:
    """Keep `sizes`, which ascend, up to the largest that is worth a graph. All ranks keep the same.

    `bytes_a_token`: of the result that each graph keeps.
    """
    def judge(wanted: Sequence[int]) -> LongPrefills:
        """Keep all of `wanted` if the last of them is worth a graph, else none."""
        launching, whole, peak_bytes = _measure(steps, wanted[-1], meter, uses_mrope=uses_mrope)
        held_a_token = peak_bytes / wanted[-1]
        num_bytes = int(_POOL_MARGIN * peak_bytes) + len(wanted) * _BYTES_A_GRAPH + sum(wanted) * bytes_a_token
        reason = f"launching one of {wanted[-1]} takes {1e3 * launching:.1f} of {1e3 * whole:.1f} ms"
        if num_bytes > MOST_BYTES:
            reason = f"those of up to {wanted[-1]} tokens would need {size(num_bytes)}"
        is_worth = launching >= _LEAST_SHARE * whole and num_bytes <= MOST_BYTES
        if not steps.tp.minimum(int(is_worth), steps.device):
            wanted, num_bytes = (), 0
        logger.info("long prefills to record: %s (%s)", ", ".join(map(str, wanted)) or "none", reason)
        return LongPrefills(sizes=wanted, num_bytes=num_bytes, reason=reason, bytes_a_token=held_a_token)

    begun, found = time.perf_counter(), judge(sizes[:1])  # which is all that a large model has to run
    if found.sizes:
        larger = map(judge, (sizes[:count] for count in range(len(sizes), 1, -1)))
        found = next((each for each in larger if each.sizes), found)
    return replace(found, seconds=time.perf_counter() - begun)


def _measure(steps: StepRunner, num_tokens: int, meter: MemoryMeter, *, uses_mrope: bool) -> tuple[float, float, int]:
    """Seconds until an eager prefill is launched, and until it has run; the most bytes that it holds at once."""
    batch = dummy_prefill(num_tokens, min(steps.max_num_seqs, num_tokens), block_size=steps.block_size,
                          uses_mrope=uses_mrope)
    of_rows = {name: np.zeros(batch.batch_size, dtype=dtype) for name, dtype in steps.of_rows.items()}
    with steps.tables.preserve():
        step = steps.prepare(batch, 0, of_rows)
        peak_bytes = meter.peak_of(lambda: steps.launch(step))  # the first run loads kernels, too
        begun = time.perf_counter()
        steps.launch(step)
        launched = time.perf_counter()
        steps.platform.memory.synchronize()
    return launched - begun, time.perf_counter() - begun, peak_bytes
