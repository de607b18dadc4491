"""Which CANN and which chip this host has. Knows nothing of what follows from it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

# Where the toolkit's own files say its version, below ASCEND_HOME_PATH or ASCEND_TOOLKIT_HOME.
_VERSION_FILES = ("compiler/version.info", "runtime/version.info", "version.cfg", "*/ascend_toolkit_install.info")


def toolkit_folder() -> Path | None:
    """The folder that the toolkit's set_env.sh names, if it was sourced."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if os.environ.get(name):
            return Path(os.environ[name])
    return None


def cann_version() -> str | None:
    """For example "8.5.0"; None when the toolkit's files are not to be found."""
    folder = toolkit_folder()
    if folder is None:
        return None
    for pattern in _VERSION_FILES:
        for path in sorted(folder.glob(pattern)):
            found = re.search(r"^\s*version\s*=\s*\[?[^\d\n]*(\d[\w.]*)", path.read_text(errors="replace"),
                              re.IGNORECASE | re.MULTILINE)
            if found:
                return found[1]
    return None


def soc_name() -> str:
    """For example "Ascend910B1"."""
    return str(torch.npu.get_device_name())
