"""A start's knowledge of this host's operators: findings of a model's cases, made once for each wheel, CANN, driver,
chip, vendor package and source of ours, and kept in a folder. Knows no case.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from npu_runner.errors import ConfigError
from npu_runner.platforms.cases import Finding, choose, run_cases
from npu_runner.platforms.host import Host
from npu_runner.platforms.npu import cann85
from npu_runner.platforms.npu.kernels import WITHOUT
from npu_runner.platforms.npu.preflight.devices import check_chip
from npu_runner.platforms.npu.preflight.errors import PASSING, explain
from npu_runner.platforms.npu.preflight.software import ascend_folder
from npu_runner.platforms.npu.preflight.vendor_packages import check_vendor_packages, vendor_libraries
from npu_runner.platforms.npu.settings import npu_settings
from npu_runner.platforms.npu.versions import cann_version, driver_version, is_85
from npu_runner.platforms.platform import ModelNeeds

logger = logging.getLogger(__name__)

_SOURCE = "npu_runner.platforms.npu.cases:of_model"
_FOLDER = Path("~/.cache/npu_runner/cases")
_SECONDS = 600.0


@functools.cache
def check_host() -> None:
    """Once, warn of an untried chip and of vendors' operators; raises ConfigError for a chip that is not served."""
    for check in (check_chip([name for name in (_chip(),) if name]), check_vendor_packages(os.environ)):
        if check.status == "failed":
            raise ConfigError(f"{check.name}: {check.found}; {check.remedy}")
        if check.status == "warning":
            logger.warning("%s: %s; %s", check.name, check.found, check.remedy)


@functools.cache
def fallbacks_for(needs: ModelNeeds) -> Mapping[str, str]:
    """`Platform.fallbacks` of this host for a model; once, a warning for each.

    Raises ConfigError with the name of an operator that computes otherwise than the CPU, where nothing else is right.
    """
    asked = json.dumps(asdict(needs), sort_keys=True)
    path = _FOLDER.expanduser() / f"{hashlib.sha256(json.dumps([_host(), asked]).encode()).hexdigest()[:32]}.json"
    findings = _findings(asked, path)
    try:
        chosen, reasons = choose(findings)
    except ConfigError as error:
        remedy = explain(str(error)) or "npu-runner doctor --operators tries each by itself"
        if is_85(cann_version()):
            remedy = f"{remedy}; {cann85.REMEDY}"
        raise ConfigError(f"CANN {cann_version()}: {error}; {remedy}. NPU_RUNNER_ASCEND_CASES=off starts all the same, "
                          "and answers may be wrong") from error
    _keep(findings, path)
    chosen = {job: kernel or WITHOUT[job] for job, kernel in chosen.items()}
    for reason in reasons:
        logger.warning("CANN %s: %s", cann_version(), reason)
    for job, kernel in chosen.items():
        logger.warning("%s: %s instead, for the operator above; npu-runner doctor --operators reports on all", job,
                       kernel)
    return chosen


def _findings(asked: str, path: Path) -> tuple[Finding, ...]:
    """Kept ones, or those of a child."""
    try:
        return tuple(Finding(**each) for each in json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        logger.info("operators are compared with the CPU")
    return tuple(run_cases(Host(), "npu", _SOURCE, json.loads(asked), _SECONDS))


def _keep(findings: tuple[Finding, ...], path: Path) -> None:
    """For other starts, unless a case failed in a way that may not come again."""
    if path.exists():
        return
    passing = [each.case for each in findings if not each.is_right and (
        each.verdict in ("crashed", "left out") or PASSING.search(each.message))]
    if passing:
        logger.warning("operators are compared again at the next start, as this may not come again: %s",
                       "; ".join(passing))
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps([asdict(each) for each in findings]))
        whole.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): operators are compared again at the next start", path, error)


def _host() -> dict[str, str | None]:
    """Everything that may change a finding."""
    own = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        own.update(path.read_bytes())
    return {"torch_npu": importlib.metadata.version("torch_npu"), "cann": cann_version(),
            "driver": driver_version(ascend_folder(Host()) / "driver"), "chip": _chip(), "npu_runner": own.hexdigest(),
            "settings": repr(npu_settings()),
            "vendors": repr([(each, each.stat().st_mtime_ns) for each in vendor_libraries(os.environ)])}


def _chip() -> str | None:
    """Its name, without a device being set in this process."""
    try:
        name = ctypes.CDLL("libascendcl.so").aclrtGetSocName
    except (OSError, AttributeError):
        return None
    name.restype = ctypes.c_char_p
    found: bytes | None = name()
    return None if found is None else found.decode()
