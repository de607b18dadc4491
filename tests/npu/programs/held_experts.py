"""Ranges of a layer's experts on the device, as ranks hold them: what they add up to, and their launches.

    python -m tests.npu.programs.held_experts RESULTS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_runner.platforms import pick_platform
from npu_runner.platforms.ops import HeldExperts
from tests.cann.programs.emulation import calls, reset_counters

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 7, 64, 48, 2
RANGES = ((0, 4), (4, 5), (5, 7))
DTYPES = (torch.float32, torch.bfloat16)


def main(results: str) -> None:
    ops = pick_platform("npu").make_ops()
    found: dict[str, Any] = {"distances": {}, "of_nothing": {}}
    with torch.inference_mode():
        for dtype in DTYPES:
            for num_tokens in (1, 5, 40):
                work = draw(num_tokens, dtype)
                name = f"{num_tokens} tokens, {str(dtype).removeprefix('torch.')}"
                found["distances"][name], found["of_nothing"][name] = compare(ops, *work)
        x_TD, weights_TK, experts_TK, gate_up, down = (tensor.npu() for tensor in draw(5, torch.bfloat16))
        for name, held in (("all", None), ("some", HeldExperts(0, NUM_EXPERTS))):
            count = NUM_EXPERTS if held is None else 4
            torch.npu.synchronize()
            reset_counters()
            ops.experts(x_TD, weights_TK, experts_TK, gate_up[:count], down[:count], held)
            torch.npu.synchronize()
            found[f"launches of {name}"] = calls("launches")
    Path(results).write_text(json.dumps(found))


def draw(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, weights and experts of each token, gate_up (E, D, 2I) and down (E, I, D)."""
    generator = torch.Generator().manual_seed(num_tokens)
    x_TD = torch.randn(num_tokens, HIDDEN, generator=generator)
    weights_TK = torch.rand(num_tokens, TOP_K, generator=generator)
    experts_TK = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int()
    gate_up = torch.randn(NUM_EXPERTS, HIDDEN, 2 * WIDTH, generator=generator) * HIDDEN**-0.5
    down = torch.randn(NUM_EXPERTS, WIDTH, HIDDEN, generator=generator) * WIDTH**-0.5
    return x_TD.to(dtype), weights_TK.to(dtype), experts_TK.contiguous(), gate_up.to(dtype), down.to(dtype)


def compare(ops: Any, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor
            ) -> tuple[float, float]:
    """How far the sum of the ranges is from the definition in float64, of its largest value, and the largest that a
    token has of a range of which it chose none."""
    expected_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token, experts in enumerate(experts_TK.tolist()):
        for place, expert in enumerate(experts):
            gate, up = (x_TD[token].double() @ gate_up[expert].double()).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            expected_TD[token] += weights_TK[token, place].double() * (hidden @ down[expert].double())
    total_TD, of_nothing = torch.zeros_like(expected_TD), 0.0
    for first, last in RANGES:
        part_TD = ops.experts(x_TD.npu(), weights_TK.npu(), experts_TK.npu(), gate_up[first:last].npu(),
                              down[first:last].npu(), HeldExperts(first, NUM_EXPERTS)).cpu().double()
        is_away_T = ((experts_TK < first) | (experts_TK >= last)).all(1)
        if is_away_T.any():
            of_nothing = max(of_nothing, part_TD[is_away_T].abs().max().item())
        total_TD += part_TD
    return ((total_TD - expected_TD).abs().max() / expected_TD.abs().max()).item(), of_nothing


if __name__ == "__main__":
    main(*sys.argv[1:])
