"""Where the CUDA kernels are tried: on a GPU with --platform cuda, or on the CPU where TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class LeftOut(pytest.File):
    """A file of which one test is skipped for all: a thousand take seconds to be collected and skipped one by one."""

    def collect(self) -> list[pytest.Item]:
        return [Skipped.from_parent(self, name="all")]


class Skipped(pytest.Item):
    def runtest(self) -> None:
        pytest.skip("kernels need --platform cuda, or TRITON_INTERPRET=1 and triton")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> LeftOut | None:
    is_tried = INTERPRETED or parent.config.getoption("--platform") == "cuda"
    return None if is_tried else LeftOut.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def device() -> torch.device:
    if INTERPRETED:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        from tests.cuda.interpreter import mend_bfloat16

        mend_bfloat16()
        return torch.device("cpu")
    from npu_runner.errors import ConfigError
    from npu_runner.platforms import pick_platform

    try:
        return pick_platform("cuda").devices.set_device(0)
    except ConfigError as reason:
        pytest.skip(str(reason))
