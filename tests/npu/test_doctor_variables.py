"""`npu-runner doctor`: variables, ports and shared memory, each with its remedy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_runner.platforms.npu.preflight import devices


@pytest.mark.parametrize(
    ("name", "value", "status", "remedy"),
    [
        ("ASCEND_LAUNCH_BLOCKING", None, "ok", ""),
        ("ASCEND_LAUNCH_BLOCKING", "0", "ok", ""),
        ("ASCEND_LAUNCH_BLOCKING", "1", "failed", "unset ASCEND_LAUNCH_BLOCKING"),
        ("TASK_QUEUE_ENABLE", "1", "ok", ""),
        ("TASK_QUEUE_ENABLE", "0", "warning", "export TASK_QUEUE_ENABLE=1"),
        ("TASK_QUEUE_ENABLE", "2", "failed", "export TASK_QUEUE_ENABLE=1, or unset it, or run with --enforce-eager"),
        ("TASK_QUEUE_ENABLE", "yes", "failed", "export TASK_QUEUE_ENABLE=1"),
        ("HCCL_OP_EXPANSION_MODE", "HOST", "ok", ""),
        ("HCCL_OP_EXPANSION_MODE", "AIV", "warning", "unset"),
        ("HCCL_OP_EXPANSION_MODE", "AI_CPU", "warning", "unset"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "ok", ""),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False", "warning", "expandable_segments:True"),
        ("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:64", "warning", "expandable_segments:True"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True, max_split_size_mb:64", "failed", "export"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,pin_memory_expandable_segments:True", "failed", "eager"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,pin_memory_expandable_segments:False", "ok", ""),
        ("ASCEND_RT_VISIBLE_DEVICES", "0,1", "ok", ""),
        ("ASCEND_RT_VISIBLE_DEVICES", "0, 1", "failed", "no spaces"),
        ("ASCEND_RT_VISIBLE_DEVICES", "npu:0", "failed", "numbers"),
        ("ASCEND_RT_VISIBLE_DEVICES", "1,1", "failed", "numbers"),
        ("ASCEND_RT_VISIBLE_DEVICES", "", "failed", "unset"),
    ],
)  # fmt: skip
def test_variables(name: str, value: str | None, status: str, remedy: str) -> None:
    found = {check.name: check for check in devices.check_variables({} if value is None else {name: value})}
    assert found.pop(name).status == status
    assert {check.status for check in found.values()} == {"ok"}, "the others are not set, which is fine"
    (check,) = [check for check in devices.check_variables({name: value or ""}) if check.name == name]
    assert remedy in check.remedy


GROWS, OURS, TORCHS = "expandable_segments:True", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
READS_BOTH, READS_ONE = ("2.14.0", "2.13.0", "2.12.0.post3", "2.10.0.post7", "2.15.0"), ("2.9.0.post9", "2.12.0",
                                                                                         "2.10.0.post4", "2.7.1.post11")


@pytest.mark.parametrize(("variables", "wheels", "status", "said"), [
    ({OURS: GROWS, TORCHS: GROWS}, (None, *READS_BOTH), "failed", "both"),
    ({OURS: GROWS, TORCHS: ""}, READS_BOTH, "failed", "both"),
    ({OURS: GROWS, TORCHS: GROWS}, READS_ONE, "ok", GROWS),
    ({TORCHS: GROWS}, (None, *READS_BOTH), "ok", f"{TORCHS}={GROWS}"),
    ({TORCHS: GROWS}, READS_ONE, "warning", "does not read"),
    ({TORCHS: "max_split_size_mb:64"}, READS_BOTH, "warning", "without expandable_segments"),
    ({TORCHS: f"{GROWS},max_split_size_mb:64"}, READS_BOTH, "failed", "max_split_size_mb"),
    ({TORCHS: f"{GROWS},pin_memory_expandable_segments:True"}, READS_BOTH, "failed", "captures no graph"),
])  # fmt: skip
def test_both_names_of_the_allocators_variable(
    variables: dict[str, str], wheels: tuple[str | None, ...], status: str, said: str
) -> None:
    for wheel in wheels:
        found = {check.name: check for check in devices.check_variables(variables, torch_npu=wheel)}
        assert found[OURS].status == status, wheel
        assert said in found[OURS].found
        assert (status == "ok") == (not found[OURS].remedy)


@pytest.mark.parametrize(("name", "value"), [
    ("TASK_QUEUE_ENABLE", "2"), ("ASCEND_LAUNCH_BLOCKING", "1"),
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,pin_memory_expandable_segments:True"),
])  # fmt: skip
def test_what_forbids_graphs_is_a_warning_where_none_is_asked_for(name: str, value: str) -> None:
    found = {check.name: check.status for check in devices.check_variables({name: value}, is_eager=True)}
    assert found.pop(name) == "warning"
    assert set(found.values()) == {"ok"}


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on, with room above it for HCCL's range."""
    with socket.socket() as listener:
        port = next(port for port in range(20000, 30000) if bound(listener, port))
        listener.listen()
        yield port


def bound(listener: socket.socket, port: int) -> bool:
    try:
        listener.bind(("", port))
    except OSError:
        return False
    return True


def test_a_taken_port(taken_port: int) -> None:
    wanted = {"HCCL_IF_BASE_PORT": str(taken_port - 3)}
    one, two = devices.check_ports(wanted, 1), devices.check_ports(wanted, 2)
    assert (one.status, two.status) == ("warning", "failed"), "one rank needs no port"
    assert str(taken_port) in two.found
    assert "export HCCL_IF_BASE_PORT=" in two.remedy
    assert "asks HCCL for free ones" not in two.found, "with a base port it does not ask"
    advised = two.remedy.partition("HCCL_IF_BASE_PORT=")[2].partition(",")[0]
    assert devices.check_ports({"HCCL_IF_BASE_PORT": advised}, 2).status == "ok", "what it advises works"
    assert devices.check_ports({**wanted, "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, 2).status == "ok"
    assert devices.check_ports({"HCCL_IF_BASE_PORT": "65530"}, 1).status == "failed"


def test_little_shared_memory(tmp_path: Path) -> None:
    assert devices.check_shared_memory(tmp_path, 1, needed_bytes=0).status == "ok"
    little = devices.check_shared_memory(tmp_path, 1, needed_bytes=1 << 60)
    assert little.status == "warning"
    assert "--shm-size" in little.remedy
    assert devices.check_shared_memory(tmp_path, 2, needed_bytes=1 << 60).status == "failed"
    assert devices.check_shared_memory(tmp_path / "none", 1).status == "failed"
