"""Checks of devices, of the host's shared memory and ports, and of variables that contradict each other.

Pure functions of what was found on the host. Knows nothing of what is installed.
"""

from __future__ import annotations

import errno
import re
import shutil
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from npu_runner.platforms.host import Check, Host, Outcome
from npu_runner.platforms.npu import host_settings as alloc
from npu_runner.platforms.npu.preflight.errors import explain
from npu_runner.platforms.npu.preflight.software import import_remedy
from npu_runner.platforms.npu.versions import reads_torchs_alloc_conf

_GIB = 1 << 30
_MIB = 1 << 20
_LEAST_DEVICE_BYTES = 512 * _MIB
_HCCL_BASE_PORT, _HCCL_NUM_PORTS = 60000, 16
_KNOWN_CHIPS = (alloc.A2, alloc.A3)
_OTHER_CHIPS = ("Ascend310", "Ascend910A", "Ascend910ProA", "Ascend910PremiumA")

Environment = Mapping[str, str]


def check_devices(host: Host, outcome: Outcome, num_ranks: int = 1) -> Check:
    """Whether torch_npu loads and sees devices."""
    name = "devices"
    if not outcome.reports:
        return Check(name, "failed", f"torch_npu does not load: {outcome.error}", import_remedy(outcome))
    count = next((report["count"] for report in outcome.reports if "count" in report), None)
    if count == 0:
        return Check(name, "failed", "torch_npu loads and sees no device", _why_no_device(host))
    if count is None or outcome.error is not None:
        working = len(found_devices(outcome))
        remedy = explain(outcome.output) or "npu-smi info shows its health; a killed process may still hold it"
        return Check(name, "failed", f"device {working} does not start: {outcome.error}", remedy)
    asked = visible_devices(host.environment.get("ASCEND_RT_VISIBLE_DEVICES", ""))
    if asked and count < len(asked):
        return Check(name, "failed", f"{count} of the {len(asked)} devices that ASCEND_RT_VISIBLE_DEVICES names",
                     "name devices that exist (npu-smi info); what follows a wrong number is ignored")
    if count < num_ranks:
        return Check(name, "failed", f"{count} visible, {num_ranks} ranks need one each",
                     "lower tensor_parallel_size, or make more devices visible (ASCEND_RT_VISIBLE_DEVICES)")
    return Check(name, "ok", f"{count} visible")


def _why_no_device(host: Host) -> str:
    visible = host.environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is not None:
        return f"unset ASCEND_RT_VISIBLE_DEVICES (it is {visible!r}), or correct it"
    if device_nodes(host.device_files):
        return "npu-smi info must list them; your user must be in the group of /dev/davinci* (HwHiAiUser)"
    return ("there is no /dev/davinci*; in a container: docker run --device /dev/davinci0 "
            "--device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc ...")


def device_nodes(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("davinci*") if re.fullmatch(r"davinci\d+", path.name))


def found_devices(outcome: Outcome) -> list[dict[str, Any]]:
    return [report for report in outcome.reports if "name" in report]


def check_memory(outcome: Outcome) -> Check:
    name, devices = "device memory", found_devices(outcome)
    if not devices:
        return Check(name, "skipped", "no device to ask")
    found = ", ".join(f"{device['free_bytes'] / _GIB:.1f} of {device['total_bytes'] / _GIB:.1f} GiB free"
                      for device in devices)
    remedy = "npu-smi info names the processes that hold it: another job, or ranks that outlived one that was killed"
    if min(device["free_bytes"] for device in devices) < _LEAST_DEVICE_BYTES:
        return Check(name, "failed", f"{found}; the generation below needs {_LEAST_DEVICE_BYTES // _MIB} MiB", remedy)
    if any(device["free_bytes"] < device["total_bytes"] / 2 for device in devices):
        return Check(name, "warning", f"{found}: more than half of a device is taken", remedy)
    return Check(name, "ok", found)


def check_chip(chips: Collection[str]) -> Check:
    """Whether chips of these names are served."""
    name = "chip"
    if not chips:
        return Check(name, "skipped", "no device to ask")
    found = ", ".join(sorted(chips))
    if any(chip.startswith(_OTHER_CHIPS) for chip in chips):
        return Check(name, "failed", f"{found}: the fused attention over a paged cache is for A2 and A3 devices",
                     "use an Atlas A2 (Ascend910B) or A3 (Ascend910_93) device, with an image for that chip")
    if not all(chip.startswith(_KNOWN_CHIPS) for chip in chips):
        return Check(name, "warning", f"{found}: not a chip this was written for (A2, A3)",
                     "compare answers before you trust them; npu-runner doctor --operators is a start")
    return Check(name, "ok", found)


