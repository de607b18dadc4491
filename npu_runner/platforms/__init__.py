"""One folder per vendor; everybody above asks the platform for a thing and never which platform it is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from npu_runner.errors import ConfigError

if TYPE_CHECKING:  # it imports torch, which the doctor must do without
    from npu_runner.platforms.base import Platform

_HOMES = {
    "npu": "npu_runner.platforms.npu.platform:NpuPlatform",
    "cuda": "npu_runner.platforms.cuda.platform:CudaPlatform",
    "cpu": "npu_runner.platforms.cpu.platform:CpuPlatform",
}


def pick_platform(name: str) -> Platform:
    """The platform called `name`; "auto" takes the first usable in the order of the table above.

    Raises ConfigError with the reason when the named one cannot be used on this host.
    """
    candidates = list(_HOMES) if name == "auto" else [name]
    reasons = []
    for candidate in candidates:
        found = platform_class(candidate)
        reason = found.why_unavailable()
        if reason is None:
            return found()
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(f"platform {name!r} cannot be used here ({'; '.join(reasons)})")


def platform_class(name: str) -> type[Platform]:
    """The class of the platform called `name`, whether this host can use it or not."""
    module, attribute = _HOMES[name].split(":")
    found: type[Platform] = getattr(importlib.import_module(module), attribute)
    return found
