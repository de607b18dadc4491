"""What a process sets for itself, by chip and ranks, however it was started; and what it leaves to its user."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.errors import ConfigError
from npu_runner.platforms.graphs import DecodeForward, GraphCompiler, GraphResourceError, Recorder
from npu_runner.platforms.npu.graph_limit import LimitedGraphCompiler
from npu_runner.platforms.npu.host_settings import (
    check_graph_mode,
    communicator_config,
    most_graphs,
    process_defaults,
    rank_defaults,
)
from tests.cann.environment import has_real_cann, run_python

CHIPS = ("Ascend910B1", "Ascend910_9392", "Ascend950PR_9589", "Ascend310P3")
_AIV = 3


@pytest.mark.parametrize("chip", CHIPS)
def test_only_a2_and_a3_spread_collectives_over_vector_cores(chip: str) -> None:
    config = communicator_config(chip, {}, serves_graphs=True, is_second=False)
    assert config == ({"hccl_op_expansion_mode": _AIV} if chip.startswith(("Ascend910B", "Ascend910_93")) else {})


def test_of_two_communicators_one_is_aiv_and_the_second_is_small() -> None:
    eager = communicator_config(CHIPS[0], {}, serves_graphs=False, is_second=False)
    graphs = communicator_config(CHIPS[0], {}, serves_graphs=True, is_second=True)
    assert eager == {}
    assert graphs["hccl_op_expansion_mode"] == _AIV
    assert 64 <= graphs["hccl_buffer_size"] <= 100


def test_what_the_user_set_is_not_set_again() -> None:
    mine = {"HCCL_OP_EXPANSION_MODE": "", "HCCL_BUFFSIZE": "9", "HCCL_CONNECT_TIMEOUT": "60", "CPU_AFFINITY_CONF": "0",
            "HCCL_HOST_SOCKET_PORT_RANGE": "50000", "HCCL_NPU_SOCKET_PORT_RANGE": "50100"}
    assert communicator_config(CHIPS[1], mine, serves_graphs=True, is_second=True) == {}
    assert rank_defaults(mine) == process_defaults(mine, num_cores=192, num_devices=8) == {}
    assert "HCCL_HOST_SOCKET_PORT_RANGE" not in rank_defaults({"HCCL_IF_BASE_PORT": "50000"})


def test_cores_are_bound_by_the_device_that_it_is_and_only_where_there_are_many() -> None:
    assert process_defaults({}, num_cores=192, num_devices=8) == {"CPU_AFFINITY_CONF": "mode:1,npu_affine:1"}
    assert process_defaults({}, num_cores=8, num_devices=8) == {}


@pytest.mark.parametrize(
    ("chip", "variables", "num_ranks", "limit"),
    [
        ("Ascend910_9392", {}, 2, None),
        ("Ascend910_9392", {"HCCL_OP_EXPANSION_MODE": "AI_CPU"}, 2, 6),
        ("Ascend910_9392", {"HCCL_OP_EXPANSION_MODE": ""}, 2, 6),
        ("Ascend910_9392", {"HCCL_OP_EXPANSION_MODE": "AI_CPU"}, 1, None),
        ("Ascend910B1", {"HCCL_OP_EXPANSION_MODE": "HOST"}, 2, None),
        ("Ascend950PR_9589", {}, 2, 6),
    ],
)
def test_the_ai_cpu_serves_six_graphs(chip: str, variables: dict[str, str], num_ranks: int, limit: int | None) -> None:
    assert most_graphs(chip, variables, num_ranks) == limit


class Doubler(GraphCompiler):
    """Graphs that need no device."""

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        return lambda *inputs: inputs[0] * 2


def test_a_graph_too_many_is_a_want_of_resources() -> None:
    def forward(*inputs: Tensor) -> Tensor:
        raise AssertionError("not run")

    compiler = LimitedGraphCompiler(Doubler(), 2)
    one, two = (compiler.compile(forward, size) for size in (8, 4))
    assert one(torch.ones(1)) == two(torch.ones(1)) == 2
    refused = compiler.compile(forward, 2)
    with pytest.raises(GraphResourceError, match="HCCL_OP_EXPANSION_MODE"):
        refused(torch.ones(1))
    assert compiler.compile(forward, 4)(torch.ones(1)) == 2, "made anew, it is no graph more"


def test_a_limited_compiler_is_the_other_one_in_all_else() -> None:
    """Whatever a compiler may say or do is the other's, not what the contract says of one that does not."""
    told: list[str] = []

    class Talkative(Doubler):
        waits_for_replay = True

        def release(self) -> None:
            told.append("release")

        def recorder(self) -> Recorder:
            told.append("recorder")
            return lambda run: run

    limited = LimitedGraphCompiler(Talkative(), 2)
    assert limited.waits_for_replay
    assert limited.recorder() is not None
    limited.release()
    assert told == ["recorder", "release"]
    contract = {name for name in vars(GraphCompiler) if not name.startswith("_")}
    assert contract <= {*vars(LimitedGraphCompiler), *vars(limited)}, "nothing of it is left to its defaults"


