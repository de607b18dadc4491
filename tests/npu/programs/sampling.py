"""Draws tokens with every sampling parameter on the npu platform and writes them, as JSON, on the last line.

    python -m tests.npu.programs.sampling
"""

from __future__ import annotations

import json

import numpy as np
import torch

from tests.runner.sampler_steps import make_sampler
from tests.runner.test_sampler_state import SEVERAL, VOCAB, conversation, spell

NUM_STEPS = 8


def draw(device: torch.device) -> list[list[int]]:
    """The tokens of all of SEVERAL together, on `device`."""
    table_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)) * 2
    sampler = make_sampler(VOCAB, len(SEVERAL), spell, device)
    everyone = [conversation(number) for number in range(len(SEVERAL))]
    slots = np.arange(len(SEVERAL), dtype=np.int32)
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
    print(json.dumps(draw(platform.set_device(0))))


if __name__ == "__main__":
    main()