def check_shared_memory(folder: Path, num_ranks: int, needed_bytes: int = _GIB) -> Check:
    """HCCL's ranks and compile workers meet there; docker gives 64 MiB unless told otherwise."""
    name, remedy = "shared memory", "docker run --shm-size=16g, or: mount -o remount,size=16G /dev/shm"
    if not folder.is_dir():
        return Check(name, "failed", f"{folder} is not there", f"mount -t tmpfs tmpfs {folder}")
    free_bytes = shutil.disk_usage(folder).free
    found = f"{free_bytes / _GIB:.2f} GiB free in {folder}"
    if free_bytes < needed_bytes:
        status = "failed" if num_ranks > 1 else "warning"
        return Check(name, status, f"{found}, {needed_bytes / _GIB:.2f} GiB should be", remedy)
    return Check(name, "ok", found)


def check_ports(environment: Environment, num_ranks: int) -> Check:
    """Whether HCCL's ports are free. One job on a host does not notice; the second fails with EJ0003 or EI0019."""
    name = "HCCL ports"
    if environment.get("HCCL_HOST_SOCKET_PORT_RANGE"):
        return Check(name, "ok", f"HCCL_HOST_SOCKET_PORT_RANGE={environment['HCCL_HOST_SOCKET_PORT_RANGE']} decides")
    text = environment.get("HCCL_IF_BASE_PORT", str(_HCCL_BASE_PORT))
    if not text.isdigit() or not 1024 <= int(text) <= 65535 - _HCCL_NUM_PORTS + 1:
        return Check(name, "failed", f"HCCL_IF_BASE_PORT={text!r} is not a port from 1024 to 65520",
                     "unset HCCL_IF_BASE_PORT, or give the first of 16 free ports")
    base = int(text)
    taken = [port for port in range(base, base + _HCCL_NUM_PORTS) if not _is_free(port)]
    if not taken:
        return Check(name, "ok", f"{base} to {base + _HCCL_NUM_PORTS - 1} are free")
    other = next((start for start in range(50000, 59000, 100)
                  if all(_is_free(port) for port in range(start, start + _HCCL_NUM_PORTS))), 50000)
    found = f"{', '.join(map(str, taken))} taken by another job or an outgoing connection; "
    if "HCCL_IF_BASE_PORT" in environment:
        status, found = "failed" if num_ranks > 1 else "warning", f"{found}tensor_parallel_size above 1 fails"
    else:
        status, found = "warning", f"{found}npu-runner asks HCCL for free ones, which an old CANN does not understand"
    return Check(name, status, found,
                 f"export HCCL_IF_BASE_PORT={other}, or HCCL_HOST_SOCKET_PORT_RANGE=auto; sysctl -w "
                 f"net.ipv4.ip_local_reserved_ports={base}-{base + _HCCL_NUM_PORTS - 1} keeps connections away")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def check_variables(environment: Environment, *, is_eager: bool = False, torch_npu: str | None = None) -> list[Check]:
    """Variables that contradict graphs, the allocator or each other; those that are unset are fine.

    is_eager: no graph is asked for, so what forbids graphs only slows this host down. torch_npu: the wheel, if any.
    """
    return [_launch_blocking(environment, is_eager), _task_queue(environment, is_eager),
            _allocator(environment, is_eager, torch_npu), _visible(environment), _expansion_mode(environment)]


def _launch_blocking(environment: Environment, is_eager: bool) -> Check:
    name = "ASCEND_LAUNCH_BLOCKING"
    value = environment.get(name, "")
    if value in ("", "0"):
        return Check(name, "ok", value or "not set")
    return Check(name, "warning" if is_eager else "failed",
                 f"{value}: every operator is waited for, which no graph can capture",
                 f"unset {name}, or run with --enforce-eager while you search for a fault")


