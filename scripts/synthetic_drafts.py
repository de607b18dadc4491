"""Drafts that are kept by chance, whatever the model draws: what steps with drafts cost at a given acceptance.

For benchmarks alone. Answers are made up as soon as a draft is kept, and no setting of npu_runner leads here. Nothing
is looked up and no head is computed, so the time is that of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from npu_runner.core import sequence
from npu_runner.core.drafts import Drafter
from npu_runner.engine import llm_engine
from npu_runner.runner import speculative_step
from npu_runner.sampling.sampler import HostSample

NUM_DRAFTS, ACCEPTANCE = 3, 0.7
"""Of a row in a step; probability that a draft is kept, if all before it are."""
SPECULATIVE = {"method": "forced", "num_speculative_tokens": NUM_DRAFTS}
_LEAST_TOKEN, _END_TOKEN = 40, 104  # which tokens are drafted does not matter; every vocabulary has these


@contextmanager
def synthetic_drafts(seed: int = 0) -> Iterator[None]:
    """An LLM that is made inside, with SPECULATIVE and one rank, has such drafts in each step, for ever."""
    rng = np.random.default_rng(seed)

    class MadeUp(Drafter):
        def may_draft(self, running: Sequence[sequence.Sequence]) -> bool:
            return True

        def propose(self, running: Sequence[sequence.Sequence], room: int) -> list[list[int]]:
            drafts = rng.integers(_LEAST_TOKEN, _END_TOKEN, (len(running), NUM_DRAFTS)).tolist()
            self.note_next(running, drafts, [NUM_DRAFTS] * len(running))
            return super().propose(running, room)

    class KeptByChance(speculative_step.VerifiedStep):
        def take_all(self, sample: HostSample) -> None:
            drafts_T = np.roll(self.batch.token_ids_T, -1)
            keeps_T = rng.random(len(drafts_T)) < ACCEPTANCE
            keeps_T[np.cumsum(self.batch.query_lens_B) - 1] = False  # behind a row's last draft stands none
            refused_T = np.where(sample.token_ids_B == drafts_T, _END_TOKEN, sample.token_ids_B)
            tokens_T = np.where(keeps_T, drafts_T, refused_T)
            super().take_all(replace(sample, token_ids_B=tokens_T.astype(np.int32)))

    with patch.object(llm_engine, "Drafter", MadeUp), patch.object(speculative_step, "VerifiedStep", KeptByChance):
        yield
