"""Kernels in CUDA C++ that are compiled ahead: one that is not there says so, and what is taken instead."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch


def test_a_source_that_is_not_taken_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where there is no NVRTC, no source is."""
    pytest.importorskip("triton")
    from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead

    path = tmp_path / "wrong.cu"
    path.write_text('extern "C" __global__ void wrong() { this is no program }')
    kernel = KernelAhead(CompiledSource([path], {}), "wrong", 0, fallback="what is wrong: right")
    with caplog.at_level(logging.INFO, "npu_runner"):
        assert not kernel.is_available
        assert not kernel.is_available
    assert [record.getMessage()[:22] for record in caplog.records] == ["what is wrong: right ("]
    with pytest.raises(AssertionError, match="ask whether it is available"):
        _ = kernel.loaded


def test_a_name_that_a_source_does_not_have_is_not_there(tmp_path: Path, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("a driver loads kernels")
    from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead

    path = tmp_path / "right.cu"
    path.write_text('extern "C" __global__ void right() {}')
    major, minor = torch.cuda.get_device_capability()
    source = CompiledSource([path], {}, f"sm_{major}{minor}")
    assert KernelAhead(source, "right", 0, fallback="none").is_available
    assert not KernelAhead(source, "wrong", 0, fallback="none").is_available
