"""Where the CUDA kernels are tried: on a GPU with --platform cuda, or on the CPU where TRITON_INTERPRET=1 is set.

Files of ON_CPU run without both: g++ compiles the kernels that they test (decode_on_cpu.py).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_CPU = ("test_shared_blocks.py",)


class LeftOut(pytest.File):
    """A file of which one test is skipped for all: a thousand take seconds to be collected and skipped one by one."""

    def collect(self) -> list[pytest.Item]:
        return [Skipped.from_parent(self, name="all")]


class Skipped(pytest.Item):
    def runtest(self) -> None:
        pytest.skip("kernels need --platform cuda, or TRITON_INTERPRET=1 and triton")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> LeftOut | None:
    is_tried = INTERPRETED or parent.config.getoption("--platform") == "cuda" or module_path.name in ON_CPU
    return None if is_tried else LeftOut.from_parent(parent, path=module_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    """A GPU runs every case, g++ leaves some to the full set."""
    for mark in item.iter_markers("full_on_cpu") if item.config.getoption("--platform") != "cuda" else ():
        item.add_marker(pytest.mark.full(*mark.args))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    if pytestconfig.getoption("--platform") != "cuda" and not INTERPRETED:
        return torch.device("cpu")
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


@pytest.fixture(scope="module")
def decode_kernels(device: torch.device) -> Iterator[None]:
    """Decode attention in CUDA C++, on a GPU or on the CPU."""
    from tests.cuda.decode_on_cpu import kernels_on_cpu
    from tests.cuda.paged_work import need_hopper

    if device.type == "cuda":
        need_hopper(device)
        yield
    else:
        with kernels_on_cpu():
            yield
