"""Memory, streams, events and ACL graphs of the emulated runtime."""

import json
from pathlib import Path

import pytest

from .checks import assert_check, check_names
from .environment import run_python

pytestmark = pytest.mark.npu
SMALL = 256 << 20


@pytest.mark.parametrize("name", check_names("device"))
def test_device(name: str) -> None:
    assert_check("device", name, memory_bytes=SMALL)


@pytest.mark.parametrize("name", check_names("device"))
def test_device_with_expandable_segments(name: str) -> None:
    assert_check("device", name, memory_bytes=SMALL, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")


@pytest.mark.parametrize("name", check_names("graphs"))
def test_graph(name: str) -> None:
    assert_check("graphs", name, sync_timeout_ms=2000)


@pytest.mark.parametrize("limit", [{"max_graphs": 3}, {"max_streams": 80}], ids=["graphs", "streams"])
def test_graphs_run_out_with_the_devices_code(limit: dict[str, int]) -> None:
    assert_check("limits", "check_the_number_of_graphs_is_limited", **limit)


@pytest.mark.parametrize("name", check_names("lazy"))
def test_lazy_streams(name: str) -> None:
    assert_check("lazy", name, lazy=True)


def test_counters_are_dumped_at_exit(tmp_path: Path) -> None:
    path = tmp_path / "counters.json"
    code = "import torch, torch_npu; (torch.ones(4).npu() + 1).cpu()"
    done = run_python(["-c", code], forked=True, counters=path)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["launches"]["aclnnAdds"]["calls"] == 1


def test_visible_devices_narrow_what_a_process_sees() -> None:
    code = "import torch, torch_npu; print('COUNT', torch.npu.device_count())"
    done = run_python(["-c", code], forked=True, num_devices=4, ASCEND_RT_VISIBLE_DEVICES="1,3")
    assert "COUNT 2" in done.stdout, done.stderr


def test_no_graph_is_captured_with_the_second_task_queue() -> None:
    code = "import torch, torch_npu; x = torch.ones(4).npu()\nwith torch.npu.graph(torch.npu.NPUGraph()): x + 1"
    done = run_python(["-c", code], forked=True, TASK_QUEUE_ENABLE="2")
    assert "TASK_QUEUE_ENABLE = 2 during NPU graph capture" in done.stderr


def test_a_name_that_is_not_emulated_stops_the_program_and_names_itself() -> None:
    code = "import ctypes; ctypes.CDLL('libascendcl.so').rtKernelLaunch()"
    done = run_python(["-c", code])
    assert done.returncode != 0
    assert "rtKernelLaunch is not emulated" in done.stderr
