"""Plain sampling behind a decode graph, recorded as one launch.

P rows of a graph, padded ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""`GraphCompiler.record`."""


class RecordedSampling:
    """A call after a step's forward writes the step's tokens to its own memory, valid until the next call.

    flat: int32 (2 * P,) on the device: the tokens, less than 0 if a row has none, then the receipts. next_P: int32, the
    tokens, with a valid one for rows that have none. A failed call can be repeated: it changes nothing else.
    """

    def __init__(self, sample: Callable[[Tensor, Tensor, Tensor], Tensor], logits_PV: Tensor,
                 arrays: Mapping[str, Tensor], temperatures_S: Tensor, recorder: Recorder):
        """sample: `Ops.softmax_sampler` for greedy rows, too. logits_PV: the graph's logits. arrays: the graph's own of
        SAMPLER_ARRAYS, (P,) each."""
        slots_P, uniforms_P, receipts_P = arrays["slots"], arrays["uniforms"], arrays["receipts"]
        self.num_rows = len(slots_P)
        self.flat = torch.zeros(2 * self.num_rows, dtype=torch.int32, device=logits_PV.device)
        self.next_P = torch.zeros(self.num_rows, dtype=torch.int32, device=logits_PV.device)
        self._logits_PV = logits_PV
        # What was recorded reads them where they are.
        self._reads = slots_P, uniforms_P, receipts_P, temperatures_S

        def run() -> None:
            temperature_P1 = temperatures_S.index_select(0, slots_P)[:, None]
            tokens_P = sample(logits_PV, temperature_P1, uniforms_P[:, None]).squeeze(-1)
            torch.cat([tokens_P, receipts_P], out=self.flat)
            torch.clamp(tokens_P, min=0, out=self.next_P)

        self._run = recorder(run)

    def __call__(self, logits_BV: Tensor) -> None:
        """logits_BV: the first rows of those that it was made for."""
        assert logits_BV.data_ptr() == self._logits_PV.data_ptr(), "recorded sampling reads its own graph's logits only"
        self._run()
