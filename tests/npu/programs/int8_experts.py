"""Experts of int8 on the npu platform, all of them and in ranges as ranks hold them, and their launches.

    python -m tests.npu.programs.int8_experts RESULTS.pt

RESULTS: {"outputs": {name: (all experts (T, D), the sum of ranges, the largest that a token has of a range of which it
chose none)}, "launches": {(layout, width, tokens): number}}.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms import pick_platform
from npu_runner.platforms.ops import HeldExperts
from npu_runner.platforms.quantised import QuantisedExperts

NUM_EXPERTS, TOP_K, HIDDEN = 7, 2, 128
WIDTHS = {"int8": (64, 128, 96, 48, 32, 16, 40), "none": (64, 128, 96, 32)}
"""By layout of the weights (NPU_RUNNER_ASCEND_NZ_WEIGHTS): ones whose kernels compute rightly, and others."""
RANGES = ((0, 4), (4, 5), (5, 7))
DTYPES = (torch.bfloat16, torch.float16)
TOKENS = (1, 5, 40)


class Case(NamedTuple):
    layout: str
    num_tokens: int
    width: int
    dtype: torch.dtype


def cases() -> list[Case]:
    return [Case(layout, num_tokens, width, dtype) for layout, widths in WIDTHS.items() for dtype in DTYPES
            for width in widths for num_tokens in TOKENS]


def draw(num_tokens: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """x (T, D), weights and experts (T, K), and values (E, O, I) and scales (E, O) of both matmuls."""
    generator = torch.Generator().manual_seed(num_tokens + width)

    def matrices(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        values = torch.randint(-127, 128, (NUM_EXPERTS, outputs, inputs), generator=generator, dtype=torch.int8)
        return values, (torch.rand(NUM_EXPERTS, outputs, generator=generator) + 0.2) / 73 * inputs**-0.5

    (gate_up, gate_up_scales), (down, down_scales) = matrices(2 * width, HIDDEN), matrices(HIDDEN, width)
    experts_TK = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int()
    return {"x": torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype), "experts": experts_TK.contiguous(),
            "weights": torch.rand(num_tokens, TOP_K, generator=generator).to(dtype), "gate_up": gate_up,
            "gate_up_scales": gate_up_scales, "down": down, "down_scales": down_scales}


class Experts:
    """As `ExpertWeights` holds them for the platform."""

    def __init__(self, given: dict[str, Tensor], layout: str):
        from npu_runner.platforms.npu.weight_layout import WeightLayout  # imports torch_npu

        platform = pick_platform("npu")
        self.ops: Any = platform.make_quantised_ops(platform.make_ops())
        self.ops._layout = WeightLayout(layout)
        self.chosen = [given[name].npu() for name in ("x", "weights", "experts")]
        self.weights = [QuantisedExperts(given[name].transpose(1, 2).contiguous().npu(), given[f"{name}_scales"].npu())
                        for name in ("gate_up", "down")]

    def taken(self, first: int = 0, last: int = NUM_EXPERTS) -> list[QuantisedExperts]:
        """As they are held once they are loaded."""
        return list(self.ops.prepare_experts(*(QuantisedExperts(values[first:last].clone(), scales[first:last])
                                               for values, scales in self.weights), self.chosen[0].dtype))

    def run(self, taken: list[QuantisedExperts], held: HeldExperts | None = None) -> Tensor:
        return self.ops.experts(*self.chosen, *taken, held)


def main(results: str) -> None:
    from tests.cann.programs.emulation import calls, reset_counters  # where the emulation is loaded

    outputs: dict[str, Any] = {}
    launches: dict[str, Any] = {}
    with torch.inference_mode():
        for case in cases():
            layout, num_tokens, width, dtype = case
            given = draw(num_tokens, width, dtype)
            experts = Experts(given, layout)
            total, of_nothing = torch.zeros(num_tokens, HIDDEN, dtype=torch.float64), 0.0
            for first, last in RANGES:
                part = experts.run(experts.taken(first, last), HeldExperts(first, NUM_EXPERTS)).cpu().double()
                is_away = ((given["experts"] < first) | (given["experts"] >= last)).all(1)
                of_nothing = max([of_nothing, *part[is_away].abs().flatten().tolist()])
                total += part
            whole = experts.taken()
            outputs[tuple(case)] = (experts.run(whole).cpu(), total, of_nothing)
            if dtype == torch.bfloat16:
                reset_counters()
                experts.run(whole)
                launches[layout, width, num_tokens] = sum(calls("launches").values())
    torch.save({"outputs": outputs, "launches": launches}, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
