"""Captured graphs on a GPU, apart from models."""

from __future__ import annotations

import pytest
import torch

from npu_runner.platforms.graphs import GraphCaptureError


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("a GPU captures")
    return device


def test_a_capture_leaves_pinned_memory_for_the_steps_to_come(gpu: torch.device) -> None:
    """What was pinned while memory was measured is there for the first images, which else waited for tens of
    milliseconds."""
    from npu_runner.platforms.cuda.graphs import CudaGraphCompiler

    compiler = CudaGraphCompiler(with_inductor=False)
    sums_B = torch.zeros(4, device=gpu)
    pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    place = pinned.data_ptr()
    del pinned
    replays = [compiler.recorder()(lambda: sums_B.add_(1)) for _ in range(2)]
    assert torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).data_ptr() == place
    sums_B.zero_()
    for replay in (*replays, *replays):
        replay()
    assert sums_B.tolist() == [4.0] * 4


def test_a_capture_that_fails_says_why_and_others_go_on(gpu: torch.device) -> None:
    from npu_runner.platforms.cuda.graphs import CudaGraphCompiler

    compiler = CudaGraphCompiler(with_inductor=False)
    calls = []

    def fails_when_captured() -> None:
        calls.append(torch.zeros(4, device=gpu))
        if len(calls) > 1:
            raise torch.OutOfMemoryError("no memory for this one")

    with pytest.raises(torch.OutOfMemoryError, match="no memory for this one"):
        compiler.recorder()(fails_when_captured)
    sums_B = torch.zeros(4, device=gpu)
    replay = compiler.recorder()(lambda: sums_B.add_(1))
    sums_B.zero_()
    replay()
    assert sums_B.tolist() == [1.0] * 4


def test_what_cannot_be_captured_is_named(gpu: torch.device) -> None:
    """By the error of the operation, not by that of the capture's end."""
    from npu_runner.platforms.cuda.graphs import CudaGraphCompiler

    compiler = CudaGraphCompiler(with_inductor=False)
    sums_B = torch.zeros(4, device=gpu)
    with pytest.raises(GraphCaptureError, match="Cannot copy between CPU and CUDA tensors during CUDA graph capture"):
        compiler.recorder()(lambda: sums_B.add_(1).cpu())
