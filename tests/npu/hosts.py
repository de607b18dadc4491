"""Hosts with a toolkit, and hosts with nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npu_runner.platforms.host import Host


def toolkit(folder: Path, version: str) -> dict[str, str]:
    """A toolkit's folder as CANN installs it: what torch_npu asks for, and the file that says its version."""
    for name in ("runtime", "compiler", "opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b", "aarch64-linux"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "aarch64-linux/ascend_toolkit_install.info").write_text(
        f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100R001C25\narch=aarch64\n"
    )
    return {"ASCEND_HOME_PATH": str(folder), "ASCEND_OPP_PATH": str(folder / "opp")}


def empty_host(folder: Path, **changes: Any) -> Host:
    """A host on which nothing was installed, but Python and what this Python has."""
    settings = {"software": folder, "device_files": folder / "dev", **changes}
    return Host(**settings)
