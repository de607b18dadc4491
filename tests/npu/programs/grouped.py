"""Matmuls with integers in groups on the npu platform: single ones, and the logits of checkpoints.

    python -m tests.npu.programs.grouped SPEC.json RESULTS.pt

SPEC as of tests/npu/programs/int8.py. RESULTS: {"matmuls": ..., "words": ..., "logits": [(tokens, logits (count, V))
of each case], "said": [the arithmetic of each]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_runner.platforms import find_platform
from npu_runner.platforms.grouped import GroupedWeight, packed, unpacked
from npu_runner.platforms.quantised import QuantisedOps
from tests.npu.programs.int8 import answers_of

SHAPES = ((5, 256, 96), (1, 128, 64), (40, 512, 48))
"""T tokens, I inputs, O outputs."""
KINDS = ((4, 32, True), (4, 64, False), (4, 0, True), (8, 128, True), (8, 0, False), (8, 0, True))
"""Bits, inputs of a group (0: all of a row), and whether there are zeros."""
DTYPES = ("bfloat16", "float16")


def inputs_of(shape: tuple[int, int, int], kind: tuple[int, int, bool], dtype: str) -> tuple[Tensor, Any, Tensor]:
    """Rows, a weight and a bias."""
    (num_tokens, num_inputs, num_outputs), (bits, group_size, has_zeros) = shape, kind
    generator, of = torch.Generator().manual_seed(sum(shape) + bits + group_size), getattr(torch, dtype)
    half, groups = 1 << (bits - 1), num_inputs // group_size if group_size else 1
    values = torch.randint(-half, half, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    scales = (torch.rand(num_outputs, groups, generator=generator) * 1e-2 + 1e-4).to(of)
    zeros = torch.randint(-half, half + 1, scales.shape, generator=generator).to(of) if has_zeros else None
    x = torch.randn(num_tokens, num_inputs, generator=generator).to(of)
    bias = torch.randn(num_outputs, generator=generator).to(torch.float32 if dtype == "bfloat16" else of)
    return x, GroupedWeight(packed(values) if bits == 4 else values, scales, zeros), bias


def quantised_ops() -> QuantisedOps:
    platform = find_platform("npu")
    return platform.make_quantised_ops(platform.make_ops())


def matmuls() -> dict[str, Tensor]:
    ops, found = quantised_ops(), {}
    for dtype in DTYPES:
        for shape in SHAPES:
            for kind in KINDS:
                x, weight, bias = inputs_of(shape, kind, dtype)
                prepared = ops.prepare_weight(GroupedWeight(*(None if each is None else each.npu() for each in weight)))
                found[f"{dtype} {shape} {kind}"] = ops.linear(x.npu(), prepared, bias.npu()).cpu()
    return found


def words() -> tuple[Tensor, Tensor]:
    """Four bits as the vendor packs them, and as we do."""
    import torch_npu  # the tests read this module, too, and have none

    _, weight, _ = inputs_of(SHAPES[0], KINDS[0], DTYPES[0])
    theirs = torch_npu.npu_convert_weight_to_int4pack(unpacked(weight.values).t().int().contiguous().npu())
    ours = quantised_ops().prepare_weight(GroupedWeight(*(None if each is None else each.npu() for each in weight)))
    return theirs.cpu(), ours[0].cpu()


def main(spec_path: str, results_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    with torch.inference_mode():
        found: dict[str, Any] = {"matmuls": matmuls(), "words": words()}
    found |= answers_of(spec["cases"])
    torch.save(found, results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
