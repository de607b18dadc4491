"""The checks of `npu-runner doctor` on an Ascend host, in the order in which one explains the next.

No check imports torch: where torch_npu is installed and CANN is missing that fails. What may crash is a probe, which
runs in a process of its own: it imports what it needs, and appends its findings to a file as it goes, so that what came
before a crash is known. Knows nothing of engines or models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from npu_runner.platforms.examination import RUNNER_NEEDS, Examination, Signs, check_packages
from npu_runner.platforms.host import Check, Outcome, run_function
from npu_runner.platforms.npu import cann85
from npu_runner.platforms.npu.preflight import devices, software
from npu_runner.platforms.npu.preflight.errors import explain
from npu_runner.platforms.npu.preflight.vendor_packages import check_vendor_packages
from npu_runner.platforms.npu.versions import cann_version, is_85, toolkit_folder

_OFFLINE = "install.sh of a wheelhouse (docs/running-on-ascend.md)"
_IF_SLOW = "give a longer --timeout; else a device hangs (npu-smi info), or one rank waits for another"
_IF_UNKNOWN = "see the failed checks above; docs/running-on-ascend.md has a table of error codes"


class NpuExamination(Examination):
    checks_layers = True
    if_wrong = "compare torch, torch_npu and CANN with the version table, and report it with this output"
    needs = ("devices",)
    operator_cases = ("npu_runner.platforms.npu.cases:operators", "npu_runner.platforms.npu.cases:graphs_and_ranks")
    log_variable = "ASCEND_PROCESS_LOG_PATH"
    reports = MappingProxyType({"npu-smi": ("npu-smi", "info"), "health": ("npu-smi", "info", "-t", "health")})

    @cached_property
    def libraries(self) -> software.Libraries:
        """The vendor's libraries, up to the first that the loader refuses."""
        loaded = run_function(self.host, probe_libraries)
        libraries = dict(loaded.reports)
        if loaded.error is not None:  # the first library without an answer took the probe down
            libraries |= {name: loaded.error for name in software.LIBRARIES if name not in libraries}
        return libraries

    def signs(self) -> Signs:
        """The signs of an Ascend host, or of one that should be."""
        host, torch_npu = self.host, self.packages.get("torch_npu")
        folder, ascend = toolkit_folder(host.environment), software.ascend_folder(host)
        signs = {
            f"torch_npu {torch_npu} is installed": torch_npu is not None,
            "libascendcl.so loads": self.libraries.get("libascendcl.so", "") is None,
            f"ASCEND_HOME_PATH is {folder}": folder is not None,
            f"{host.device_files}/davinci* exist": bool(devices.device_nodes(host.device_files)),
            f"{ascend} exists": ascend.is_dir(),
        }
        seen = "; ".join(sign for sign, is_seen in signs.items() if is_seen)
        return Signs(bool(seen), seen or "no torch_npu, no CANN, no /dev/davinci*")

    def examine(self, num_ranks: int = 1, *, is_eager: bool = False) -> Iterator[Check]:
        host, packages = self.host, self.packages
        yield software.check_toolkit(host, self.libraries)
        yield software.check_driver(host, is_eager=is_eager)
        yield software.check_pair(packages, cann_version(host.environment))
        yield software.check_cann_version(host, packages)
        check = check_packages(packages, tuple(dict.fromkeys((*RUNNER_NEEDS, *software.TORCHAIR_NEEDS))),
                               "npu-runner and torchair import", f" (on an Ascend host: {software.IMAGE})")
        yield check if check.status == "ok" else replace(check, remedy=f"{check.remedy}; without internet: {_OFFLINE}")
        yield software.check_libatb(host, self.libraries)
        yield check_vendor_packages(host.environment)
        yield from devices.check_variables(host.environment, is_eager=is_eager, torch_npu=packages.get("torch_npu"))
        yield devices.check_shared_memory(host.shared_memory, num_ranks)
        yield devices.check_ports(host.environment, num_ranks)
        if packages.get("torch_npu") is None:
            yield Check("devices", "skipped", "torch_npu, which would see them, is not installed")
            return
        outcome = run_function(host, probe_devices)
        yield devices.check_devices(host, outcome, num_ranks)
        yield devices.check_memory(outcome)
        chips = {device["name"] for device in devices.found_devices(outcome)}
        yield devices.check_chip(chips)
        yield software.check_kernels(host, chips)

    def computes(self, dtype: str, *, is_dense: bool) -> bool:
        return not self._is_85 or (is_dense and dtype == cann85.DTYPE)

    def why_no_embedded(self) -> str:
        return ("the embedded models have head dim 32, on CANN 8.5 head dim 128 is served; npu-runner generate --model "
                "asks another one") if self._is_85 else ""

    @property
    def _is_85(self) -> bool:
        return is_85(cann_version(self.host.environment))

    def why_torch_fails(self, outcome: Outcome) -> str:
        is_installed = self.packages.get("torch_npu") is not None
        return f"torch loads torch_npu by itself: {software.import_remedy(outcome)}" if is_installed else ""

    def explain(self, outcome: Outcome, otherwise: str = _IF_UNKNOWN) -> str:
        return explain(outcome.output) or (_IF_SLOW if outcome.is_timeout else otherwise)


def probe_libraries(reports: str) -> None:
    """The vendor's libraries: their name, and the loader's message, or None if they load."""
    import ctypes
    import json

    for name in ("libascendcl.so", "libhccl.so", "libatb.so"):
        reason = None
        try:
            ctypes.CDLL(name)
        except OSError as error:
            reason = str(error)
        with open(reports, "a") as file:
            file.write(json.dumps([name, reason]) + "\n")


def probe_devices(reports: str) -> None:
    """The devices that torch_npu sees, one by one."""
    import json

    import torch
    import torch_npu

    def report(value: object) -> None:
        with open(reports, "a") as file:
            file.write(json.dumps(value) + "\n")

    report({"torch": torch.__version__, "torch_npu": torch_npu.__version__})
    report({"count": torch.npu.device_count()})
    for index in range(torch.npu.device_count()):
        torch.npu.set_device(index)
        free_bytes, total_bytes = torch.npu.mem_get_info(index)
        report({"name": torch.npu.get_device_name(index), "free_bytes": free_bytes, "total_bytes": total_bytes})
