"""A thinking budget makes no step wait for the tokens of the one before, until it may be spent; then it counts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner import SamplingParams
from npu_runner.platforms.transfers import Download
from npu_runner.request.prompt_inputs import ReasoningTokens
from npu_runner.sampling.sampler import Sampler
from npu_runner.sampling.token_constraints import ConstrainedRows

START, END, WORD = 1, 2, 5


class Slow(Download):
    """One that nobody has seen arrive before somebody waits for it."""

    waited: list[int] = []  # noqa: RUF012 - of the test that runs

    def is_done(self) -> bool:
        return False

    def wait(self) -> np.ndarray:
        self.waited.append(1)
        return super().wait()


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_only_the_last_tokens_of_a_budget_are_waited_for(budget: int) -> None:
    Slow.waited.clear()
    tokens: Any = ReasoningTokens(start="<think>", end="</think>", start_id=START, end_id=END)
    sampler = Sampler(vocab_size=8, max_num_seqs=2, eos_token_ids=[7], device=torch.device("cpu"),
                      download=lambda x: Slow(x.cpu()), constrained=ConstrainedRows(None, tokens, [7]))
    sampler.add(0, SamplingParams(temperature=0, max_thinking_tokens=budget), [3], seed=0, thinking="open")
    logits_BV = torch.zeros(1, 8)
    logits_BV[0, WORD] = 9.0
    chosen, waits = [], []
    for _ in range(budget + 4):
        slots_B: Tensor = torch.zeros(1, dtype=torch.int32)
        output = sampler(logits_BV, slots_B, torch.zeros(1), slots_B, np.zeros(1, dtype=np.int32))
        waits.append(len(Slow.waited))
        chosen.append(int(output.token_ids_B[0]))
    assert chosen == [WORD] * budget + [END] + [WORD] * 3
    assert waits[: budget or 1] == [0] * (budget or 1), "nothing is waited for before it may be spent"