PROGRAM = """
import json, os
import torch.distributed as dist
from npu_runner.platforms import pick_platform

platform = pick_platform("npu")
platform.devices.prepare_process(0, 2)
options = [platform.communicators.options(serves_graphs=is_second, is_second=is_second).hccl_config
           for is_second in (False, True)]
names = ("HCCL_CONNECT_TIMEOUT", "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_OP_EXPANSION_MODE", "PYTORCH_NPU_ALLOC_CONF")
print(json.dumps([options, {name: os.environ.get(name) for name in names}]))
"""


@pytest.mark.npu
@pytest.mark.skipif(has_real_cann(), reason="the chip is chosen here")
@pytest.mark.parametrize("soc", ["Ascend910_9392", "Ascend950PR_9589"])
def test_a_job_without_the_launcher_is_as_safe(soc: str) -> None:
    done = run_python(["-c", PROGRAM], forked=True, soc=soc)
    assert done.returncode == 0, done.stderr
    found: tuple[list[dict[str, Any]], dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    (eager, graphs), variables = found
    assert eager == {}
    assert graphs.get("hccl_op_expansion_mode") == (_AIV if soc.startswith("Ascend910") else None)
    assert graphs["hccl_buffer_size"] <= 100, "the second one is small"
    assert variables == {"HCCL_CONNECT_TIMEOUT": "1200", "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
                         "HCCL_OP_EXPANSION_MODE": None, "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}


ALLOCATOR = """
import json, os
import torch
from npu_runner.errors import ConfigError
from npu_runner.platforms import pick_platform

said = []
try:
    pick_platform("npu").devices.prepare_process(0, 1)
except ConfigError as refusal:
    said.append(str(refusal))
try:
    torch.npu.set_device(0)
    torch.zeros(4, device="npu")
    said.append(torch.npu.memory_reserved())
except RuntimeError as refusal:
    said.append(str(refusal))
print(json.dumps([os.environ.get("PYTORCH_NPU_ALLOC_CONF"), *said]))
"""
GROWS = "expandable_segments:True"


def allocator_with(**variables: str) -> list[Any]:
    done = run_python(["-c", ALLOCATOR], forked=True, **variables)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.npu
@pytest.mark.skipif(has_real_cann(), reason="the environment is chosen here")
def test_a_host_that_exports_torchs_name_of_the_allocators_variable_starts() -> None:
    """3 s. The wheel, 2.13.0, reads both names."""
    ours, reserved = allocator_with(PYTORCH_ALLOC_CONF=GROWS)
    assert ours is None, "what the user has set stays alone"
    assert reserved > 0


@pytest.mark.npu
@pytest.mark.skipif(has_real_cann(), reason="the environment is chosen here")
def test_both_names_of_the_allocators_variable_are_refused_by_name_and_why() -> None:
    """3 s."""
    _, ours, theirs = allocator_with(PYTORCH_ALLOC_CONF="", PYTORCH_NPU_ALLOC_CONF=GROWS)
    assert "PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set" in ours
    assert "unset PYTORCH_ALLOC_CONF" in ours
    assert "please set only one of them" in theirs, "what the wheel itself says"


def test_pinned_memory_that_grows_is_refused_where_graphs_are_captured() -> None:
    grows = {"PYTORCH_NPU_ALLOC_CONF": f"{GROWS}, pin_memory_expandable_segments:true"}
    for fine in ("eager", "max-autotune"):
        check_graph_mode(fine, grows)
    with pytest.raises(ConfigError, match="pin_memory_expandable_segments:True: torch_npu captures no graph"):
        check_graph_mode("reduce-overhead", grows)
