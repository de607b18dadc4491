"""What a GPU is too old for is refused by name. Capabilities: NVIDIA's table of GPUs; 7.5 is a T4, 8.0 an A100."""

from __future__ import annotations

import pytest
import torch

from npu_runner.platforms.cuda import too_old
from npu_runner.platforms.cuda.platform import why_no_dtype


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_bfloat16_begins_with_ampere(capability: tuple[int, int]) -> None:
    reason = why_no_dtype(capability, torch.bfloat16)
    assert reason == f"bfloat16 needs a GPU of compute capability 8.0, this one has {capability[0]}.{capability[1]}"
    assert why_no_dtype(capability, torch.float16) is None
    assert why_no_dtype(capability, torch.float32) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_newer_ones_do_all(capability: tuple[int, int]) -> None:
    assert why_no_dtype(capability, torch.bfloat16) is None


def test_a_refusal_names_both_capabilities() -> None:
    assert too_old("flashinfer", (7, 5), (7, 5)) is None
    assert too_old("flashinfer", (7, 5), (7, 0)) == (
        "flashinfer needs a GPU of compute capability 7.5, this one has 7.0")
