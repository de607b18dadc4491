"""The checks of `npu-runner doctor`, in the order in which one explains the next. Knows nothing of engines or models.

Nothing here imports torch: on a host where torch_npu is installed and CANN is missing that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from npu_runner.platforms.npu.preflight import devices, probes, software
from npu_runner.platforms.npu.preflight.host import Check, Host, run_function
from npu_runner.platforms.npu.versions import cann_version, toolkit_folder


@dataclass(frozen=True)
class Survey:
    """What a host has installed."""

    host: Host
    packages: software.Packages
    libraries: software.Libraries


def survey(host: Host) -> Survey:
    found = run_function(host, probes.packages)
    packages = dict(found.reports[0]) if found.reports else {}
    loaded = run_function(host, probes.libraries)
    libraries = dict(loaded.reports)
    if loaded.error is not None:  # the first library without an answer took the probe down
        libraries |= {name: loaded.error for name in software.LIBRARIES if name not in libraries}
    return Survey(host, packages, libraries)


def signs_of_an_npu(found: Survey) -> list[str]:
    """What makes this an Ascend host, or one that wants to be: empty where nothing does."""
    host, torch_npu = found.host, found.packages.get("torch_npu")
    folder = toolkit_folder(host.environment)
    signs = {
        f"torch_npu {torch_npu} is installed": torch_npu is not None,
        "libascendcl.so loads": found.libraries.get("libascendcl.so", "") is None,
        f"ASCEND_HOME_PATH is {folder}": folder is not None,
        f"{host.device_files}/davinci* exist": bool(devices.device_nodes(host.device_files)),
        f"{host.installation} exists": host.installation.is_dir(),
    }
    return [sign for sign, is_seen in signs.items() if is_seen]


def examine(found: Survey, num_ranks: int = 1, *, is_eager: bool = False) -> Iterator[Check]:
    """Everything about an Ascend host but what is computed on it. is_eager: no graph is asked for."""
    host, packages = found.host, found.packages
    yield software.check_toolkit(host, found.libraries)
    yield software.check_driver(host)
    yield software.check_pair(packages, cann_version(host.environment))
    yield software.check_cann_version(host, packages)
    yield software.check_packages(packages, for_npu=True)
    yield software.check_libatb(host, found.libraries)
    yield from devices.check_variables(host.environment, is_eager=is_eager, torch_npu=packages.get("torch_npu"))
    yield devices.check_shared_memory(host.shared_memory, num_ranks)
    yield devices.check_ports(host.environment, num_ranks)
    if packages.get("torch_npu") is None:
        yield Check("devices", "skipped", "torch_npu, which would see them, is not installed")
        return
    outcome = run_function(host, probes.devices)
    yield devices.check_devices(host, outcome, num_ranks)
    yield devices.check_memory(outcome)
    yield devices.check_chip(outcome)


def examine_without_npu(found: Survey) -> Iterator[Check]:
    """What every platform needs."""
    yield software.check_packages(found.packages, for_npu=False)
    yield software.check_torch(run_function(found.host, probes.torch_itself), found.packages)
