"""Layers of the doctor's probe with one operator of the platform computed a little otherwise, as another kernel might.

    python -m tests.npu.programs.sabotage          writes {name: error} as JSON on the last line
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

DECODER, TOWER = "decoder layer, 16/8 heads of 128", "tower layer, 16 heads of 72"
DELTA, EXPERTS = "Gated DeltaNet layer, 4/8 heads of 128", "experts layer, 8 of 8 experts"
DTYPE = "float16"

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
# Class and method, the layer that notices, and the method made of the good one.
SABOTAGES: dict[str, tuple[str, str, str, Change]] = {
    "nothing, decoder": ("NpuOps", "silu_and_mul", DECODER, lambda good: good),
    "nothing, tower": ("NpuAttention", "vision", TOWER, lambda good: good),
    "nothing, Gated DeltaNet": ("NpuGatedDelta", "convolve", DELTA, lambda good: good),
    "nothing, experts": ("NpuOps", "experts", EXPERTS, lambda good: good),
    "weights of other experts": ("NpuOps", "experts", EXPERTS, lambda good: lambda self, x, weights, *rest: good(
        self, x, weights.roll(1, -1).contiguous(), *rest)),
    "taps backwards": ("NpuGatedDelta", "convolve", DELTA, lambda good: lambda self, x, taps, *rest: good(
        self, x, taps.flip(-1), *rest)),
    "states kept for longer": ("NpuGatedDelta", "delta_rule", DELTA, lambda good: lambda self, qkv, a, b, rate, *rest:
                               good(self, qkv, a, b, rate / 4, *rest)),
    "prompts leave no state": ("NpuGatedDelta", "delta_rule", DELTA, lambda good: lambda self, qkv, a, b, rate, bias,
                               state, metadata: good(self, qkv, a, b, rate, bias, state.clone(), metadata)),
    "gate and up swapped": ("NpuOps", "silu_and_mul", DECODER, lambda good: lambda self, x: good(
        self, x.roll(x.shape[-1] // 2, -1).contiguous())),
    "rotated backwards": ("NpuOps", "rotary", DECODER, lambda good: lambda self, q, k, cos, sin: good(
        self, q, k, cos, -sin)),
    "an epsilon of 0.1": ("NpuOps", "rms_norm", DECODER, lambda good: lambda self, x, weight, eps: good(
        self, x, weight, 0.1)),
    "the last token not seen": ("NpuAttention", "plan_decode", DECODER, lambda good: lambda self, lens, *rest: good(
        self, [max(1, length - 1) for length in lens], *rest)),
    "a scale of its own": ("NpuAttention", "vision", TOWER, lambda good: lambda self, q, k, v, plan, scale: good(
        self, q, k, v, plan, 128**-0.5)),
    "images see each other": ("NpuAttention", "plan_vision", TOWER, lambda good: lambda self, lengths, device: good(
        self, [sum(lengths)], device)),
}


def main() -> None:
    from npu_runner.cli.layer_cases import served
    from npu_runner.platforms import find_platform, reference_platform
    from npu_runner.platforms.cases import Side, run_case
    from npu_runner.platforms.npu.attention import NpuAttention
    from npu_runner.platforms.npu.gated_delta import NpuGatedDelta
    from npu_runner.platforms.npu.ops import NpuOps

    homes: dict[str, type] = {home.__name__: home for home in (NpuOps, NpuAttention, NpuGatedDelta)}
    npu, errors = find_platform("npu"), {}
    assert npu.why_unavailable() is None
    for name, (owner, method, layer, change) in SABOTAGES.items():
        good = getattr(homes[owner], method)
        setattr(homes[owner], method, change(good))
        with torch.inference_mode():
            (case,) = served({DTYPE: [layer]})
            sides = Side(npu, getattr(torch, DTYPE)), Side(reference_platform(), torch.float64)
            errors[name] = run_case(case, *sides, {}).largest_error
        setattr(homes[owner], method, good)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
