"""The versions of CANN, driver and chip of this host, and which versions belong together. Imports torch only in
functions that need it.

The doctor reads this before it knows whether torch can be imported at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Where the toolkit's own files say its version, below ASCEND_HOME_PATH or ASCEND_TOOLKIT_HOME; the best source first.
_VERSION_FILES = ("*/ascend_toolkit_install.info", "compiler/version.info", "runtime/version.info", "version.cfg")
# `Version=` of a component is its own number (7.6.0.1.220); `version_dir=` beside it is CANN's, and so is what stands
# behind the colon in version.cfg.
_PATTERNS = (
    r"^\s*version_dir\s*=\s*(\d[\w.-]*)",
    r"^\s*\w+_running_version\s*=\s*\[[^:\]\n]*:(\d[\w.-]*)",
    r"^\s*version\s*=\s*\[?[^\d\n]*(\d[\w.-]*)",
)


class Pairing(NamedTuple):
    """Versions that were published for each other."""

    torch: str
    torch_npu: str
    cann: str


# The wheels published for each CANN, the newest of a torch first: TorchNPU 26.2.0, 26.1.1 and 26.1.0, 26.0.0, by their
# compatibility tables; docs/ascend.md says why five that are in none stand with 26.0.0. The one list of versions: tests
# compare the documents' table, requirements-npu.txt and the doctor's remedies with it.
_PUBLISHED = {
    "9.2.0": ("2.14.0", "2.13.0", "2.12.0.post3", "2.11.0.post3", "2.10.0.post7", "2.9.0.post9", "2.7.1.post11"),
    "9.1.0": ("2.12.0.post2", "2.12.0", "2.11.0.post2", "2.11.0", "2.10.0.post6", "2.10.0.post4", "2.9.0.post8",
              "2.9.0.post6", "2.7.1.post10", "2.7.1.post8"),
    "9.0.0": ("2.10.0.post2", "2.10.0", "2.9.1", "2.9.0.post4", "2.9.0.post2", "2.8.0.post5", "2.8.0.post4",
              "2.7.1.post6", "2.7.1.post4"),
}
PAIRINGS = tuple(Pairing(torch_npu.partition(".post")[0], torch_npu, cann)
                 for cann, wheels in _PUBLISHED.items() for torch_npu in wheels)
SHIPPED = (Pairing("2.10.0", "2.10.0.post4", "9.2.0"),)
"""Pairs of other releases that images hold: those of vllm-ascend 0.30, with CANN 9.2.0 and 9.2.1."""
OLD_WHEELS = ("2.9.0", "2.8.0.post2", "2.8.0", "2.7.1.post2", "2.7.1")
"""Wheels of CANN 8.3 and 8.5. They lack what is called here; tests/npu/operator_table has the proof."""
WHEELS_FOR_85 = _PUBLISHED["9.2.0"]
"""The wheels of TorchNPU 26.2.0, whose notes name CANN 8.5 as supported. Notes of earlier releases do not."""
_TORCH_FOR_85 = "2.9.0"  # that of CANN 8.5's own images
_CANN_85, _OLDEST_OTHER_CANN = (8, 5), (9, 0)
# The first of each torch whose library holds the name PYTORCH_ALLOC_CONF; of 2.9.0.post9 and 2.7.1.post11 none does.
_READ_TORCHS_ALLOC_CONF = ("2.14.0", "2.13.0", "2.12.0.post3", "2.11.0.post3", "2.10.0.post7")

# A wheel without it writes the cache in another layout (PA_NZ), and takes the keyword for an error.
_NO_CACHE_MODE = "its npu_scatter_pa_kv_cache has no cache_mode, so the paged KV cache cannot be written as it is read"
_NEWER_WHEEL = f"take a torch_npu for CANN 9: {', '.join(pair.torch_npu for pair in PAIRINGS)}"
_NEWER_CANN = f"install CANN {', '.join(_PUBLISHED)} or 8.5"


class TooOld(NamedTuple):
    """The fault of a version, and the remedy."""

    reason: str
    remedy: str


def old_wheel(torch_npu: str, *, has_cache_mode: bool | None = None) -> TooOld | None:
    """Whether this torch_npu is too old; `has_cache_mode`: from its operator's schema, None if torch_npu was not
    loaded."""
    is_old = _is_old_wheel(torch_npu) if has_cache_mode is None else not has_cache_mode
    return TooOld(f"torch_npu {torch_npu}: {_NO_CACHE_MODE}", _NEWER_WHEEL) if is_old else None


def old_cann(cann: str | None, torch_npu: str | None = None, torch: str | None = None) -> TooOld | None:
    """Whether this CANN is too old, by itself or for the installed wheel (None: any); one that is not known is not."""
    if cann is None or release(cann)[:2] >= _OLDEST_OTHER_CANN:
        return None
    if not is_85(cann):
        return TooOld(f"CANN {cann}: older than 8.5, or between 8.5 and 9.0; its operators were never compared with "
                      "those that are called here", _NEWER_CANN)
    if "alpha" in cann.lower():
        return TooOld(f"CANN {cann}: operators of an alpha are not those of the release, its rotary and attention "
                      "operators refuse layouts that are called here", "install CANN 8.5.0 or newer without alpha")
    if torch_npu is not None and _order(torch_npu) not in map(_order, WHEELS_FOR_85):
        return TooOld(f"torch_npu {torch_npu} on CANN {cann}: only wheels of TorchNPU 26.2.0 are taken there "
                      f"({', '.join(WHEELS_FOR_85)})", recipe_for_85(torch))
    return None


def is_85(cann: str | None) -> bool:
    """Whether this CANN is 8.5, of which less is served (cann85.py)."""
    return cann is not None and release(cann)[:2] == _CANN_85


def recipe_for_85(torch: str | None) -> str:
    """The commands that give a host with CANN 8.5 a supported wheel. CANN and torch of the image stay."""
    wheel = wheel_for(plain(torch), "8.5.0") if torch else None
    # Where no wheel of that release is made for the torch that is here, torch is another one, too.
    what = f"torch_npu=={wheel}" if wheel else f"torch=={_TORCH_FOR_85} torch_npu=={wheel_for(_TORCH_FOR_85, '8.5.0')}"
    install = f"VENV/bin/pip install --no-deps {what}"
    return f"python3 -m venv --system-site-packages VENV && {install} (CANN stays the image's)"


def reads_torchs_alloc_conf(torch_npu: str) -> bool:
    """Whether this torch_npu reads PYTORCH_ALLOC_CONF beside PYTORCH_NPU_ALLOC_CONF."""
    first = {release(wheel): _order(wheel) for wheel in _READ_TORCHS_ALLOC_CONF}
    return _order(torch_npu) >= first.get(release(torch_npu), max(first.values()))


def accepts_argument(operator: Any, name: str) -> bool:
    """Whether this overload of a torch operator has an argument called so."""
    return any(argument.name == name for argument in operator._schema.arguments)


def wheel_for(torch: str, cann: str | None) -> str | None:
    """The torch_npu that was published for this torch, and for this CANN where there is one."""
    fitting = [pair for pair in PAIRINGS
               if pair.torch == torch and (not is_85(cann) or pair.torch_npu in WHEELS_FOR_85)]
    exact = [pair for pair in fitting if cann is not None and cann.startswith(pair.cann)]
    return next((pair.torch_npu for pair in exact or fitting), None)


def _is_old_wheel(torch_npu: str) -> bool:
    same_torch = [_order(pair.torch_npu) for pair in PAIRINGS if release(pair.torch) == release(torch_npu)]
    return _order(torch_npu) < min(same_torch or [_order(pair.torch_npu) for pair in PAIRINGS])


def _order(torch_npu: str) -> tuple[tuple[int, ...], int]:
    post = re.search(r"\.post(\d+)", torch_npu)
    return release(torch_npu), int(post[1]) if post else 0


def plain(version: str) -> str:
    """Without what stands behind a plus: 2.10.0+cpu."""
    return version.partition("+")[0]


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
    """The chip's name, such as "Ascend910B1"."""
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
