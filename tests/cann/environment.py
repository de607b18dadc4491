"""The environment variables with which a subprocess runs the real torch_npu on the emulated CANN."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

from tests import zygote

from .setup_site import HERE, PRELOADED, SITE, setup

ROOT = HERE.parent.parent


def has_real_cann() -> bool:
    """True on an Ascend host whose toolkit is on the library path: there the real thing is tested."""
    return ctypes.util.find_library("ascendcl") is not None


def installed_wheel() -> Path:
    """The folder into which the emulation's torch_npu is installed; installed first where no test did it yet."""
    setup()
    return SITE


def environment(num_devices: int = 2, memory_bytes: int = 1 << 30, **switches: object) -> dict[str, str]:
    """A copy of this process's environment, plus what the emulation needs; on an Ascend host the copy alone.

    num_devices, memory_bytes: devices a process sees and the bytes each of them has.
    switches: the others by their short names: `environment(fail="aclrtMalloc:3:207001", max_graphs=4)` sets
    CANN_EMU_FAIL and so on (README.md lists them). A name in capitals is set as it is (TASK_QUEUE_ENABLE="0").
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("CANN_EMU")}
    if has_real_cann():
        return env
    libraries = setup()
    paths = [str(HERE / "ge"), str(SITE), *filter(None, [env.get("PYTHONPATH")])]
    env |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries), env.get("LD_LIBRARY_PATH")])),
        "CANN_EMU": "1",
        "CANN_EMU_DEVICES": str(num_devices),
        "CANN_EMU_MEMORY_BYTES": str(memory_bytes),
        # A start compares operators with the CPU: seconds, for each of hundreds of starts. Tests of it say "on".
        "NPU_RUNNER_ASCEND_CASES": "off",
        # Where CI is set, torch refuses what it only warns of elsewhere: tests are as strict everywhere.
        "CI": "1",
    }
    if PRELOADED.exists():
        env["LD_PRELOAD"] = os.pathsep.join([str(PRELOADED), *filter(None, [env.get("LD_PRELOAD")])])
    for name, value in switches.items():
        text = str(int(value)) if isinstance(value, bool) else str(value)
        env[name if name.isupper() else f"CANN_EMU_{name.upper()}"] = text
    return env


def run_python(
    arguments: list[str], *, timeout: float = 300, cwd: Path = ROOT, forked: bool | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Runs this Python with `arguments` under `environment(**options)`; output is captured.

    forked: by a fork of a process that has imported torch_npu (tests/zygote.py), for what is not about the start and
    sets nothing that is read while modules load. Modules of the tests are, by themselves; commands of the package,
    scripts and code start from nothing, as a user's do.
    """
    env = environment(**options)  # type: ignore[arg-type]
    if forked is None:
        forked = arguments[0] == "-m" and arguments[1].startswith("tests.") and cwd == ROOT
    run = zygote.run if forked and not has_real_cann() else subprocess.run
    return run([sys.executable, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout)
