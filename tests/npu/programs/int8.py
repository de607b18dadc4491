"""Matmuls with rounded inputs on the npu platform: single ones, and the logits of checkpoints.

    python -m tests.npu.programs.int8 SPEC.json RESULTS.pt

SPEC: {"cases": [{"model": folder, "settings": {...}, "prompt": [ids], "count": 6}]}; without a prompt it is a question
about `picture()`. RESULTS: {"linears": ..., "logits": [(tokens, logits (count, V)) of each case], "prompts": [the ids
of each], "said": [the arithmetic of each]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from npu_runner import LLM
from npu_runner.platforms import find_platform
from npu_runner.platforms.quantised import INT8, Int8Rows, Int8Weight, NormRounding, StaticInt8Weight, StaticRows
from npu_runner.request.prompt_inputs import PromptInputs
from tests.oracle.reference import random_image
from tests.oracle.running import greedy, recorded_logits

SHAPES = ((5, 48, 32), (37, 256, 96), (1, 160, 64))
"""T tokens, I inputs, O outputs."""
DTYPES = ("bfloat16", "float16")
EPS, INPUT_SCALE, INPUT_OFFSET = 1e-6, 0.083, 7


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(shape: tuple[int, int, int], dtype: str) -> dict[str, Tensor]:
    """What a matmul and the norm in front of it take."""
    num_tokens, num_inputs, num_outputs = shape
    kind, seed = getattr(torch, dtype), sum(shape)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    is_bfloat16 = kind == torch.bfloat16
    return {
        "norm_scales": torch.full((num_inputs,), INPUT_SCALE).to(kind if is_bfloat16 else torch.float32),
        "norm_offsets": torch.full((num_inputs,), INPUT_OFFSET).to(kind if is_bfloat16 else torch.int32),
        "r": torch.tensor([1 / INPUT_SCALE]).to(kind), "offset": torch.tensor([INPUT_OFFSET]).to(kind),
        "shifts": (1000 * draw(num_outputs, seed=seed + 5)).int() - INPUT_OFFSET * values.sum(1, dtype=torch.int32),
        "x": (draw(num_tokens, num_inputs, seed=seed) * 3).to(kind),
        "residual": draw(num_tokens, num_inputs, seed=seed + 1).to(kind),
        "gamma": (1 + 0.1 * draw(num_inputs, seed=seed + 2)).to(kind),
        "values": values,
        "scales": draw(num_outputs, seed=seed + 3).abs() / 1000, "bias": draw(num_outputs, seed=seed + 4),
    }


def linears() -> dict[str, dict[str, Tensor]]:
    """By dtype and shape: the matmul, and the one behind a norm that rounds."""
    platform = find_platform("npu")
    ops, found = platform.make_quantised_ops(platform.make_ops()), {}
    for dtype in DTYPES:
        for shape in SHAPES:
            given = {name: tensor.npu() for name, tensor in inputs_of(shape, dtype).items()}
            weight = ops.prepare_weight(Int8Weight(given["values"], given["scales"]))
            rows, total = ops.add_rms_norm(given["x"], given["residual"], given["gamma"], EPS, INT8)
            assert isinstance(rows, Int8Rows), "rounded with the norm"
            static = StaticInt8Weight(weight[0], *(given[name] for name in ("shifts", "scales", "r", "offset")))
            rounding = NormRounding(given["norm_scales"], given["norm_offsets"])
            static_rows, again = ops.add_rms_norm(given["x"], given["residual"], given["gamma"], EPS, rounding)
            assert isinstance(static_rows, StaticRows), "rounded with the norm"
            assert torch.equal(again.cpu(), total.cpu())
            found[f"{dtype} {shape}"] = {
                "static": ops.linear(given["x"], static, None).cpu(),
                "static behind a norm": ops.linear(static_rows, static, None).cpu(),
                "matmul": ops.linear(given["x"], weight, given["bias"]).cpu(),
                "behind a norm": ops.linear(rows, weight, None).cpu(), "total": total.cpu()}
    return found


def picture() -> Image.Image:
    return random_image(np.random.default_rng(8), 96, 64)


def logits_of(case: dict[str, Any]) -> tuple[list[int], Tensor, list[int], str]:
    question = [{"type": "image", "image": picture()}, {"type": "text", "text": "which"}]
    with LLM(case["model"], platform="npu", **case["settings"]) as llm, recorded_logits(llm) as steps:
        prompt = (PromptInputs(case["prompt"]) if "prompt" in case else
                  llm.engine.processor([{"role": "user", "content": question}]))
        (output,) = llm.generate([prompt], greedy(case["count"]))
        logits_TV = torch.cat([step[:1] for step in steps])
        return output.token_ids, logits_TV, prompt.token_ids, llm.engine.describe()["quantization"]


def answers_of(cases: list[dict[str, Any]]) -> dict[str, Any]:
    answers = [logits_of(case) for case in cases]
    return {"logits": [answer[:2] for answer in answers], "prompts": [answer[2] for answer in answers],
            "said": [answer[3] for answer in answers]}


def main(spec_path: str, results_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    with torch.inference_mode():
        found: dict[str, Any] = {"linears": linears()}
    found |= answers_of(spec["cases"])
    torch.save(found, results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
