"""The environment variables that a process on an Ascend host needs, by chip. Decides; changes nothing. Imports no
torch.

Whatever the user has set stays, an empty value too. What must stand before Python starts is in scripts/run_ascend.sh.
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_runner.errors import ConfigError
from npu_runner.platforms.npu.versions import reads_torchs_alloc_conf

A2, A3 = "Ascend910B", "Ascend910_93"
"""Prefixes of the names of the chips that have fused attention over a paged cache."""

# Fewer cores for each device than this are needed by preprocessing; binding would only shrink its share.
_LEAST_CORES_TO_BIND = 16
# HCCL's documents: with collectives on the AI CPU no more than six graphs of a device may hold some.
_MOST_GRAPHS_ON_AI_CPU = 6
_AIV = 3  # HcclCommConfig.hcclOpExpansionMode
_GRAPH_BUFFER_MIB = 64

# The variables that torch_npu's allocator of device memory reads. Wheels of TorchNPU 26.2.0 for torch 2.10 and later
# also read torch's own name; where both are set, empty or not, they do not start. Older ones read the vendor's alone.
VENDORS, TORCHS = "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
# Segments that grow lose less memory to images of ever different sizes.
WANTED = "expandable_segments:True"
_PINNED = "pin_memory_expandable_segments"
NO_CAPTURE = f"{_PINNED}:True: torch_npu captures no graph with it"
ONE_OF_TWO = f"unset {TORCHS}, and keep {VENDORS}={WANTED}"

Environment = Mapping[str, str]


def process_defaults(environment: Environment, *, num_cores: int, num_devices: int) -> dict[str, str]:
    """Variables for every process, read when its device starts; those that the user has set are not among them."""
    wanted = {}
    if num_cores >= _LEAST_CORES_TO_BIND * max(1, num_devices):
        # Threads stay near the device that they launch to. Without npu_affine torch_npu cuts the cores by the number of
        # the device as this process sees it, and two jobs that each see one device share the same cores.
        wanted["CPU_AFFINITY_CONF"] = "mode:1,npu_affine:1"
    return _unset(wanted, environment)


def rank_defaults(environment: Environment) -> dict[str, str]:
    """Variables for a process that is one of several ranks, read by HCCL when the first communicator is made."""
    # Ranks read a large checkpoint at different speeds; with the 120 seconds of HCCL the quick ones give up (EI0006).
    wanted = {"HCCL_CONNECT_TIMEOUT": "1200"}
    if "HCCL_IF_BASE_PORT" not in environment:
        # As shipped HCCL takes fixed ports (60000 and up, 16666 on the device): two jobs of one host meet there.
        wanted |= dict.fromkeys(("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"), "auto")
    return _unset(wanted, environment)


def communicator_config(chip: str, environment: Environment, *, serves_graphs: bool, is_second: bool) -> dict[str, int]:
    """HCCL's settings of one communicator: `hccl_config` of torch_npu's process group options."""
    config = {}
    if serves_graphs and chip.startswith((A2, A3)) and "HCCL_OP_EXPANSION_MODE" not in environment:
        # Collectives run on the vector cores: shorter for the small ones of a decode step. Only one communicator may do
        # so, hence not by the variable; and no other chip supports it (950: a system error).
        config["hccl_op_expansion_mode"] = _AIV
    if is_second and "HCCL_BUFFSIZE" not in environment:
        # Each communicator takes twice this of the device, 200 MiB unless told; a decode step's activations are small.
        config["hccl_buffer_size"] = _GRAPH_BUFFER_MIB
    return config


def most_graphs(chip: str, environment: Environment, num_ranks: int) -> int | None:
    """The most decode graphs that a device can hold; None: no such limit."""
    if num_ranks == 1 or chip.startswith(A2):
        return None  # collectives of A2 are laid out on the host or the vector cores, never on the AI CPU
    mode = environment.get("HCCL_OP_EXPANSION_MODE", "AIV" if chip.startswith(A3) else "")
    return None if mode == "AIV" else _MOST_GRAPHS_ON_AI_CPU


def check_graph_mode(graph_mode: str, environment: Environment) -> None:
    """Raises ConfigError for a variable with which graphs of this mode cannot be made."""
    if graph_mode == "eager":
        return
    if environment.get("ASCEND_LAUNCH_BLOCKING", "") not in ("", "0"):
        raise ConfigError(f"ASCEND_LAUNCH_BLOCKING={environment['ASCEND_LAUNCH_BLOCKING']}: every operator is waited "
                          f"for, which no graph can capture (graph_mode {graph_mode}); unset it, or set enforce_eager")
    if graph_mode == "reduce-overhead" and environment.get("TASK_QUEUE_ENABLE") == "2":
        raise ConfigError("TASK_QUEUE_ENABLE=2: torch_npu captures no graph with it (graph_mode reduce-overhead); "
                          "export TASK_QUEUE_ENABLE=1, or set enforce_eager")
    if graph_mode == "reduce-overhead":
        check_pinned_memory(environment)


def allocator_defaults(environment: Environment) -> dict[str, str]:
    """Read when the allocator starts. Where the user has set either name, ours would be the second."""
    return {} if VENDORS in environment or TORCHS in environment else {VENDORS: WANTED}


def check_allocator(environment: Environment, torch_npu: str) -> None:
    """Raises ConfigError for two names where the wheel reads both: now, and not by ERR01003 where the device starts."""
    if refuses_both(environment, torch_npu):
        raise ConfigError(f"{VENDORS} and {TORCHS} are both set: torch_npu {torch_npu} reads both, and takes one; "
                          f"{ONE_OF_TWO}")


def check_pinned_memory(environment: Environment) -> None:
    """Raises ConfigError for pinned memory that no capture goes with."""
    for name in (VENDORS, TORCHS):
        if has_growing_pinned_memory(environment.get(name, "")):
            raise ConfigError(f"{name}: {NO_CAPTURE} (graph_mode reduce-overhead); take it out, or set enforce_eager")


def refuses_both(environment: Environment, torch_npu: str | None) -> bool:
    """torch_npu: None where it is not installed; a wheel that comes will be a new one."""
    return VENDORS in environment and TORCHS in environment and (
        torch_npu is None or reads_torchs_alloc_conf(torch_npu))


def entries(value: str) -> dict[str, str]:
    """The settings in a variable's value."""
    return dict(entry.partition(":")[::2] for entry in value.replace(" ", "").split(",") if entry)


def has_growing_pinned_memory(value: str) -> bool:
    return entries(value).get(_PINNED, "").lower() == "true"


def _unset(wanted: dict[str, str], environment: Environment) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name not in environment}
