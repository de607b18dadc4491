"""Which CANN, driver and chip this host has, and which versions belong together. Imports torch only when asked for it.

The doctor reads this before it knows whether torch can be imported at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# Where the toolkit's own files say its version, below ASCEND_HOME_PATH or ASCEND_TOOLKIT_HOME; the best source first.
_VERSION_FILES = ("*/ascend_toolkit_install.info", "compiler/version.info", "runtime/version.info", "version.cfg")
# `Version=` of a component is its own number (7.6.0.1.220); `version_dir=` beside it is CANN's, and so is what stands
# behind the colon in version.cfg.
_PATTERNS = (
    r"^\s*version_dir\s*=\s*(\d[\w.]*)",
    r"^\s*\w+_running_version\s*=\s*\[[^:\]\n]*:(\d[\w.]*)",
    r"^\s*version\s*=\s*\[?[^\d\n]*(\d[\w.]*)",
)


class Pairing(NamedTuple):
    """Versions that were published for each other; `cann` is a prefix."""

    torch: str
    torch_npu: str
    cann: str


PAIRINGS = (
    Pairing("2.10.0", "2.10.0.post4", "9.1.0"),
    Pairing("2.10.0", "2.10.0", "9.0.0"),
    Pairing("2.9.0", "2.9.0.post2", "9.0.0"),
    Pairing("2.9.0", "2.9.0", "8.5"),
    Pairing("2.8.0", "2.8.0.post2", "8.5.0"),
    Pairing("2.7.1", "2.7.1.post1", "8.3.RC2"),
)


def toolkit_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that the toolkit's set_env.sh names, if it was sourced."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if environment.get(name):
            return Path(environment[name])
    return None


def cann_version(environment: Mapping[str, str] = os.environ) -> str | None:
    """For example "8.5.0"; None when the toolkit's files are not to be found."""
    folder = toolkit_folder(environment)
    if folder is None:
        return None
    for pattern in _VERSION_FILES:
        for path in sorted(folder.glob(pattern)):
            found = _version_in(path)
            if found is not None:
                return found
    return None


def driver_version(folder: Path) -> str | None:
    """For example "25.2.0", from the driver's own folder (/usr/local/Ascend/driver)."""
    path = folder / "version.info"
    return _version_in(path) if path.is_file() else None


def soc_name() -> str:
    """For example "Ascend910B1"."""
    import torch

    return str(torch.npu.get_device_name())


def release(version: str) -> tuple[int, ...]:
    """The leading numbers: (8, 3) of "8.3.RC2", (2, 10, 0) of "2.10.0.post4"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _version_in(path: Path) -> str | None:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    for pattern in _PATTERNS:
        found = re.search(pattern, text, re.IGNORECASE | re.MULTILINE)
        if found:
            return found[1]
    return None
