"""Draws tokens with every sampling parameter on the npu platform and writes them, as JSON, on the last line.

    python -m tests.npu.programs.sampling
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from npu_runner.sampling_params import SamplingParams
from tests.runner.sampler_steps import Conversation, make_sampler
from tests.runner.test_sampler_state import SEVERAL, VOCAB, conversation, spell

NUM_STEPS = 8


PLAIN = [SamplingParams(temperature=temperature, seed=number)
         for number, temperature in enumerate((0.3, 0.7, 1.0, 1.0, 1.6, 3.0))]


def draw(device: torch.device, draw_from_softmax: Any = None) -> list[list[int]]:
    """The tokens of all of SEVERAL together, then of rows that only draw, which a platform may do at once."""
    everyone = [conversation(number) for number in range(len(SEVERAL))]
    plain = [Conversation(params, [number + 3, 7], number) for number, params in enumerate(PLAIN)]
    return [tokens for batch in (everyone, plain) for tokens in draw_together(batch, device, draw_from_softmax)]


def draw_together(everyone: list[Conversation], device: torch.device, draw_from_softmax: Any) -> list[list[int]]:
    table_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)) * 2
    sampler = make_sampler(VOCAB, len(everyone), spell, device, draw_from_softmax)
    slots = np.arange(len(everyone), dtype=np.int32)
    for slot, one in enumerate(everyone):
        sampler.add(slot, one.params, one.prompt, seed=one.seed)
    for number in range(NUM_STEPS):
        logits_BV = torch.stack([one.logits(table_VV) for one in everyone])
        arrays = (torch.from_numpy(slots), torch.from_numpy(sampler.host_inputs(slots)),
                  torch.full((len(slots),), number, dtype=torch.int32))
        host = sampler(logits_BV.to(device), *(array.to(device) for array in arrays), slots).to_host()
        assert host.receipts_B.tolist() == [number] * len(slots)
        for one, token in zip(everyone, host.token_ids_B.tolist(), strict=True):
            one.output.append(token)
    return [one.output for one in everyone]


def main() -> None:
    from npu_runner.platforms import pick_platform

    platform = pick_platform("npu")
    platform.prepare_process(0, 1)
    print(json.dumps(draw(platform.set_device(0), platform.make_ops().softmax_draw())))


if __name__ == "__main__":
    main()
