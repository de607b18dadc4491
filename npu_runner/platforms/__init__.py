"""The available platforms: our own three, and those of installed packages. Knows no vendor and imports no torch.

A platform of another package is an entry point of the group `npu_runner.platforms`: its name is the platform's, its
value a `Platform` subclass. A platform's module is imported when that platform, or "auto", is selected.
"""

from __future__ import annotations

import functools
import glob
import importlib
import logging
import os
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from npu_runner.errors import ConfigError
from npu_runner.platforms.platform import Platform

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "npu_runner.platforms"
AUTO = "auto"
# By their files, so that a checkout without metadata has them too.
BUILT_IN = {
    "npu": "npu_runner.platforms.npu.platform:NpuPlatform",
    "cuda": "npu_runner.platforms.cuda.platform:CudaPlatform",
    "cpu": "npu_runner.platforms.cpu.platform:CpuPlatform",
}


def pick_platform(name: str) -> Platform:
    """The platform called `name`, ready for use; "auto" takes the first of `platforms()` that is usable.

    Raises ConfigError with the reason when the named one cannot be used on this host. "auto" passes over no platform
    whose devices are there: a job for them would compute elsewhere for days, and look right.
    """
    reasons = []
    for found in platforms() if name == AUTO else [find_platform(name)]:
        reason = found.why_unavailable()
        if reason is None:
            found.devices  # noqa: B018 - made now: it refuses versions that are too old
            return found
        if name == AUTO and (devices := device_files_of(found)):
            raise ConfigError(f"platform auto: this host has {found.name} devices ({', '.join(devices)}), and they "
                              f"cannot be used: {reason}. To compute without them, name a platform (--platform cpu)")
        reasons.append(f"{found.name}: {reason}")
    raise ConfigError(f"platform {name!r} cannot be used here ({'; '.join(reasons)})")


def device_files_of(platform: Platform) -> list[str]:
    """The files of devices that this process is meant to see. Where there are some, `auto` takes no platform below.
    A variable that lists no device hides them all on purpose."""
    are_hidden = os.environ.get(platform.visible_devices or "", "-").strip() == ""
    return [] if platform.device_files is None or are_hidden else sorted(glob.glob(platform.device_files))


def platform_of_host(name: str) -> Platform:
    """The platform called `name`; "auto" means the first whose devices have files here. Imports no vendor's package."""
    with_devices = (each for each in platforms() if device_files_of(each))
    return next(with_devices, reference_platform()) if name == AUTO else find_platform(name)


def reference_platform() -> Platform:
    """The one that others' layers are compared with: torch's plain operators, on any host."""
    return find_platform("cpu")


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` is auto or a platform's. Imports no platform."""
    if name != AUTO and name not in BUILT_IN and name not in _installed():
        raise ConfigError(f"platform: {name!r} is not one of {', '.join((AUTO, *platform_names()))}"
                          f"{_about_devices(name)}")


def _about_devices(name: str) -> str:
    """The remedy for a name such as cuda:1: the variable that chooses a platform's devices."""
    platform, colon, number = name.partition(":")
    if not colon or platform not in platform_names() or (variable := find_platform(platform).visible_devices) is None:
        return ""
    return f"; to choose a device set {variable}={number or 0} before the program starts, and platform {platform}"


def platform_names() -> tuple[str, ...]:
    """Our own, then those of installed packages."""
    return (*BUILT_IN, *sorted(_installed()))


def platforms() -> list[Platform]:
    """All of them, highest priority first, whether this host can use them or not.

    One that does not load is left out with a warning: a broken package must not disable ours.
    """
    found = []
    for name in platform_names():
        try:
            found.append(find_platform(name))
        except ConfigError as error:
            logger.warning("%s; it is left out", error)
    return sorted(found, key=lambda platform: -platform.priority)


def find_platform(name: str) -> Platform:
    """The platform called `name`, whether this host can use it or not. Raises ConfigError where there is none."""
    check_name(name)
    target = BUILT_IN.get(name) or _installed()[name].value
    try:
        found = load(target)
    except Exception as error:
        raise ConfigError(f"platform {name!r} ({target}) does not load ({type(error).__name__}: {error})") from error
    if not (isinstance(found, type) and issubclass(found, Platform)):
        raise ConfigError(f"platform {name!r}: entry point {target} is not a Platform subclass")
    if found.name != name:
        raise ConfigError(f"platform {name!r}: {target} calls itself {found.name!r}; both names must be the same")
    return found()


def load(target: str) -> Any:
    """Import the object that "MODULE:NAME" names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _installed() -> dict[str, EntryPoint]:
    """Entry points of other packages by name. One with the name of ours is refused, with a warning."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    for name in points.keys() & BUILT_IN.keys():
        logger.warning("the entry point %s of group %s has the name of a platform of ours, and is left out",
                       points.pop(name).value, ENTRY_POINT_GROUP)
    points.pop(AUTO, None)
    return points