def _task_queue(environment: Environment, is_eager: bool) -> Check:
    name = "TASK_QUEUE_ENABLE"
    value = environment.get(name, "")
    if value in ("", "1"):
        return Check(name, "ok", value or "not set (torch_npu takes 1)")
    remedy = f"export {name}=1, or unset it"
    if value == "0":
        return Check(name, "warning", "0: operators are launched one by one, without a queue", remedy)
    if value == "2":
        return Check(name, "warning" if is_eager else "failed", "2: torch_npu captures no graph with it",
                     f"{remedy}, or run with --enforce-eager")
    return Check(name, "failed", f"{value!r} is not 0, 1 or 2", remedy)


def _allocator(environment: Environment, is_eager: bool, torch_npu: str | None) -> Check:
    name, set_here = alloc.VENDORS, [name for name in (alloc.VENDORS, alloc.TORCHS) if name in environment]
    if alloc.refuses_both(environment, torch_npu):
        reader = f"torch_npu {torch_npu} reads" if torch_npu else "torch_npu of TorchNPU 26.2.0 and later reads"
        return Check(name, "failed", f"{' and '.join(set_here)} are both set: {reader} both, and takes one",
                     alloc.ONE_OF_TWO)
    if not set_here:
        return Check(name, "ok", f"not set; npu-runner sets {alloc.WANTED}")
    if torch_npu and alloc.VENDORS not in environment and not reads_torchs_alloc_conf(torch_npu):
        return Check(name, "warning", f"{alloc.TORCHS} is set, which torch_npu {torch_npu} does not read: images of "
                     "ever different sizes fragment the memory", f"export {name}={alloc.WANTED}")
    return _allocator_value(set_here[0], environment[set_here[0]], is_eager)


def _allocator_value(variable: str, value: str, is_eager: bool) -> Check:
    name, found = alloc.VENDORS, value if variable == alloc.VENDORS else f"{variable}={value}"
    entries = alloc.entries(value)
    if entries.get("expandable_segments", "").lower() != "true":
        return Check(name, "warning", f"{found!r} is without {alloc.WANTED}: images of ever different sizes fragment "
                     "the memory", f"export {variable}={alloc.WANTED}, or unset it")
    # torch_npu says so at the first allocation.
    others = [key for key in ("max_split_size_mb", "garbage_collection_threshold") if key in entries]
    if others:
        return Check(name, "failed", f"{found!r}: torch_npu refuses {' and '.join(others)} beside expandable_segments",
                     f"export {variable}={alloc.WANTED}")
    if alloc.has_growing_pinned_memory(value):
        return Check(name, "warning" if is_eager else "failed", f"{found!r}: {alloc.NO_CAPTURE}",
                     f"export {variable}={alloc.WANTED}, or run with --enforce-eager")
    return Check(name, "ok", found)


def _expansion_mode(environment: Environment) -> Check:
    name = "HCCL_OP_EXPANSION_MODE"
    value = environment.get(name)
    if value is None:
        return Check(name, "ok", "not set: npu-runner asks for AIV where the chip has it, in one communicator")
    if value == "AIV":
        return Check(name, "warning", "AIV: max-autotune with ranks has two communicators, HCCL allows it to one; "
                     "no chip but A2 and A3 takes it", f"unset {name}: npu-runner sets it for the one that needs it")
    if value == "AI_CPU":
        return Check(name, "warning", "AI_CPU: a device of A3 then holds 6 graphs with collectives at most",
                     f"unset {name}, unless you know why")
    return Check(name, "ok", value)


def _visible(environment: Environment) -> Check:
    name = "ASCEND_RT_VISIBLE_DEVICES"
    if name not in environment:
        return Check(name, "ok", "not set: every device is visible")
    value = environment[name]
    remedy = f"export {name}=0 or 0,1,2,3 (numbers, commas, no spaces), or unset it"
    if not value:
        return Check(name, "failed", "empty: no device is visible", remedy)
    numbers = visible_devices(value)
    if numbers is None:
        return Check(name, "failed", f"{value!r} is not a list of numbers", remedy)
    if len(set(numbers)) < len(numbers):
        return Check(name, "failed", f"{value!r} names a device twice", remedy)
    return Check(name, "ok", value)


def visible_devices(value: str) -> list[int] | None:
    """The devices that ASCEND_RT_VISIBLE_DEVICES names; None when it is malformed."""
    if not re.fullmatch(r"\d+(,\d+)*", value):
        return None
    return [int(part) for part in value.split(",")]
