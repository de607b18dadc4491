"""Where the CUDA kernels are tried: on a GPU with --platform cuda, or on the CPU where TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    if os.environ.get("TRITON_INTERPRET") == "1":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        from tests.cuda.interpreter import mend_bfloat16

        mend_bfloat16()
        return torch.device("cpu")
    if request.config.getoption("--platform") != "cuda":
        pytest.skip("kernels need --platform cuda, or triton's interpreter (TRITON_INTERPRET=1)")
    from npu_runner.errors import ConfigError
    from npu_runner.platforms import pick_platform

    try:
        return pick_platform("cuda").devices.set_device(0)
    except ConfigError as reason:
        pytest.skip(str(reason))
